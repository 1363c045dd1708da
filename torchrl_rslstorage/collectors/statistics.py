"""Episode returns and lengths, kept on the device."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class EpisodeSummary(NamedTuple):
    """Means over the last episodes; NaN before the first has ended."""

    mean_return: float
    """Mean undiscounted return."""
    mean_length: float
    """Mean number of steps."""
    num_episodes: int
    """Episodes counted since the start."""


class EpisodeStatistics:
    """Sums per environment and a ring of the last ended episodes, without host synchronisation.

    Args:
        num_envs: N.
        window: how many ended episodes the means are taken over.
        device: where rewards live.
        skip_first: leave out every environment's first episode, for environments that start in the
            middle of one.

    Raises:
        ValueError: ``window`` is below one.

    Examples:
        >>> import torch
        >>> from torchrl_rslstorage import EpisodeStatistics
        >>> statistics = EpisodeStatistics(num_envs=1)
        >>> statistics.update(torch.tensor([[1.0]]), torch.tensor([[False]]))
        >>> statistics.update(torch.tensor([[2.0]]), torch.tensor([[True]]))
        >>> statistics.summary()
        EpisodeSummary(mean_return=3.0, mean_length=2.0, num_episodes=1)
    """

    def __init__(
        self,
        num_envs: int,
        window: int = 100,
        *,
        device: torch.device | str | None = None,
        skip_first: bool = False,
    ) -> None:
        if window < 1:
            raise ValueError(f"`window` must be at least 1, got {window}.")
        self.window = window
        self.skips_first = skip_first
        # Return and length of the running episodes.
        self._sums = torch.zeros(2, num_envs, dtype=torch.float64, device=device)
        self._returns, self._lengths = self._sums.unbind(0)
        # One slot more than the window: what must not be counted is written there.
        self._ring = torch.full((2, window + 1), torch.nan, dtype=torch.float64, device=device)
        self._count = torch.zeros((), dtype=torch.int64, device=device)
        self._skip = torch.full((num_envs,), skip_first, device=device)
        self._looking_is_free = self._sums.device.type == "cpu"

    def update(self, reward: Tensor, done: Tensor) -> None:
        """Takes in one step.

        Args:
            reward: ``[N, 1]``.
            done: ``[N, 1]`` bool, the episode ended with this step.
        """
        self._returns.add_(reward.reshape(-1))
        self._lengths.add_(1)
        ended = done.reshape(-1)
        if self._looking_is_free and not bool(ended.any()):
            return
        counted = ended & ~self._skip
        rank = counted.cumsum(0) - 1
        total = counted.sum()
        # More episodes than slots may end at once: only the last of them have a slot of their own.
        kept = counted & (rank >= total - self.window)
        slot = torch.where(kept, (self._count + rank) % self.window, self.window)
        self._ring[:, slot] = self._sums
        self._count += total
        self._skip &= ~ended
        self._sums.masked_fill_(ended, 0)

    def summary(self) -> EpisodeSummary:
        """The means over the last ended episodes; fetched from the device in one go."""
        means = self._ring[:, : self.window].nanmean(1)
        mean_return, mean_length, count = torch.cat([means, self._count[None]]).tolist()
        return EpisodeSummary(mean_return, mean_length, int(count))

    def state_dict(self) -> dict[str, Tensor]:
        """Running sums, the ring and the counts."""
        return {
            "sums": self._sums.clone(),
            "ring": self._ring.clone(),
            "count": self._count.clone(),
            "skip": self._skip.clone(),
        }

    def load_state_dict(self, state_dict: dict[str, Tensor]) -> None:
        """Takes back what `state_dict` gave.

        Raises:
            ValueError: it counts another number of environments, or over another window.
        """
        sums, ring = state_dict["sums"], state_dict["ring"]
        if sums.shape != self._sums.shape or ring.shape != self._ring.shape:
            raise ValueError(
                f"The saved statistics count {sums.shape[1]} environments over {ring.shape[1] - 1} episodes, "
                f"these {self._sums.shape[1]} over {self.window}."
            )
        self._sums.copy_(sums)
        self._ring.copy_(ring)
        self._count.copy_(state_dict["count"])
        self._skip.copy_(state_dict["skip"])

    def restart_episodes(self) -> None:
        """Forgets the running episodes, for environments that were reset from outside."""
        self._sums.zero_()
