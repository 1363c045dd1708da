"""Mini-batches as locked views of memory that is gathered anew for each draw."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from operator import is_
from typing import Any

from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from torchrl_rslstorage._compat import plain_entries
from torchrl_rslstorage.data.leaves import Key, nest


class BatchViews:
    """The mini-batches of one copy, made once and handed out for as long as the copy's tensors stay."""

    def __init__(self) -> None:
        self._made: tuple[dict[Key, Tensor], list[TensorDict], list[_Contents]] | None = None

    def cut(self, shuffled: dict[Key, Tensor], parts: int) -> list[TensorDict]:
        """Locked views ``[B]`` of leaves ``[M, *]``, sizes differing by at most one.

        Args:
            shuffled: what to cut. The same dictionary gives the same mini-batches.
            parts: how many.
        """
        if self._made is not None and self._made[0] is shuffled:
            batches, made = self._made[1:]
            # One that somebody unlocked and set something in is not handed out again.
            if len(batches) == parts and all(map(_holds, made)):
                return batches
        first = next(iter(shuffled.values()))
        batches = [
            TensorDict(
                nest({name: leaf[start:stop] for name, leaf in shuffled.items()}),
                [stop - start],
                device=first.device,
            ).lock_()
            for start, stop in balanced(len(first), parts)
        ]
        self._made = (shuffled, batches, [held for batch in batches for held in _contents(batch)])
        return batches


def balanced(total: int, parts: int) -> list[tuple[int, int]]:
    """Where to cut ``total`` things into ``parts`` whose sizes differ by at most one."""
    small, longer = divmod(total, parts)
    return list(pairwise(i * small + min(i, longer) for i in range(parts + 1)))


_Contents = tuple[TensorDictBase, tuple[str, ...], tuple[Any, ...]]
"""A TensorDict with the names and the values that it was locked with."""


def _contents(td: TensorDictBase) -> Iterator[_Contents]:
    """What ``td`` and every TensorDict below it hold now."""
    entries = plain_entries(td)
    assert entries is not None
    yield td, tuple(entries), tuple(entries.values())
    for value in entries.values():
        if isinstance(value, TensorDictBase):
            yield from _contents(value)


def _holds(contents: _Contents) -> bool:
    """Whether the TensorDict is locked and holds the very same objects, names as well as values."""
    td, names, values = contents
    entries = plain_entries(td)
    # Compared in C: this runs over every mini-batch of every update.
    return (
        entries is not None
        and td.is_locked
        and tuple(entries) == names
        and all(map(is_, entries.values(), values))
    )
