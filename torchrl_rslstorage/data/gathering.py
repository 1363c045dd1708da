"""Copying chosen rows of a tensor into memory that is kept: every mini-batch is made of this.

``torch.index_select`` takes 2.4 us a call on the CPU, a sixteenth of it copying at 16 x 16, and four times as
long for ``[M, 1]`` as for ``[M]``; numpy's ``take`` does the same in 0.4 to 1.0 us (torch 2.13, numpy 2.4,
one core). It has one thread only, so that large copies are torch's where torch has several.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.autograd.graph import increment_version

_TORCH_GRAIN = 32768
"""Numbers below which torch copies in one thread, too (torch 2.13, aten/src/ATen/Parallel.h, GRAIN_SIZE)."""


class RowCopy:
    """The rows of one tensor, and the memory that chosen ones are copied into.

    Args:
        source: ``[M, *]``, any dtype.
        room: ``[K, *]`` of the same kind and on the same device, contiguous.
    """

    def __init__(self, source: Tensor, room: Tensor) -> None:
        features = source.shape[1:].numel()
        if features == 1:
            source, room = source.reshape(-1), room.view(-1)
        self.room = room
        self.source = source.detach()
        self.is_small = len(room) * features < _TORCH_GRAIN
        self.arrays = _arrays(self.source, room)


def copy_rows(copies: Sequence[RowCopy], rows: Tensor) -> None:
    """Copies the rows ``[K]`` of several tensors of as many rows, each into its memory.

    Args:
        copies: whose memory has K rows.
        rows: int64, on their device.

    Raises:
        IndexError: a number is not that of a row (on the CPU; other devices say it in their way).

    Examples:
        >>> import torch
        >>> from torchrl_rslstorage.data.gathering import RowCopy, copy_rows
        >>> room = torch.empty(2, 1)
        >>> copy_rows([RowCopy(torch.tensor([[1.0], [2.0], [3.0]]), room)], torch.tensor([2, 0]))
        >>> room.tolist()
        [[3.0], [1.0]]
    """
    numbers = rows.numpy() if rows.is_cpu and copies and len(rows) else None
    if numbers is not None:
        num_rows = len(copies[0].source)
        # Negative ones are large as unsigned numbers: one look finds both.
        if numbers.view(np.uint64).max() >= num_rows:
            raise IndexError(
                f"Rows {numbers.min()} to {numbers.max()} were asked for; there are rows 0 to {num_rows - 1}."
            )
        # Autograd does not see what numpy writes: a graph that was kept must notice, not go wrong.
        increment_version([copy.room for copy in copies])
    torch_has_one_thread = torch.get_num_threads() == 1
    for copy in copies:
        arrays = copy.arrays
        if numbers is None or arrays is None or not (copy.is_small or torch_has_one_thread):
            torch.index_select(copy.source, 0, rows, out=copy.room)
        else:
            arrays[0].take(numbers, 0, arrays[1], "clip")  # "raise" goes through a copy of its own


def _arrays(source: Tensor, room: Tensor) -> tuple[np.ndarray, np.ndarray] | None:
    """Both as numpy sees the same memory; None where it cannot."""
    if not (source.is_cpu and room.is_cpu and room.is_contiguous()):
        return None
    try:
        return source.numpy(), room.numpy()
    except (TypeError, RuntimeError):  # dtypes that numpy has not got; conjugate views
        return None
