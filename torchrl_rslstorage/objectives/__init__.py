"""What is optimised: advantages, the PPO loss, the loss of distillation."""

from torchrl_rslstorage.objectives.advantages import RolloutGAE
from torchrl_rslstorage.objectives.distillation import DistillationLoss
from torchrl_rslstorage.objectives.ppo import RSLPPOLoss
from torchrl_rslstorage.objectives.returns import normalize_advantage

__all__ = ["DistillationLoss", "RSLPPOLoss", "RolloutGAE", "normalize_advantage"]
