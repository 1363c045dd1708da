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
from torchrl_rslstorage.motions import MotionClip, MotionDataset, read_motion
from torchrl_rslstorage.objectives import RolloutGAE, RSLPPOLoss, normalize_advantage
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
    "MotionClip",
    "MotionDataset",
    "ObservationModule",
    "PPOConfig",
    "PendulumEnv",
    "RNNActor",
    "RNNCritic",
    "RSLPPOLoss",
    "RSLPPOTrainer",
    "RolloutBuffer",
    "RolloutCollector",
    "RolloutGAE",
    "RolloutSampler",
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
    "plan_trajectories",
    "read_motion",
    "unpad",
]
