"""RSL-RL's on-policy data path as native TorchRL components."""

from torchrl_rslstorage.data import (
    FinalObservations,
    MiniBatchSampler,
    RolloutBuffer,
    RolloutSampler,
    RolloutTensorStorage,
    RolloutWriter,
)
from torchrl_rslstorage.modules import (
    ActorCritic,
    DiagonalGaussian,
    EmpiricalNormalizer,
    MLPActor,
    MLPCritic,
    ObservationModule,
)
from torchrl_rslstorage.objectives import RolloutGAE, RSLPPOLoss, normalize_advantage

__all__ = [
    "ActorCritic",
    "DiagonalGaussian",
    "EmpiricalNormalizer",
    "FinalObservations",
    "MLPActor",
    "MLPCritic",
    "MiniBatchSampler",
    "ObservationModule",
    "RSLPPOLoss",
    "RolloutBuffer",
    "RolloutGAE",
    "RolloutSampler",
    "RolloutTensorStorage",
    "RolloutWriter",
    "normalize_advantage",
]
