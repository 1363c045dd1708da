"""What is optimised: advantages and the PPO loss."""

from torchrl_rslstorage.objectives.advantages import RolloutGAE
from torchrl_rslstorage.objectives.ppo import RSLPPOLoss
from torchrl_rslstorage.objectives.returns import normalize_advantage

__all__ = ["RSLPPOLoss", "RolloutGAE", "normalize_advantage"]
