"""Memory that is kept: windows outside of inference mode and in huge pages, and what networks free.

A window of 4096 legged robots takes 120 MiB, thirty thousand pages of 4 KiB. Shuffling it jumps from page to
page, and each jump waits for the page's address. In pages of 2 MiB the addresses fit into the processor's
table: measured on a two-core EPYC, the gather of 24 x 4096 x 235 floats takes two thirds of the time, a copy
into such memory six tenths. Most distributions leave huge pages to those who ask (``madvise`` in
``/sys/kernel/mm/transparent_hugepage/enabled``); torch asks only when ``THP_MEM_ALLOC_ENABLE=1`` was set
before it allocated anything.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Sequence

import torch
from torch import Tensor

_HUGE_PAGE = 2 * 1024 * 1024
_LEAST = 2 * _HUGE_PAGE
"""Bytes of which at least one whole huge page is sure to be part, wherever they begin."""
_MADV_HUGEPAGE: int | None = getattr(mmap, "MADV_HUGEPAGE", None)
"""What Linux calls the wish; None on systems that have none."""

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
"""glibc, malloc/malloc.h: free memory from which the system gets it back, and a block's size likewise."""
_MOST_FREE = 2**31 - 1
_LARGEST_BLOCKS = (2**30, 2**25)
"""Older versions of glibc refuse what is above 32 MiB (``HEAP_MAX_SIZE / 2`` in malloc/arena.c)."""
_SET_BY_USER = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")


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
    if room.device.type == "cpu" and room.nbytes >= _LEAST:
        _wish_for_huge_pages(room)
    return room


def empty_rows(like: Tensor, num_rows: int) -> Tensor:
    """`empty` of ``[num_rows, *]`` for rows of ``like``."""
    return empty((num_rows, *like.shape[1:]), dtype=like.dtype, device=like.device)


def zeros(shape: Sequence[int], *, dtype: torch.dtype, device: torch.device | str | None) -> Tensor:
    """`empty`, filled with zeros."""
    return empty(shape, dtype=dtype, device=device).zero_()


def _wish_for_huge_pages(room: Tensor) -> None:
    """Tells Linux, before the memory is filled; a system that cannot serves small pages as ever."""
    if _MADV_HUGEPAGE is None:
        return
    madvise = getattr(ctypes.CDLL(None), "madvise", None)
    if madvise is None:
        return
    page = mmap.PAGESIZE
    first = -(-room.data_ptr() // page) * page
    whole_pages = (room.data_ptr() + room.nbytes - first) // page * page
    madvise(ctypes.c_void_p(first), ctypes.c_size_t(whole_pages), _MADV_HUGEPAGE)
    # What the process had freed before would come in its old, small pages: they are given back, and with
    # them what nobody has written yet.
    madvise(ctypes.c_void_p(first), ctypes.c_size_t(whole_pages), mmap.MADV_DONTNEED)


def keep_freed_memory() -> bool:
    """Lets this process keep the memory that networks free on the CPU, instead of giving it back each time.

    glibc returns large blocks to the system as soon as they are freed, and the next mini-batch gets them
    back page by page, each filled with zeros first. With it, an update of 24 x 1024 (MLP 256-128-64) or of
    24 x 4096 (512-256-128) takes 0.9 of the time (two-core EPYC, one thread, glibc 2.36). The process stays
    as large as it once was.

    It holds for the whole process, from now on. The trainers call it when they are built; loops of your own
    may. Environment variables that say how glibc shall allocate win.

    Returns:
        Whether glibc took it: not on other systems, and not where an environment variable has said it.

    Examples:
        >>> from torchrl_rslstorage import keep_freed_memory
        >>> keep_freed_memory() in (True, False)
        True
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if os.name == "posix" else None
    if mallopt is None or any(name in os.environ for name in _SET_BY_USER):
        return False
    # The block's size first: either setting ends glibc's own adapting of it, and from then on each block
    # above 128 KiB would come from the system and go back to it, if the first one had been refused.
    if not any(mallopt(_M_MMAP_THRESHOLD, size) for size in _LARGEST_BLOCKS):
        return False
    return bool(mallopt(_M_TRIM_THRESHOLD, _MOST_FREE))
