"""Networks: MLP and recurrent actors and critics, their distribution, the normaliser, a discriminator."""

from torchrl_rslstorage.modules.discriminator import AMPDiscriminator
from torchrl_rslstorage.modules.distributions import DiagonalGaussian
from torchrl_rslstorage.modules.export import PolicyStep, export_policy
from torchrl_rslstorage.modules.heads import GaussianActor, ValueCritic
from torchrl_rslstorage.modules.mlp import ActorCritic, MLPActor, MLPCritic
from torchrl_rslstorage.modules.normalizer import EmpiricalNormalizer
from torchrl_rslstorage.modules.novelty import RandomNetworkDistillation, intrinsic_weight
from torchrl_rslstorage.modules.observations import ObservationModule
from torchrl_rslstorage.modules.recurrent import RNNActor, RNNCritic
from torchrl_rslstorage.modules.student_teacher import StudentTeacher

__all__ = [
    "AMPDiscriminator",
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
    "RandomNetworkDistillation",
    "StudentTeacher",
    "ValueCritic",
    "export_policy",
    "intrinsic_weight",
]
