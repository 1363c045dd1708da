"""The bridge to RSL-RL: its configs and its checkpoints."""

from torchrl_rslstorage.rsl_rl.checkpoints import (
    RSLCheckpoint,
    load_rsl_rl_checkpoint,
    save_rsl_rl_checkpoint,
)
from torchrl_rslstorage.trainers import NetworkConfig, RSLRunnerConfig  # read below, where PPOConfig needs it

__all__ = [
    "NetworkConfig",
    "RSLCheckpoint",
    "RSLRunnerConfig",
    "load_rsl_rl_checkpoint",
    "save_rsl_rl_checkpoint",
]
