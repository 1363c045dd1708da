"""What is optimised: advantages, the PPO loss, adversarial motion priors."""

from torchrl_rslstorage.objectives.advantages import RolloutGAE
from torchrl_rslstorage.objectives.amp import (
    AMPLoss,
    StyleReward,
    discriminator_loss,
    lerp_rewards,
    style_reward,
)
from torchrl_rslstorage.objectives.distillation import DistillationLoss
from torchrl_rslstorage.objectives.mirror import Mirror, rsl_rl_augmentation
from torchrl_rslstorage.objectives.ppo import RSLPPOLoss
from torchrl_rslstorage.objectives.returns import normalize_advantage
from torchrl_rslstorage.objectives.symmetry import Symmetry

__all__ = [
    "AMPLoss",
    "DistillationLoss",
    "Mirror",
    "RSLPPOLoss",
    "RolloutGAE",
    "StyleReward",
    "Symmetry",
    "discriminator_loss",
    "lerp_rewards",
    "normalize_advantage",
    "rsl_rl_augmentation",
    "style_reward",
]
