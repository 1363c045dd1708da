"""TimeStepSampler: a window's rows in time order, one by one or some at a time, without a copy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.utils import NestedKey
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary
from torchrl.data import Storage

from torchrl_rslstorage.data.leaves import Key, canonical, nest, select, show
from torchrl_rslstorage.data.samplers import RolloutSampler, at_least_one, checked_keys
from torchrl_rslstorage.data.storages import RolloutTensorStorage

_DONE: Key = ("next", "done")


class TimeStepSampler(RolloutSampler):
    """The rows ``[N]`` of the window in time order, or stretches ``[L, N]`` of them, for distillation.

        row       0   1   2   3   4   5   6           T = 7
        rows      0 │ 1 │ 2 │ 3 │ 4 │ 5 │ 6           length=None: T mini-batches [N]
        stretches 0   1   2 │ 3   4   5 │ 6           length=3: [3, N], [3, N], [1, N]

    A mini-batch is a locked TensorDict of views; nothing is copied. It holds every root entry, ``is_init``
    and ``("next", "done")``, which says where states start anew in the row behind. RSL-RL's generator
    (rsl_rl 5.5.1, storage/rollout_storage.py, ``generator``) yields the same rows.

    **Recurrent states** stand only in the mini-batch with which a pass begins: that is where a reader starts
    from them, and goes on by itself from there.

    Args:
        num_epochs: passes over the window in one update.
        length: L, rows of a mini-batch; the last one of a pass may be shorter. ``None`` yields single rows.
        keys: what mini-batches hold beside ``("next", "done")``; ``None`` takes every root entry and state.
        state_keys: recurrent states, or groups of them, that are columns of the window. States which the
            buffer keeps only where trajectories start (its own ``state_keys``) are known anyway.

    Raises:
        ValueError: a number below one; no keys.

    Examples:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from torchrl_rslstorage import RolloutBuffer, TimeStepSampler
        >>> buffer = RolloutBuffer(num_steps=5, num_envs=2, sampler=TimeStepSampler(length=3))
        >>> flags = {"reward": torch.ones(2, 5, 1), "done": torch.zeros(2, 5, 1, dtype=torch.bool)}
        >>> _ = buffer.extend(TensorDict({"observation": torch.zeros(2, 5, 4), "next": flags}, [2, 5]))
        >>> [tuple(batch["next", "done"].shape) for batch in buffer]
        [(3, 2, 1), (2, 2, 1)]
    """

    def __init__(
        self,
        num_epochs: int = 1,
        *,
        length: int | None = None,
        keys: Sequence[NestedKey] | None = None,
        state_keys: Sequence[NestedKey] = (),
    ) -> None:
        super().__init__(num_epochs)
        self.length = None if length is None else at_least_one("length", length)
        self.keys = checked_keys(keys)
        self.state_keys = [canonical(key) for key in state_keys]
        self._num_steps = 0
        self._starts: EpisodeStarts | None = None

    @property
    def num_batches(self) -> int:
        """Mini-batches of one update, ``num_epochs · ⌈T / L⌉``; 0 before the first one was begun."""
        return self.num_epochs * self._per_epoch

    @property
    def _per_epoch(self) -> int:
        return -(-self._num_steps // (self.length or 1))

    def begin(self, storage: RolloutTensorStorage) -> None:
        """Rewinds to row 0."""
        self._num_steps = storage.num_steps
        self._starts = None

    def mini_batch(self, storage: RolloutTensorStorage, position: int) -> TensorDictBase:
        """The mini-batch number ``position``: views of the window."""
        first = position % self._per_epoch * (self.length or 1)
        stop = min(first + (self.length or 1), storage.num_steps)
        window, columns = storage.window(), storage.root_columns()
        done = window.get(_DONE)
        if self._starts is None:
            self._starts = EpisodeStarts(done, columns.get("is_init"))
        rows = first if self.length is None else slice(first, stop)
        held = [*columns, *storage.state_keys]
        names = held if self.keys is None else select(held, self.keys)
        states = {*select(held, self.state_keys), *storage.state_keys}
        entries: dict[Key, Any] = {name: columns[name][rows] for name in names if name not in states}
        if first == 0:
            for name, state in _entering(
                storage, columns, [name for name in names if name in states]
            ).items():
                entries[name] = state if self.length is None else state.expand(stop, *state.shape)
        shown = done[rows]
        if self.length is not None:
            _STARTS[shown] = (self._starts, first)
        entries[_DONE] = shown
        shape = [storage.num_envs] if self.length is None else [stop - first, storage.num_envs]
        return TensorDict(nest(entries), shape, device=storage.device).lock_()

    def sample(self, storage: Storage, batch_size: int | None = None) -> tuple[Any, dict[str, Any]]:
        """Not possible over a stock buffer, which copies what it is asked for.

        Raises:
            TypeError: always.
        """
        raise TypeError("TimeStepSampler hands out views, which takes a RolloutBuffer, not a stock buffer.")

    def _forget(self) -> None:
        self._starts = None

    def state_dict(self) -> dict[str, Any]:
        """Where a running update stands, and T."""
        return {**super().state_dict(), "num_steps": self._num_steps}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes back what `state_dict` gave; raises as `RolloutSampler.load_state_dict` does."""
        self._num_steps = state_dict.get("num_steps", 0)
        super().load_state_dict(state_dict)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(num_epochs={self.num_epochs}, length={self.length})"


class EpisodeStarts:
    """In which rows of ``[T, N]`` some environment starts anew; the device is asked once, if at all.

    Args:
        done: ``[T, N, 1]`` bool.
        is_init: ``[T, N, 1]`` bool, for episodes that were started without a ``done`` before them.

    Raises:
        ValueError: ``done`` is not bool ``[T, N, 1]``.
    """

    def __init__(self, done: Tensor, is_init: Tensor | None) -> None:
        if done.dtype is not torch.bool or done.ndim != 3 or done.shape[-1] != 1:
            raise ValueError(f"{show(_DONE)} must be bool [T, N, 1], got {done.dtype} {tuple(done.shape)}.")
        flags = torch.zeros_like(done)
        flags[1:] = done[:-1]
        if is_init is not None and is_init.dtype is torch.bool and is_init.shape == done.shape:
            flags |= is_init
        self.flags = flags.squeeze(-1)

    @cached_property
    def rows(self) -> tuple[int, ...]:
        """The rows, ascending."""
        return tuple(t for t, hit in enumerate(self.flags.any(1).tolist()) if hit)


# Beside the tensors, not in the mini-batch: what is asked of the device for a whole window stays known.
_STARTS: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def starts_of(done: Tensor, is_init: Tensor | None) -> tuple[Tensor, tuple[int, ...]]:
    """Where environments start anew in a stretch: flags ``[L, N]``, and the rows past 0 that have some.

    Args:
        done: ``[L, N, 1]`` bool; of a mini-batch of `TimeStepSampler`, its rows are known already.
        is_init: ``[L, N, 1]`` bool, or None.
    """
    starts, first = _STARTS.get(done) or (EpisodeStarts(done, is_init), 0)
    if len(done) == 1:  # nothing to ask for
        return starts.flags[first : first + 1], ()
    stop = first + len(done)
    return starts.flags[first:stop], tuple(row - first for row in starts.rows if first < row < stop)


def _entering(
    storage: RolloutTensorStorage, columns: Mapping[Key, Tensor], names: Sequence[Key]
) -> dict[Key, Tensor]:
    """The states ``[N, *]`` with which the window is entered."""
    found = {name: columns[name][0] for name in names if name in columns}
    apart = [name for name in names if name not in found]
    if apart:
        cells = storage.start_states().observation
        found.update({name: cells.get(name)[: storage.num_envs] for name in apart})
    return found
