"""CircularBuffer: RSL-RL's history of plain tensors, on this package's `HistoryBuffer`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from tensordict import TensorDict
from torch import Tensor

from torchrl_rslstorage.data import HistoryBuffer, HistorySampler
from torchrl_rslstorage.data.updates import at_least_one

_DATA = "data"


class CircularBuffer:
    """The newest ``max_len`` of the tensors ``[N, *]`` that were appended, read by age for each environment.

        appended  0 1 2 3, max_len = 3        environment 1 reset before 3

        buffer        1  2  3                     3  3  3
        [0] [1] [2]   3  2  1                     3  3  3

    A drop-in for the class of RSL-RL's AMP branch (leggedrobotics/rsl_rl, commit 84ac0088,
    storage/circular_buffer.py), which descends from Isaac Lab's (isaaclab/utils/buffers): names, shapes and
    values are the same while all environments hold equally much. Repaired is what is wrong otherwise:

    - After a partial reset mini-batches were drawn by environment 0's length for all: cells of environments
      that hold less were drawn several times, and some of those that hold more never. Here every cell that is
      held is as likely as any other, and an epoch takes none twice.
    - One empty environment made every read and draw raise. It reads as zeros, and is never drawn.
    - ``fetch_length`` could not exceed what the emptiest environment holds, and ``fetch_length · N`` had to
      be a multiple of the mini-batches. Their sizes now differ by at most one.
    - All epochs of a generator took the same subset of the cells. Each draws anew, unseen cells first.
    - A negative age read the oldest steps; it reads the newest. A tensor ``[N]`` without features could not
      be reset. A value of another dtype was cast silently; it is refused.
    - There was no state to save: that of ``history`` is.

    Args:
        max_len: tensors kept.
        batch_size: N.
        device: where they are kept.

    Attributes:
        history: the `HistoryBuffer`, with the entry ``data``: ``history.state_dict()`` saves it.

    Raises:
        ValueError: a size below one.

    Examples:
        >>> import torch
        >>> from torchrl_rslstorage import CircularBuffer
        >>> history = CircularBuffer(3, 2, "cpu")
        >>> for step in range(4):
        ...     history.append(torch.tensor([step, 10 + step]))
        >>> history.buffer
        tensor([[ 1,  2,  3],
                [11, 12, 13]])
        >>> history[torch.tensor([0, 1])]
        tensor([ 3, 12])
        >>> [len(batch) for batch in history.mini_batch_generator(3, num_mini_batches=2, num_epochs=1)]
        [3, 3]
    """

    def __init__(self, max_len: int, batch_size: int, device: torch.device | str) -> None:
        self._device = device
        self.history = HistoryBuffer(max_len, batch_size, device=device)

    @property
    def batch_size(self) -> int:
        """N, environments."""
        return self.history.num_envs

    @property
    def device(self) -> torch.device | str:
        """The device as it was given."""
        return self._device

    @property
    def max_length(self) -> int:
        """Tensors kept."""
        return self.history.max_len

    @property
    def current_length(self) -> Tensor:
        """``[N]`` int64: how many tensors each environment holds."""
        return self.history.lengths

    @property
    def buffer(self) -> Tensor:
        """``[N, max_len, *]``, a copy, oldest to newest; what is missing shows the oldest held, or zeros.

        Raises:
            RuntimeError: nothing was ever appended.
        """
        return self.history.history()[_DATA]

    def append(self, data: Tensor) -> None:
        """Copies one tensor of all environments; those that were reset are filled up with it.

        Args:
            data: ``[N, *]``, on any device; shape and dtype as the first one's.

        Raises:
            ValueError: N, shape or dtype is another.
        """
        if data.ndim < 1 or data.shape[0] != self.batch_size:
            raise ValueError(
                f"The data has shape {tuple(data.shape)}, expected [N = {self.batch_size}, *]: one row an "
                "environment."
            )
        self.history.append(TensorDict({_DATA: data}, [self.batch_size]))

    def reset(self, batch_ids: Sequence[int] | Tensor | slice | None = None) -> None:
        """Empties some environments, which read as zeros until the next `append`.

        Args:
            batch_ids: numbers, a bool mask ``[N]`` or a slice; ``None`` for all.

        Raises:
            ValueError: there is no such environment.
        """
        if batch_ids is None:
            batch_ids = slice(None)
        if isinstance(batch_ids, slice):
            # Not the history's reset of everything, after which it would not be readable.
            batch_ids = range(self.batch_size)[batch_ids]
        self.history.reset(batch_ids)

    def __getitem__(self, key: Tensor) -> Tensor:
        """What each environment appended ``key`` appends before its newest, ``[N, *]``, a copy.

        Args:
            key: integers ``[N]``, 0 the newest; ages past the oldest held give that one.

        Raises:
            ValueError: it is not integers ``[N]``.
            RuntimeError: nothing was ever appended.
        """
        if not isinstance(key, Tensor):
            raise ValueError(f"The ages are a tensor of integers [N = {self.batch_size}], got {key!r}.")
        return self.history.at_age(key)[_DATA]

    def mini_batch_generator(
        self, fetch_length: int, num_mini_batches: int, num_epochs: int = 8
    ) -> Iterator[Tensor]:
        """Shuffled mini-batches ``[B, *]`` out of everything that is held, each a copy.

        Appending, resetting, or starting a second one ends it. Starting waits for the device once.

        Args:
            fetch_length: an epoch has ``fetch_length · N`` rows, or all that are held where those are fewer,
                because environments were reset.
            num_mini_batches: mini-batches of an epoch.
            num_epochs: epochs, each with a draw of its own.

        Raises:
            ValueError: no environment holds ``fetch_length`` tensors; a number below one; more mini-batches
                than rows.
            RuntimeError: nothing is held; or, while iterating, it was ended.
        """
        self.history.storage.require_steps()
        longest = int(self.current_length.max())
        if at_least_one("fetch_length", fetch_length) > longest:
            raise ValueError(
                f"`fetch_length` is {fetch_length}, but the longest history holds {longest} of "
                f"{self.max_length}: append more, or fetch less."
            )
        rows = min(fetch_length * self.batch_size, len(self.history))
        self.history.set_sampler(HistorySampler(num_mini_batches, num_epochs, num_samples=rows))
        # Mini-batches of a history are views of memory that the next epoch is drawn into.
        return (batch[_DATA].clone() for batch in self.history)
