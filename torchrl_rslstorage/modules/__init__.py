"""Networks: MLP and recurrent actors and critics, their distribution, normaliser and export."""

from torchrl_rslstorage.modules.distributions import DiagonalGaussian
from torchrl_rslstorage.modules.export import PolicyStep, export_policy
from torchrl_rslstorage.modules.heads import GaussianActor, ValueCritic
from torchrl_rslstorage.modules.mlp import ActorCritic, MLPActor, MLPCritic
from torchrl_rslstorage.modules.normalizer import EmpiricalNormalizer
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
    "PolicyStep",
    "RNNActor",
    "RNNCritic",
    "ValueCritic",
    "export_policy",
]
