"""The sparse table of observations that are not the next row.

The next observation of a step is the next row, and is not stored twice. Two places have no next row:
a truncated step (the environment was reset: the next row belongs to another episode) and the last row
of the window. What the environment showed there is kept as ``(t, n, observation)``, which makes
bootstrapping exact at one copy of the rollout.

    row      0    1    2    3 = T - 1
    env 0    ·    ✂    ·    ▪          ✂ truncated: kept      ▪ last row: kept
    env 1    ·    ·    †    ▪          † terminated: its value is zero, not kept
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from tensordict import TensorDict
from torch import Tensor

from torchrl_rslstorage._compat import foreach_copy_
from torchrl_rslstorage.data import memory
from torchrl_rslstorage.data.leaves import Key, nest

_LEAST_ROOM = 16
"""Cells that fit on either side of a whole row, or an eighth of the environments if that is more. With the
usual episodes of 1000 steps a window of 24 has a fortieth; where more end, they are put together anew."""
_FLUSH_EVERY = 8
"""Rows whose candidates wait for one look at the truncation flags, on devices where a look stalls
the host. Eight rows of observations are held meanwhile, so the table stays small beside the window."""

Chunk = tuple[Tensor, Tensor, dict[Key, Tensor]]
"""Rows, environments and what was seen there, of some cells."""


class FinalObservations(NamedTuple):
    """What the environment showed where the window has no next row, ``K`` cells in all.

    Examples:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from torchrl_rslstorage import FinalObservations
        >>> cells = TensorDict({"observation": torch.zeros(2, 3)}, [2])
        >>> table = FinalObservations(torch.tensor([1, 3]), torch.tensor([0, 0]), cells)
        >>> table.observation.shape
        torch.Size([2])
    """

    t: Tensor
    """Rows ``[K]``, int64."""
    n: Tensor
    """Environments ``[K]``, int64."""
    observation: TensorDict
    """The next observations ``[K]``, every key that stood both at the root and under ``next``."""


class _Candidates(NamedTuple):
    """A whole row of which some cells will be kept, once somebody has looked at the flags."""

    t: int
    flags: Tensor
    values: dict[Key, Tensor]


class _WholeRow(NamedTuple):
    """The row of which every environment is kept, and the memory that it stands in the middle of."""

    number: int
    t: Tensor
    rooms: dict[Key, Tensor]
    middles: dict[Key, Tensor]

    def fits(self, number: int, values: Mapping[Key, Tensor]) -> bool:
        """Whether the row ``number`` of these values can stand here, as one did in the window before."""
        return (
            number == self.number
            and self.middles.keys() == values.keys()
            and all(
                middle.shape == values[key].shape and middle.dtype is values[key].dtype
                for key, middle in self.middles.items()
            )
        )


class CellTable:
    """Keeps what stood in some cells of a window, row by row; the same from single rows and from blocks.

    A storage has one for final observations, and one for the recurrent states with which trajectories start.

    State: empty, filling (some rows seen), closed (the last row was seen). Candidates wait in
    ``_pending`` on accelerators, so that finding truncated rows costs one host synchronisation in
    eight rows instead of one per row.
    """

    def __init__(self, num_envs: int, device: torch.device) -> None:
        self._num_envs = num_envs
        self._device = device
        self._envs = torch.arange(num_envs, device=device)
        self._no_flags = torch.zeros(num_envs, 1, dtype=torch.bool)
        self._rooms: dict[Key, Tensor] = {}
        self._last_whole: _WholeRow | None = None
        self._room_beside = max(_LEAST_ROOM, num_envs // 8)
        self.clear()

    @property
    def num_places(self) -> int:
        """Cells that the memory of a whole row has room for."""
        return self._num_envs + 2 * self._room_beside

    def clear(self) -> None:
        """Forgets everything."""
        self._chunks: list[Chunk] = []
        self._pending: list[_Candidates] = []
        self._whole: _WholeRow | None = None
        self._num_behind = 0

    def record(self, t: int, flags: Tensor | None, values: Mapping[Key, Tensor]) -> None:
        """Keeps of row ``t`` the environments that are flagged, or all of them.

        Args:
            t: the row.
            flags: ``[N, 1]`` bool; None keeps every environment, of one row in a window.
            values: ``[N, *]``; copied.
        """
        self.commit(self.copied(t, flags, values))

    def is_passed_over(self, flags: Tensor) -> bool:
        """Whether nothing is kept of a row with these flags ``[N, 1]``; False where a look would stall."""
        return not _stalls(flags) and torch.equal(flags, self._no_flags)  # a third of bool(flags.any())

    def copied(
        self, t: int, flags: Tensor | None, values: Mapping[Key, Tensor]
    ) -> Chunk | _Candidates | None:
        """What `record` would keep, copied but not yet kept: for rows that may still be refused."""
        if flags is None:
            return self._whole_row(t, values)
        if self.is_passed_over(flags):
            return None
        if _stalls(flags):
            return _Candidates(
                t, flags.clone(), {key: value.detach().clone() for key, value in values.items()}
            )
        envs = flags.view(-1).nonzero().view(-1)
        if self._whole is not None and self._device == envs.device and self._is_filled_behind():
            places = self._places_behind(self._whole, len(envs))
            for key, value in values.items():
                torch.index_select(value.detach(), 0, envs, out=places[key])
            return torch.full_like(envs, t), envs, places
        kept = {key: value.detach().index_select(0, envs) for key, value in values.items()}
        return self._placed(torch.full_like(envs, t), envs, kept)

    def _is_filled_behind(self) -> bool:
        """Whether the window began with the whole row and everything else stands behind it, in order."""
        return bool(self._chunks) and self._num_behind == len(self._chunks)

    def _places_behind(self, whole: _WholeRow, count: int) -> dict[Key, Tensor]:
        """Memory for ``count`` more cells; nothing is taken before it is committed."""
        first = self._room_beside + sum(len(t) for t, _, _ in self._chunks)
        for key, room in whole.rooms.items():
            if first + count > len(room):
                larger = memory.empty_rows(room, 2 * (first + count))
                larger[:first] = room[:first]
                whole.rooms[key] = self._rooms[key] = larger
                self._last_whole = None  # stands in the smaller one
        return {key: room[first : first + count] for key, room in whole.rooms.items()}

    def commit(self, copied: Chunk | _Candidates | None) -> None:
        """Keeps what `copied` gave."""
        if isinstance(copied, _Candidates):
            self._pending.append(copied)
            if len(self._pending) == _FLUSH_EVERY:
                self._flush()
        elif copied is not None:
            self._flush()
            whole = self._whole
            stands_there = whole is not None and all(
                value.untyped_storage().data_ptr() == whole.rooms[key].untyped_storage().data_ptr()
                for key, value in copied[2].items()
            )
            self._num_behind += stands_there and self._num_behind == len(self._chunks)
            self._chunks.append(copied)

    def read(self) -> FinalObservations:
        """The table so far, in the order of ``(t, n)``; good until the next window's last row."""
        self._flush()
        if not self._chunks:
            none = torch.zeros(0, dtype=torch.int64, device=self._device)
            return FinalObservations(none, none, TensorDict({}, [0], device=self._device))
        if len(self._chunks) == 1:
            t, n, flat = self._chunks[0]
            cells = TensorDict(nest(flat), [len(t)], device=self._device)
            # Every window has the same rows and environments here: a reader may write into its own.
            return FinalObservations(t.clone(), n.clone(), cells)
        rows, envs, values = zip(*self._chunks, strict=True)
        t = torch.cat(rows)
        flat = self._beside_whole_row(len(t))
        if flat is None:
            flat = {key: torch.cat([value[key] for value in values]) for key in values[0]}
        return FinalObservations(t, torch.cat(envs), TensorDict(nest(flat), [len(t)], device=self._device))

    def _beside_whole_row(self, total: int) -> dict[Key, Tensor] | None:
        """All cells in the memory of the whole row, where those before or after it fit beside it.

        Putting everything together anew would copy the whole row once more, which in a window of many
        environments costs more than the advantages themselves.
        """
        whole = self._whole
        if whole is None:
            return None
        if self._is_filled_behind():
            first = self._room_beside
            return {key: room[first : first + total] for key, room in whole.rooms.items()}
        if total > len(whole.t) + self._room_beside:
            return None
        number = next((i for i, chunk in enumerate(self._chunks) if chunk[0] is whole.t), None)
        if number is None or (0 < number < len(self._chunks) - 1):
            return None
        others = self._chunks[:-1] if number else self._chunks[1:]
        first = self._room_beside - (total - len(whole.t)) if number else self._room_beside
        place = first if number else first + len(whole.t)
        for t, _, cells in others:
            for key, value in cells.items():
                whole.rooms[key][place : place + len(t)].copy_(value)
            place += len(t)
        return {key: room[first : first + total] for key, room in whole.rooms.items()}

    def _flush(self) -> None:
        if self._pending:
            pending, self._pending = self._pending, []
            self._keep(pending)

    def _whole_row(self, t: int, observations: Mapping[Key, Tensor]) -> Chunk:
        """The whole row ``t``, in memory that every window reuses, with room beside it for other cells."""
        whole = self._last_whole
        if whole is None or not whole.fits(t, observations):
            whole = self._last_whole = self._make_whole_row(t, observations)
        self._whole = whole
        if whole.middles:
            foreach_copy_(list(whole.middles.values()), [observations[key] for key in whole.middles])
        return whole.t, self._envs, whole.middles

    def _make_whole_row(self, t: int, observations: Mapping[Key, Tensor]) -> _WholeRow:
        rooms: dict[Key, Tensor] = {}
        for key, value in observations.items():
            room = self._rooms.get(key)
            if room is None or room.shape[1:] != value.shape[1:] or room.dtype != value.dtype:
                shape = (self.num_places, *value.shape[1:])
                room = memory.empty(shape, dtype=value.dtype, device=self._device)
                self._rooms[key] = room
            rooms[key] = room
        middle = slice(self._room_beside, self._room_beside + self._num_envs)
        with torch.inference_mode(False):
            middles = {key: room[middle] for key, room in rooms.items()}
            return _WholeRow(t, torch.full_like(self._envs, t), rooms, middles)

    def _placed(self, t: Tensor, envs: Tensor, kept: dict[Key, Tensor]) -> Chunk:
        if envs.device == self._device:
            return t, envs, kept
        moved = {key: value.to(self._device) for key, value in kept.items()}
        return t.to(self._device), envs.to(self._device), moved

    def _keep(self, rows: list[_Candidates]) -> None:
        flags = torch.stack([row.flags.reshape(-1) for row in rows])
        found, envs = flags.nonzero(as_tuple=True)
        if not len(found):
            return
        cell = found * self._num_envs + envs
        first_row = rows[0].t
        kept: dict[Key, Tensor] = {}
        for key, value in rows[0].values.items():
            block = value if len(rows) == 1 else torch.cat([row.values[key] for row in rows])
            kept[key] = block.detach().index_select(0, cell)
        self._chunks.append(self._placed(found + first_row, envs, kept))

    def state(self) -> list[Chunk]:
        """The table as plain tensors of its own, for a checkpoint."""
        self._flush()
        return [
            (t.clone(), n.clone(), {key: value.clone() for key, value in cells.items()})
            for t, n, cells in self._chunks
        ]

    def load_state(self, chunks: list[Chunk]) -> None:
        """Takes back what `state` gave."""
        self.clear()
        self._chunks = [
            (
                t.to(self._device),
                n.to(self._device),
                {key: value.to(self._device) for key, value in cells.items()},
            )
            for t, n, cells in chunks
        ]


def _stalls(flags: Tensor) -> bool:
    """Whether a look at ``flags`` makes the host wait for a device."""
    return not flags.is_cpu
