"""The bridge to rsl-rl-lib: what lets its runners work on this package's storage."""

from torchrl_rslstorage.rsl_rl.checkpoints import (
    RSLCheckpoint,
    load_rsl_rl_checkpoint,
    save_rsl_rl_checkpoint,
)
from torchrl_rslstorage.rsl_rl.circular_buffer import CircularBuffer
from torchrl_rslstorage.rsl_rl.patching import RSLRLPatch, patch_rsl_rl
from torchrl_rslstorage.rsl_rl.records import Batch, Transition
from torchrl_rslstorage.rsl_rl.rollout_storage import RolloutStorage
from torchrl_rslstorage.trainers import NetworkConfig, RSLRunnerConfig

__all__ = [
    "Batch",
    "CircularBuffer",
    "NetworkConfig",
    "RSLCheckpoint",
    "RSLRLPatch",
    "RSLRunnerConfig",
    "RolloutStorage",
    "Transition",
    "load_rsl_rl_checkpoint",
    "patch_rsl_rl",
    "save_rsl_rl_checkpoint",
]
