"""What of a step is stored: its two halves, taken from the TensorDict of a collector."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from tensordict import TensorDictBase
from tensordict.utils import NestedKey
from torch import Tensor

from torchrl_rslstorage.data.leaves import Key, canonical, dtype_name, leaves

SIGNALS = ("reward", "done", "terminated", "truncated")
"""The entries of ``next`` that have a column of their own."""

_FLAGS = ("done", "terminated", "truncated")
_ROOT_SKIP = frozenset({"next", *_FLAGS, "collector", "_reset"})


def root_leaves(td: TensorDictBase) -> dict[Key, Tensor]:
    """What the first half of a row stores: everything but done flags, ``next`` and ``collector``."""
    return leaves(td, skip=_ROOT_SKIP)


def next_leaves(td: TensorDictBase) -> dict[Key, Tensor]:
    """The leaves under ``next``, with ``terminated`` and ``truncated`` completed from ``done``.

    TorchRL environments may leave out one of the two; the missing one is ``done`` without the other.

    Raises:
        KeyError: there is no ``next``.
        ValueError: a done flag is not bool.
    """
    after = td.get("next", None)
    if after is None:
        raise KeyError("A row needs its `next` (reward, done, …): pass the TensorDict after env.step.")
    return complete_done(leaves(after))


def under_next(key: Key) -> Key:
    """The name in a row of what is ``key`` in its ``next``."""
    return ("next", key) if isinstance(key, str) else ("next", *key)


def complete_done(after: dict[Key, Tensor]) -> dict[Key, Tensor]:
    """``after`` with both ``terminated`` and ``truncated``, if it has ``done`` at all.

    Raises:
        ValueError: a flag is not bool.
    """
    for name in _FLAGS:
        flag = after.get(name)
        if flag is not None and flag.dtype is not torch.bool:
            raise ValueError(
                f"('next', '{name}') is {dtype_name(flag.dtype)}, expected bool: pass {name}.bool()."
            )
    done = after.get("done")
    if done is None:
        return after
    if "terminated" not in after:
        truncated = after.get("truncated")
        after["terminated"] = done.clone() if truncated is None else done & ~truncated
    if "truncated" not in after:
        after["truncated"] = done & ~after["terminated"]
    return after


def split_next(
    after: Mapping[Key, Tensor], root: Mapping[Key, Tensor]
) -> tuple[dict[Key, Tensor], dict[Key, Tensor]]:
    """``next`` as (columns, final observations): the latter also stand at the root, one row later."""
    columns: dict[Key, Tensor] = {}
    finals: dict[Key, Tensor] = {}
    for key, value in after.items():
        if key in SIGNALS:
            columns[key] = value
        elif key in root:
            if key != "is_init":
                finals[key] = value
        else:
            columns[key] = value
    return columns, finals


class Row(dict[Key, Tensor]):
    """One row ``[N]`` by name, with as much of a TensorDict as this package's MLP actor and critic ask for.

    A TensorDict checks and wraps what is set in it, at 12 us an entry: a quarter of a small collector's time.
    """

    ndim = 1

    def __init__(self, entries: Mapping[Key, Tensor], num_envs: int) -> None:
        super().__init__(entries)
        self.batch_size = torch.Size([num_envs])

    def get(self, key: NestedKey, default: Any = None) -> Any:
        """The entry, by any spelling of its name."""
        return super().get(key if isinstance(key, str) else canonical(key), default)

    def set(self, key: NestedKey, value: Tensor) -> Row:
        """Sets an entry, by any spelling of its name."""
        self[key if isinstance(key, str) else canonical(key)] = value
        return self
