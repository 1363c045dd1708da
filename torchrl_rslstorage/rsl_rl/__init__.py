"""The bridge to rsl-rl-lib: what lets its runners work on this package's storage."""

from torchrl_rslstorage.rsl_rl.patching import RSLRLPatch, patch_rsl_rl
from torchrl_rslstorage.rsl_rl.records import Batch, Transition
from torchrl_rslstorage.rsl_rl.rollout_storage import RolloutStorage

__all__ = ["Batch", "RSLRLPatch", "RolloutStorage", "Transition", "patch_rsl_rl"]
