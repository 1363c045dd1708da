"""RSL-RL's on-policy data path as native TorchRL components."""

from torchrl_rslstorage.collectors import EpisodeStatistics, RolloutCollector
from torchrl_rslstorage.data import (
    FinalObservations,
    MiniBatchSampler,
    RolloutBuffer,
    RolloutSampler,
    RolloutTensorStorage,
    RolloutWriter,
    Trajectories,
    TrajectorySampler,
    pad,
    plan_trajectories,
    unpad,
)
from torchrl_rslstorage.envs import GymnasiumEnv, PendulumEnv, make_env
from torchrl_rslstorage.modules import (
    ActorCritic,
    DiagonalGaussian,
    EmpiricalNormalizer,
    GaussianActor,
    MLPActor,
    MLPCritic,
    ObservationModule,
    RNNActor,
    RNNCritic,
    ValueCritic,
)
from torchrl_rslstorage.objectives import RolloutGAE, RSLPPOLoss, normalize_advantage
from torchrl_rslstorage.rsl_rl import RolloutStorage, RSLRLPatch, patch_rsl_rl
from torchrl_rslstorage.trainers import (
    KLAdaptiveStepper,
    PPOConfig,
    RSLPPOTrainer,
    RunFolder,
    RunFolderError,
)

__all__ = [
    "ActorCritic",
    "DiagonalGaussian",
    "EmpiricalNormalizer",
    "EpisodeStatistics",
    "FinalObservations",
    "GaussianActor",
    "GymnasiumEnv",
    "KLAdaptiveStepper",
    "MLPActor",
    "MLPCritic",
    "MiniBatchSampler",
    "ObservationModule",
    "PPOConfig",
    "PendulumEnv",
    "RNNActor",
    "RNNCritic",
    "RSLPPOLoss",
    "RSLPPOTrainer",
    "RSLRLPatch",
    "RolloutBuffer",
    "RolloutCollector",
    "RolloutGAE",
    "RolloutSampler",
    "RolloutStorage",
    "RolloutTensorStorage",
    "RolloutWriter",
    "RunFolder",
    "RunFolderError",
    "Trajectories",
    "TrajectorySampler",
    "ValueCritic",
    "make_env",
    "normalize_advantage",
    "pad",
    "patch_rsl_rl",
    "plan_trajectories",
    "unpad",
]
