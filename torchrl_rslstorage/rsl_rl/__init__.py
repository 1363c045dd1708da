"""The bridge to RSL-RL: its checkpoints."""

from torchrl_rslstorage.rsl_rl.checkpoints import (
    RSLCheckpoint,
    load_rsl_rl_checkpoint,
    save_rsl_rl_checkpoint,
)

__all__ = ["RSLCheckpoint", "load_rsl_rl_checkpoint", "save_rsl_rl_checkpoint"]
