"""The rollout as data: storage, writer, samplers and the buffer that wires them."""

from torchrl_rslstorage.data.final_observations import FinalObservations
from torchrl_rslstorage.data.rollout_buffer import RolloutBuffer
from torchrl_rslstorage.data.samplers import MiniBatchSampler, RolloutSampler
from torchrl_rslstorage.data.storages import RolloutTensorStorage
from torchrl_rslstorage.data.time_step_sampler import TimeStepSampler
from torchrl_rslstorage.data.trajectories import Trajectories, pad, plan_trajectories, unpad
from torchrl_rslstorage.data.trajectory_sampler import TrajectorySampler
from torchrl_rslstorage.data.writers import RolloutWriter

__all__ = [
    "FinalObservations",
    "MiniBatchSampler",
    "RolloutBuffer",
    "RolloutSampler",
    "RolloutTensorStorage",
    "RolloutWriter",
    "TimeStepSampler",
    "Trajectories",
    "TrajectorySampler",
    "pad",
    "plan_trajectories",
    "unpad",
]
