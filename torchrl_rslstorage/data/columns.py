"""One half of a rollout's rows as columns ``[T, N, *]``, and the shuffled copy of columns."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NoReturn

from torch import Tensor

from torchrl_rslstorage._compat import foreach_copy_
from torchrl_rslstorage.data import memory
from torchrl_rslstorage.data.gathering import RowCopies
from torchrl_rslstorage.data.leaves import Key, dtype_name, same_tensors, select, show, show_all


class HalfColumns:
    """One half of the row, or all of it: columns, their layout, and the views of each row, made once."""

    def __init__(self, half: str | None, columns: dict[Key, Tensor], row: Mapping[Key, Tensor]) -> None:
        self._half = half
        self.columns = columns
        self._layout = {key: (value.shape, value.dtype) for key, value in row.items()}
        self._rows: list[list[Tensor] | None] = [None] * len(next(iter(columns.values()), ()))

    def copy_row(self, t: int, row: Mapping[Key, Tensor]) -> None:
        """Copies ``row`` into row ``t``; raises if its keys, shapes or dtypes are not the first row's."""
        foreach_copy_(self.row(t), self.sources(t, row))

    def sources(self, t: int, row: Mapping[Key, Tensor]) -> list[Tensor]:
        """The tensors of row number ``t`` in the order of the columns, once they are the first row's kind."""
        if row.keys() != self._layout.keys():
            refuse_keys(self._half, t, row, self._layout)
        sources = [row[key] for key in self._layout]
        for value, (shape, dtype) in zip(sources, self._layout.values(), strict=True):
            if value.dtype is not dtype or value.shape != shape:
                for key in self._layout:
                    self.check(t, key, row[key], half=self._half)
        return sources

    def row(self, t: int) -> list[Tensor]:
        """Row ``t`` of every column, as views."""
        rows = self._rows[t]
        if rows is None:
            rows = self._rows[t] = [column[t] for column in self.columns.values()]
        return rows

    def filled(self, num_rows: int) -> dict[Key, Tensor]:
        """The first ``num_rows`` rows, cloned."""
        return {key: column[:num_rows].clone() for key, column in self.columns.items()}

    def check(self, t: int, key: Key, value: Tensor, *, half: str | None) -> None:
        """Raises a ValueError if ``value`` has not the shape and dtype of the first row's ``key``."""
        if (value.shape, value.dtype) == self._layout[key]:
            return
        shape, dtype = self._layout[key]
        raise ValueError(
            f"{show(key)} in row {t}{_of(half)} is {dtype_name(value.dtype)} "
            f"{tuple(value.shape)}, but the first row made its column {dtype_name(dtype)} "
            f"{tuple(shape)}. Values are stored as they are: cast or reshape them before they come here."
        )


class Gather:
    """Copies flat columns into their part of the workspace, shuffled."""

    def __init__(self, names: list[Key], flats: list[Tensor], rooms: list[Tensor]) -> None:
        self._names = names
        self._flats = flats
        self._rooms = rooms
        self._parts: dict[int, tuple[dict[Key, Tensor], RowCopies]] = {}

    def run(self, cells: Tensor) -> dict[Key, Tensor]:
        """The cells ``cells`` of every column, in the workspace; the same dictionary for the same number."""
        size = len(cells)
        if size not in self._parts:
            rooms = [room[:size] for room in self._rooms]
            self._parts[size] = (dict(zip(self._names, rooms, strict=True)), RowCopies(self._flats, rooms))
        part, copies = self._parts[size]
        copies.run(cells)
        return part


class Workspace:
    """The memory of the shuffled copy, and for each choice of keys what is gathered into it."""

    def __init__(self) -> None:
        self._rooms: dict[Key, Tensor] = {}
        self._plans: dict[tuple[Key, ...] | None, tuple[dict[Key, Tensor], Gather]] = {}

    def forget(self) -> None:
        """Lets go of the columns, which were replaced; the memory stays."""
        self._plans.clear()

    def gather(self, columns: dict[Key, Tensor], keys: tuple[Key, ...] | None) -> Gather:
        """Which flat columns go into which part of the memory; made anew when a column is another."""
        planned, gather = self._plans.get(keys, ({}, None))
        if gather is not None and same_tensors(planned, columns):
            return gather
        names = [name for name in columns if name != "is_init"] if keys is None else select(columns, keys)
        rooms: list[Tensor] = []
        for name in names:
            flat = columns[name].flatten(0, 1)
            room = self._rooms.get(name)
            if room is None or room.shape != flat.shape or room.dtype != flat.dtype:
                room = self._rooms[name] = memory.empty_rows(flat, len(flat))
            rooms.append(room)
        gather = Gather(names, [columns[name].flatten(0, 1) for name in names], rooms)
        # What is not contiguous was copied just now, and would be out of date the next time.
        if all(columns[name].is_contiguous() for name in names):
            self._plans[keys] = (columns, gather)
        return gather


def _of(half: str | None) -> str:
    return "" if half is None else f" ({half} half)"


def refuse_keys(half: str | None, t: int, came: Iterable[Key], expected: Iterable[Key]) -> NoReturn:
    """Raises the KeyError of a row whose keys are not those of the first row."""
    came, expected = list(came), list(expected)
    missing = [key for key in expected if key not in came]
    unknown = [key for key in came if key not in expected]
    parts = [f"lacks {show_all(missing)}"] * bool(missing)
    parts += [f"brings the unknown {show_all(unknown)}"] * bool(unknown)
    raise KeyError(
        f"Row {t} {' and '.join(parts)}{_of(half)}. Every row has the keys of the first row: "
        f"{show_all(expected)}."
    )
