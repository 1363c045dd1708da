"""Rows of a tensor by their numbers, by the fastest kernel: every mini-batch is made of this.

*In random order*, into memory that is kept (`copy_rows`): ``torch.index_select`` takes 2.4 us a call on the
CPU, a sixteenth of it copying at 16 x 16, and four times as long for ``[M, 1]`` as for ``[M]``; numpy's
``take`` does the same in 0.4 to 1.0 us (torch 2.13, numpy 2.4, one core). It has one thread only, so that
large copies are torch's where torch has several.

*Most of them in the order in which they stand* (`gather_rows`): torch has three kernels on a CPU.
``index_select`` calls memcpy for each row, which takes longer than copying one number does, and copies rows
of 512 to 2048 bytes at half the speed of longer ones. Of a tensor with one dimension it loads and stores.
``gather``, by an index expanded over the rows, copies in vectors, which in random order takes 1.4 times as
long. Measured for the padded trajectories of 24 x 1024 steps, of which 30 % end an episode (AMD EPYC, ms):

| bytes of a row | memcpy | load and store | vectors |
|---|---|---|---|
| 4 | 0.43 | 0.15 | 0.33 |
| 192 | 2.1 | | 2.6 |
| 1024 | 15.9 | | 9.0 |
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.autograd.graph import increment_version

_TORCH_GRAIN = 32768
"""Numbers below which torch copies in one thread, too (torch 2.13, aten/src/ATen/Parallel.h, GRAIN_SIZE)."""
_IN_VECTORS = (torch.float32, torch.float64, torch.bfloat16)
_BYTES_IN_VECTORS = range(512, 2049)
_HAS_VECTORS = torch.backends.openmp.is_available() and "fbgemm" in torch.backends.quantized.supported_engines
"""Where torch was built otherwise, ``gather`` reads the index once a number: four times slower."""


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
        self._arrays = _arrays(self.source, room)
        self._addresses = (self.source.data_ptr(), room.data_ptr())

    @property
    def arrays(self) -> tuple[np.ndarray, np.ndarray] | None:
        """Both as numpy sees the same memory; None where it cannot, or no longer does.

        Sharing a tensor with other processes moves the memory below it (``share_memory_``, a queue of
        ``torch.multiprocessing``). Tensors and their views go with it; numpy would go on reading and writing
        where it was, which is somebody else's by then.
        """
        stayed = (self.source.data_ptr(), self.room.data_ptr()) == self._addresses
        return self._arrays if stayed else None


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


def gather_rows(x: Tensor, index: Tensor, *, out: Tensor | None = None) -> Tensor:
    """``x.index_select(0, index)``.

    Args:
        x: ``[R, *]``, any dtype.
        index: ``[P]`` int64.
        out: ``[P, *]`` to write into.

    Examples:
        >>> import torch
        >>> from torchrl_rslstorage.data.gathering import gather_rows
        >>> gather_rows(torch.tensor([[1, 2], [3, 4]]), torch.tensor([1, 0, 1])).tolist()
        [[3, 4], [1, 2], [3, 4]]
    """
    features = x.shape[1:]
    width = features.numel()
    if not (x.is_contiguous() and (out is None or out.is_contiguous())):
        return torch.index_select(x, 0, index, out=out)
    if width == 1:
        target = None if out is None else out.view(-1)
        return torch.index_select(x.view(-1), 0, index, out=target).view(-1, *features)
    in_vectors = _HAS_VECTORS and x.device.type == "cpu" and x.dtype in _IN_VECTORS
    if in_vectors and width * x.element_size() in _BYTES_IN_VECTORS:
        target = None if out is None else out.view(-1, width)
        whole_rows = index.unsqueeze(1).expand(-1, width)
        return torch.gather(x.view(-1, width), 0, whole_rows, out=target).view(-1, *features)
    return torch.index_select(x, 0, index, out=out)


def _arrays(source: Tensor, room: Tensor) -> tuple[np.ndarray, np.ndarray] | None:
    """Both as numpy sees the same memory; None where it cannot."""
    if not (source.is_cpu and room.is_cpu and room.is_contiguous()):
        return None
    try:
        return source.numpy(), room.numpy()
    except (TypeError, RuntimeError):  # dtypes that numpy has not got; conjugate views
        return None
