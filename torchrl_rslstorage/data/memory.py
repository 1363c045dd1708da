"""Memory that is kept for many windows: outside of inference mode, and in huge pages where Linux has them.

A window of 4096 legged robots takes 120 MiB, thirty thousand pages of 4 KiB. Shuffling it jumps from page to
page, and each jump waits for the page's address. In pages of 2 MiB the addresses fit into the processor's
table: measured on a two-core EPYC, the gather of 24 x 4096 x 235 floats takes two thirds of the time, a copy
into such memory six tenths. Most distributions leave huge pages to those who ask (``madvise`` in
``/sys/kernel/mm/transparent_hugepage/enabled``); torch asks only when ``THP_MEM_ALLOC_ENABLE=1`` was set
before it allocated anything.
"""

from __future__ import annotations

import ctypes
import math
import mmap
from collections.abc import Sequence

import torch
from torch import Tensor

_HUGE_PAGE = 2 * 1024 * 1024
_LEAST = 2 * _HUGE_PAGE
"""Bytes of which at least one whole huge page is sure to be part, wherever they begin."""
_MADV_HUGEPAGE: int | None = getattr(mmap, "MADV_HUGEPAGE", None)
"""What Linux calls the wish; None on systems that have none."""


def empty(shape: Sequence[int], *, dtype: torch.dtype, device: torch.device | str | None) -> Tensor:
    """Memory of this shape, not filled, that may be written in and out of inference mode.

    Raises:
        RuntimeError, MemoryError: there is not so much.

    Examples:
        >>> import torch
        >>> from torchrl_rslstorage.data import memory
        >>> with torch.inference_mode():
        ...     room = memory.empty((3, 2), dtype=torch.float32, device="cpu")
        >>> room.is_inference()
        False
    """
    with torch.inference_mode(False):
        room = torch.empty(tuple(shape), dtype=dtype, device=device)
    if room.device.type == "cpu" and math.prod(shape) * dtype.itemsize >= _LEAST:
        _wish_for_huge_pages(room)
    return room


def empty_rows(like: Tensor, num_rows: int) -> Tensor:
    """`empty` of ``[num_rows, *]`` for rows of ``like``."""
    return empty((num_rows, *like.shape[1:]), dtype=like.dtype, device=like.device)


def zeros(shape: Sequence[int], *, dtype: torch.dtype, device: torch.device | str | None) -> Tensor:
    """`empty`, filled with zeros."""
    return empty(shape, dtype=dtype, device=device).zero_()


def _wish_for_huge_pages(room: Tensor) -> None:
    """Tells Linux, before the memory is touched; a system that cannot serves small pages as ever."""
    if _MADV_HUGEPAGE is None:
        return
    madvise = getattr(ctypes.CDLL(None), "madvise", None)
    if madvise is None:
        return
    first = room.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
    length = room.data_ptr() + room.untyped_storage().nbytes() - first
    madvise(ctypes.c_void_p(first), ctypes.c_size_t(length), _MADV_HUGEPAGE)
