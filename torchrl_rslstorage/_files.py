"""Whole files: replaced atomically, and values made fit for strict JSON."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def atomic_write_text(path: str | os.PathLike[str], text: str) -> None:
    r"""Replaces the file at ``path`` by ``text`` (UTF-8, ``\n``), wholly or not at all.

    >>> import tempfile
    >>> file = Path(tempfile.mkdtemp()) / "note.txt"
    >>> atomic_write_text(file, "new")
    >>> file.read_text()
    'new'
    """
    atomic_write_bytes(path, text.encode())


def atomic_write_bytes(path: str | os.PathLike[str], data: bytes) -> None:
    """Replaces the file at ``path`` by ``data``, wholly or not at all.

    The bytes reach the disk under another name in the same folder before the rename. A kill may
    leave that other file behind, never a torn target.

    Raises:
        OSError: there is no folder for it, it is a folder itself, or it cannot be written.
    """
    path = Path(path)
    if not path.parent.is_dir():
        raise FileNotFoundError(
            f"There is no folder {path.parent} for {path.name}: make it, or name another."
        )
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a folder: name a file.")
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as handle:
            handle.write(data)
            handle.flush()
            os.fsync(handle.fileno())
        temporary.replace(path)
    except BaseException:  # a KeyboardInterrupt must not leave the temporary file either
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise


def plain(value: object) -> Any:
    """Returns a path, a tensor or a NumPy value as JSON can say it (``json.dumps(default=plain)``).

    Raises:
        TypeError: for anything else.

    >>> import torch
    >>> plain(torch.tensor(2.5)), plain(Path("runs/a"))
    (2.5, 'runs/a')
    """
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    tolist = getattr(value, "tolist", None)
    if tolist is None:
        raise TypeError(f"JSON cannot hold {value!r} ({type(value).__name__}).")
    return tolist()


def finite(value: Any) -> Any:
    """Returns ``value`` made of JSON's own types, with None for NaN and the infinities.

    >>> finite({"loss": float("nan"), "sizes": (1, 2)})
    {'loss': None, 'sizes': [1, 2]}
    """
    if isinstance(value, Mapping):
        return {str(key): finite(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [finite(entry) for entry in value]
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if value is None or isinstance(value, bool | int | str):
        return value
    return finite(plain(value))
