"""Demonstrations as data: motion clips from files, looked up by time and drawn as windows and pairs."""

from torchrl_rslstorage.motions.clips import MotionClip
from torchrl_rslstorage.motions.dataset import MotionDataset
from torchrl_rslstorage.motions.readers import read_motion

__all__ = [
    "MotionClip",
    "MotionDataset",
    "read_motion",
]
