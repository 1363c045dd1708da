"""Walking a TensorDict's leaves cheaply, and naming them in errors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from operator import is_
from typing import Any

import torch
from tensordict import TensorDictBase
from tensordict.utils import NestedKey
from torch import Tensor

Key = str | tuple[str, ...]
"""A leaf's name: a string at the root, a tuple of strings below it."""


def canonical(key: NestedKey) -> Key:
    """``key`` as `leaves` spells it: a one-element tuple becomes a string, nesting is flattened."""
    if isinstance(key, str):
        return key
    flat: list[str] = []
    for part in key:
        inner = canonical(part)
        flat.extend((inner,) if isinstance(inner, str) else inner)
    return flat[0] if len(flat) == 1 else tuple(flat)


def leaves(
    td: TensorDictBase, skip: frozenset[str] = frozenset(), prefix: tuple[str, ...] = ()
) -> dict[Key, Tensor]:
    """Every tensor below ``td`` by name, in insertion order, without the root entries in ``skip``.

    Three times cheaper than ``td.keys(True, True)``, which matters once per environment step.

    Raises:
        TypeError: an entry is not a tensor.
    """
    out: dict[Key, Tensor] = {}
    for name, value in td.items():
        if name in skip:
            continue
        if isinstance(value, Tensor):
            out[(*prefix, name) if prefix else name] = value
        elif isinstance(value, TensorDictBase):
            out.update(leaves(value, prefix=(*prefix, name)))
        else:
            raise TypeError(
                f"The entry {show((*prefix, name))} is a {type(value).__name__}, not a tensor: a buffer "
                "holds tensors only. Drop it (td.exclude) before it reaches the buffer."
            )
    return out


def select(names: Iterable[Key], wanted: Iterable[NestedKey]) -> list[Key]:
    """The ``names`` that ``wanted`` asks for; a wanted name may be a leaf or a group of leaves.

    Raises:
        KeyError: a wanted name stands for no leaf; the valid ones are listed.
    """
    names = list(names)
    found: dict[Key, None] = {}
    for raw in wanted:
        key = canonical(raw)
        group = (key,) if isinstance(key, str) else key
        hits = [
            name for name in names if name == key or (isinstance(name, tuple) and name[: len(group)] == group)
        ]
        if not hits:
            raise KeyError(f"There is no key {show(key)} in this buffer. It holds {show_all(names)}.")
        found.update(dict.fromkeys(hits))
    return list(found)


def show(key: NestedKey) -> str:
    """``key`` as an error message prints it."""
    key = canonical(key)
    return f"'{key}'" if isinstance(key, str) else repr(key)


def show_all(keys: Iterable[NestedKey]) -> str:
    """Several keys as an error message lists them."""
    return ", ".join(show(key) for key in keys) or "no keys"


def nest(flat: Mapping[Key, Any]) -> dict[str, Any]:
    """A nested dictionary from flat names, the shape that a TensorDict's constructor takes."""
    out: dict[str, Any] = {}
    for key, value in flat.items():
        parts = (key,) if isinstance(key, str) else key
        level = out
        for part in parts[:-1]:
            level = level.setdefault(part, {})
        level[parts[-1]] = value
    return out


def nbytes(flat: Mapping[Key, Tensor]) -> int:
    """Bytes that the tensors take, counted from shape and dtype."""
    return sum(tensor.numel() * tensor.element_size() for tensor in flat.values())


def same_tensors(a: Mapping[Key, Tensor], b: Mapping[Key, Tensor]) -> bool:
    """Whether both hold the very same tensors by the same names."""
    return len(a) == len(b) and all(map(is_, map(b.get, a), a.values()))


def dtype_name(dtype: torch.dtype) -> str:
    """``float32`` for ``torch.float32``."""
    return str(dtype).removeprefix("torch.")
