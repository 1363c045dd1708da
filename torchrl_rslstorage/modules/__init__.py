"""Networks: MLP and recurrent actors and critics, their distribution, the observation normaliser."""

from torchrl_rslstorage.modules.distributions import DiagonalGaussian
from torchrl_rslstorage.modules.heads import GaussianActor, ValueCritic
from torchrl_rslstorage.modules.mlp import ActorCritic, MLPActor, MLPCritic
from torchrl_rslstorage.modules.normalizer import EmpiricalNormalizer
from torchrl_rslstorage.modules.novelty import RandomNetworkDistillation, intrinsic_weight
from torchrl_rslstorage.modules.observations import ObservationModule
from torchrl_rslstorage.modules.recurrent import RNNActor, RNNCritic

__all__ = [
    "ActorCritic",
    "DiagonalGaussian",
    "EmpiricalNormalizer",
    "GaussianActor",
    "MLPActor",
    "MLPCritic",
    "ObservationModule",
    "RNNActor",
    "RNNCritic",
    "RandomNetworkDistillation",
    "ValueCritic",
    "intrinsic_weight",
]
