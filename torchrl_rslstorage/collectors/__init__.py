"""Collecting rollouts straight into a RolloutBuffer."""

from torchrl_rslstorage.collectors.rollout_collector import RolloutCollector
from torchrl_rslstorage.collectors.statistics import EpisodeStatistics

__all__ = ["EpisodeStatistics", "RolloutCollector"]
