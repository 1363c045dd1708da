"""What is optimised: advantages, the PPO loss and its symmetries."""

from torchrl_rslstorage.objectives.advantages import RolloutGAE
from torchrl_rslstorage.objectives.mirror import Mirror, rsl_rl_augmentation
from torchrl_rslstorage.objectives.ppo import RSLPPOLoss
from torchrl_rslstorage.objectives.returns import normalize_advantage
from torchrl_rslstorage.objectives.symmetry import Symmetry

__all__ = [
    "Mirror",
    "RSLPPOLoss",
    "RolloutGAE",
    "Symmetry",
    "normalize_advantage",
    "rsl_rl_augmentation",
]
