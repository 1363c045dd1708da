"""Recurrent states, kept only where a trajectory starts: all that training reads of them.

A state of 256 numbers in every step would be larger than everything else in a window. Trajectories start in
the window's first row, and in the row after an episode's end.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from tensordict.utils import NestedKey
from torch import Tensor

from torchrl_rslstorage.data.final_observations import CellTable, Chunk, FinalObservations
from torchrl_rslstorage.data.leaves import Key, canonical, dtype_name, select, show, show_all


class StartStates:
    """The states that were declared, their layout, and those of one window.

    State: a row is opened by its root half and closed by its second one; only what was closed is kept, so
    that a row may be refused and written again.

    Args:
        num_envs: N.
        device: where they are kept.
        keys: states, or groups of them.
    """

    def __init__(self, num_envs: int, device: torch.device, keys: Sequence[NestedKey]) -> None:
        self.declared = [canonical(key) for key in keys]
        self._table = CellTable(num_envs, device)
        self._open: Any = None
        self.layout: dict[Key, tuple[torch.Size, torch.dtype]] = {}

    def declare(self, keys: Sequence[NestedKey], *, too_late: bool) -> None:
        """Adds states; raises a RuntimeError if it is too late for one that is new."""
        known = (*self.declared, *self.layout)
        new = [key for key in map(canonical, keys) if key not in known]
        if new and too_late:
            raise RuntimeError(
                f"{show_all(new)} cannot become states any more: rows of this buffer have been written. Pass "
                "RolloutBuffer(..., state_keys=...)."
            )
        self.declared += new

    def split(self, row: Mapping[Key, Tensor]) -> tuple[Mapping[Key, Tensor], Mapping[Key, Tensor]]:
        """``row`` without the declared states, and those; nothing is remembered."""
        names = select(row, self.declared) if self.declared else []
        states = {key: row[key] for key in names}
        return {key: value for key, value in row.items() if key not in states}, states

    def apart(
        self, t: int, row: Mapping[Key, Tensor], *, first: bool
    ) -> tuple[Mapping[Key, Tensor], Mapping[Key, Tensor]]:
        """``row`` without the states, and those; refused if they are not those of the ``first`` row."""
        if not self.declared:
            return row, {}
        if first:
            rest, states = self.split(row)
            self.layout = {key: (value.shape, value.dtype) for key, value in states.items()}
            return rest, states
        missing = [key for key in self.layout if key not in row]
        if missing:
            raise KeyError(f"Row {t} lacks the recurrent state {show_all(missing)}, which the first row has.")
        states = {key: row[key] for key in self.layout}
        for key, value in states.items():
            self.check(t, key, value)
        return {key: value for key, value in row.items() if key not in states}, states

    def check(self, t: int, key: Key, value: Tensor) -> None:
        """Raises a ValueError if ``value`` has not the shape and dtype of the first row's ``key``."""
        shape, dtype = self.layout[key]
        if (value.shape, value.dtype) != (shape, dtype):
            raise ValueError(
                f"The state {show(key)} in row {t} is {dtype_name(value.dtype)} {tuple(value.shape)}, but "
                f"the first row's is {dtype_name(dtype)} {tuple(shape)}."
            )

    def nbytes(self, keys: Sequence[Key] | None = None) -> int:
        """Bytes of one row of the states, or of some of them."""
        layouts = [self.layout[key] for key in (self.layout if keys is None else keys)]
        return sum(shape.numel() * dtype.itemsize for shape, dtype in layouts)

    def require_same(self, theirs: Sequence[Key]) -> None:
        """Refuses a saved window whose states were kept in another way than here.

        Raises:
            ValueError: the declared states are not those that were saved.
        """
        mine = self.declared
        covered = all(any(_covers(key, name) for key in mine) for name in theirs)
        used = all(any(_covers(key, name) for name in theirs) for key in mine)
        if not (covered and used):
            raise ValueError(
                f"The saved window keeps {show_all(theirs)} only where trajectories start, this buffer "
                f"{show_all(mine)}: build it with the same state_keys."
            )

    def open_row(self, t: int, ended: Tensor | None, states: Mapping[Key, Tensor]) -> None:
        """Copies the states of row ``t`` where the row before has ``ended [N, 1]``; None takes all."""
        device = next(iter(states.values())).device
        if ended is not None and ended.device != device:
            ended = ended.to(device)
        self._open = self._table.copied(t, ended, states)

    def close_row(self) -> None:
        """Keeps what `open_row` copied."""
        self._table.commit(self._open)
        self._open = None

    def read(self) -> FinalObservations:
        """Every start of the window so far, in the order of ``(t, n)``."""
        return self._table.read()

    def clear(self) -> None:
        """Forgets the window."""
        self._table.clear()
        self._open = None

    def state(self) -> list[Chunk]:
        """The window's states as plain tensors, for a checkpoint."""
        return self._table.state()

    def load_state(self, chunks: list[Chunk]) -> None:
        """Takes back what `state` gave; the first row, which holds every environment, tells the layout."""
        self._table.load_state(chunks)
        first = chunks[0][2] if chunks else {}
        self.layout = {key: (value.shape, value.dtype) for key, value in first.items()}


def _covers(key: Key, name: Key) -> bool:
    """Whether ``key`` is the leaf ``name`` or a group that holds it."""
    path, leaf = ((k,) if isinstance(k, str) else k for k in (key, name))
    return leaf[: len(path)] == path
