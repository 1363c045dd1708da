"""Rollouts and histories as data: storages, writers, samplers and the buffers that wire them."""

from torchrl_rslstorage.data.final_observations import FinalObservations
from torchrl_rslstorage.data.history_buffer import HistoryBuffer
from torchrl_rslstorage.data.history_sampler import HistorySampler
from torchrl_rslstorage.data.history_storage import HistoryStorage
from torchrl_rslstorage.data.history_writer import HistoryWriter
from torchrl_rslstorage.data.memory import keep_freed_memory
from torchrl_rslstorage.data.rollout_buffer import RolloutBuffer
from torchrl_rslstorage.data.samplers import MiniBatchSampler, RolloutSampler
from torchrl_rslstorage.data.storages import RolloutTensorStorage
from torchrl_rslstorage.data.time_step_sampler import TimeStepSampler
from torchrl_rslstorage.data.trajectories import Trajectories, pad, plan_trajectories, unpad
from torchrl_rslstorage.data.trajectory_sampler import TrajectorySampler
from torchrl_rslstorage.data.transitions import transition_pairs
from torchrl_rslstorage.data.writers import RolloutWriter
from torchrl_rslstorage.data.zipped import zip_mini_batches

__all__ = [
    "FinalObservations",
    "HistoryBuffer",
    "HistorySampler",
    "HistoryStorage",
    "HistoryWriter",
    "MiniBatchSampler",
    "RolloutBuffer",
    "RolloutSampler",
    "RolloutTensorStorage",
    "RolloutWriter",
    "TimeStepSampler",
    "Trajectories",
    "TrajectorySampler",
    "keep_freed_memory",
    "pad",
    "plan_trajectories",
    "transition_pairs",
    "unpad",
    "zip_mini_batches",
]
