"""Networks: MLP actor and critic, their distribution, and the observation normaliser."""

from torchrl_rslstorage.modules.distributions import DiagonalGaussian
from torchrl_rslstorage.modules.mlp import ActorCritic, MLPActor, MLPCritic
from torchrl_rslstorage.modules.normalizer import EmpiricalNormalizer
from torchrl_rslstorage.modules.observations import ObservationModule

__all__ = [
    "ActorCritic",
    "DiagonalGaussian",
    "EmpiricalNormalizer",
    "MLPActor",
    "MLPCritic",
    "ObservationModule",
]
