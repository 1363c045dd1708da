"""The memory that mini-batches in rsl-rl-lib's form are cut from: made once an update, used by all epochs."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from tensordict import TensorDict
from torch import Tensor

from torchrl_rslstorage.data import Trajectories, memory, pad, plan_trajectories
from torchrl_rslstorage.data.leaves import Key


class ShuffledCopies:
    """Every column ``[T, N, *]`` flattened and shuffled, each mini-batch in memory of its own.

    Of its own, since rsl-rl-lib's are: where a tensor starts in memory can decide the last bit of a matrix
    product with it (torch 2.13 with MKL: a Linear of 45 inputs, 3 rows). rsl-rl-lib makes a new copy in every
    epoch, too, which a consumer may write into without harm; here all epochs share one, and its version
    counters tell whether somebody did.
    """

    def __init__(self) -> None:
        self._rooms: dict[tuple[int, Key], Tensor] = {}
        self._flat: dict[Key, Tensor] = {}
        self._cells: Sequence[Tensor] = ()
        self._copies: list[Tensor] = []
        self._versions: list[int] = []

    def shuffle(self, columns: dict[Key, Tensor], cells: Sequence[Tensor]) -> list[dict[Key, Tensor]]:
        """The flat cells ``[B]`` of each mini-batch, of every column; good until the next call."""
        self._flat = {key: column.flatten(0, 1) for key, column in columns.items()}
        self._cells = cells
        return self._gather()

    def refresh(self) -> None:
        """Copies once more, to the same place, if somebody wrote there."""
        if [copy._version for copy in self._copies] != self._versions:
            self._gather()

    def _gather(self) -> list[dict[Key, Tensor]]:
        parts = [
            {
                key: torch.index_select(flat, 0, cells, out=self._room(number, key, len(cells), flat))
                for key, flat in self._flat.items()
            }
            for number, cells in enumerate(self._cells)
        ]
        self._copies = [copy for part in parts for copy in part.values()]
        self._versions = [copy._version for copy in self._copies]
        return parts

    def _room(self, number: int, key: Key, size: int, flat: Tensor) -> Tensor:
        room = self._rooms.get((number, key))
        if room is None or room.shape != (size, *flat.shape[1:]) or room.dtype != flat.dtype:
            room = self._rooms[number, key] = memory.empty_rows(flat, size)
        return room


class PaddedTrajectories:
    """Trajectories ``[T, B]`` of observations side by side, each with zeros behind its end.

    rsl-rl-lib pads to T, whatever the longest trajectory is, since un-padding relies on it. Its mini-batches
    are views of one padded copy for all epochs, as these are.
    """

    def __init__(self) -> None:
        self._rooms: dict[str, Tensor] = {}
        self._padded: dict[str, Tensor] = {}

    def pad(self, columns: dict[str, Tensor], done: Tensor) -> Trajectories:
        """Pads the window's observations ``[T, N, *]`` after ``done [T, N, 1]`` bool; returns the plan."""
        plan = _up_to_the_last_row(plan_trajectories(done), len(done))
        places = plan.mask.numel()
        self._padded = {
            key: pad(column, plan, out=self._room(key, places, column)) for key, column in columns.items()
        }
        return plan

    def trajectories(self, first: int, last: int, device: torch.device | str) -> TensorDict:
        """The padded observations of some trajectories, ``[T, last − first]``."""
        parts = {key: value[:, first:last] for key, value in self._padded.items()}
        rows = len(next(iter(parts.values()), ()))
        return TensorDict(parts, [rows, last - first], device=device)

    def _room(self, key: str, places: int, column: Tensor) -> Tensor:
        """``[places, *]`` in memory that later updates use again, and that grows with the number of them."""
        room = self._rooms.get(key)
        if room is None or len(room) < places:
            shape = (places, *column.shape[2:])
            room = memory.empty(shape, dtype=column.dtype, device=column.device)
            self._rooms[key] = room
        return room[:places]


def starting_states(saved: Sequence[Tensor], start: Tensor) -> list[Tensor]:
    """The states with which trajectories start, ``[B, layers, H]`` each.

    Args:
        saved: of every step, ``[T, N, layers, H]`` each.
        start: cell ``t·N + n`` in which each trajectory starts, ``[B]``.
    """
    return [states.flatten(0, 1).index_select(0, start) for states in saved]


def as_hidden_state(states: Sequence[Tensor], first: int, last: int) -> Tensor | tuple[Tensor, ...]:
    """Some trajectories' states in torch's layout ``[layers, B, H]``: one tensor, or several."""
    parts = tuple(state[first:last].transpose(0, 1).contiguous() for state in states)
    return parts[0] if len(parts) == 1 else parts


def _up_to_the_last_row(plan: Trajectories, num_steps: int) -> Trajectories:
    """The plan with as many rows as the window has, of which those behind the longest hold padding."""
    longest, number = plan.mask.shape
    index = plan.index.new_full((num_steps, number), num_steps * plan.num_envs)
    mask = plan.mask.new_zeros(num_steps, number)
    index[:longest], mask[:longest] = plan.index, plan.mask
    return dataclasses.replace(plan, index=index, mask=mask)
