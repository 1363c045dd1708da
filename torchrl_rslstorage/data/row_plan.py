"""Where the tensors of a row stand, so that the next row built alike is read without naming its leaves."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor

from torchrl_rslstorage._compat import plain_entries
from torchrl_rslstorage.data.leaves import Key

_shape, _dtype = torch.Tensor.size, attrgetter("dtype")  # half the time of reading `shape`


class RowPlan:
    """The names at each level of an accepted row, and the places, shapes and dtypes of what is stored of it.

        level 0   ("observation", "action", "next")       values  0  1  2
        level 1   ("observation", "reward", "done", …)    values  3  4  5 …    found in value 2
        at        [0, 1, 4, 5, …]                         what is stored, in the order of the columns

    Nothing is taken on trust: a row passes if every level is a plain TensorDict with the very names in the
    very order, and everything stored has the type, shape and dtype that it had in the accepted row. Any
    other row, be it wrong or only built in another way, has to be read leaf by leaf.
    """

    def __init__(self, row: TensorDictBase, stored: Sequence[Key]) -> None:
        """Remembers ``row``, which holds the leaves ``stored``; reads nothing else of it."""
        places: dict[Key, int] = {}
        groups = {key[:depth] for key in stored if isinstance(key, tuple) for depth in range(1, len(key))}
        self._levels: list[tuple[int, tuple[str, ...]]] = []
        values: list[Any] = [row]
        level: list[tuple[int, tuple[str, ...]]] = [(0, ())]
        self._is_plain = True
        for place, prefix in level:
            entries = plain_entries(values[place])
            if entries is None:
                self._is_plain = False
                return
            self._levels.append((place, tuple(entries)))
            for name, value in entries.items():
                key = (*prefix, name)
                places[key if prefix else name] = len(values)
                if key in groups:
                    level.append((len(values), key))
                values.append(value)
        self._at = [places[key] for key in stored]
        tensors = [values[place] for place in self._at]
        self._types = list(map(type, tensors))
        self._shapes = list(map(_shape, tensors))
        self._dtypes = list(map(_dtype, tensors))

    def read(self, row: TensorDictBase) -> list[Tensor] | None:
        """The tensors of ``row`` that are stored, or ``None`` if it is not built like the accepted row."""
        if not self._is_plain:
            return None
        values: list[Any] = [row]
        for place, names in self._levels:
            entries = plain_entries(values[place])
            if entries is None or tuple(entries) != names:
                return None
            values += entries.values()
        tensors = [values[place] for place in self._at]
        # Types first: a TensorDict in a tensor's place has a shape and a dtype, too.
        if (
            list(map(type, tensors)) != self._types
            or list(map(_shape, tensors)) != self._shapes
            or list(map(_dtype, tensors)) != self._dtypes
        ):
            return None
        return tensors
