"""Rows of a tensor by their numbers, by the fastest kernel: every mini-batch is made of this.

*In random order*, into memory that is kept (`RowCopies`): ``torch.index_select`` takes 2.4 us a call on the
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


class RowCopies:
    """Several tensors of as many rows, and the memory that chosen rows of each are copied into.

    Args:
        sources: ``[M, *]`` each, any dtype.
        rooms: ``[K, *]`` each, of the same kind and on the same device.

    Examples:
        >>> import torch
        >>> from torchrl_rslstorage.data.gathering import RowCopies
        >>> room = torch.empty(2, 1)
        >>> RowCopies([torch.tensor([[1.0], [2.0], [3.0]])], [room]).run(torch.tensor([2, 0]))
        >>> room.tolist()
        [[3.0], [1.0]]
    """

    def __init__(self, sources: Sequence[Tensor], rooms: Sequence[Tensor]) -> None:
        pairs = [_flat_if_narrow(*pair) for pair in zip(sources, rooms, strict=True)]
        self._sources = [source for source, _ in pairs]
        self._rooms = [room for _, room in pairs]
        self._arrays = [_arrays(*pair) for pair in pairs]
        self._are_small = [room.numel() < _TORCH_GRAIN for room in self._rooms]
        self._tensors = [*self._sources, *self._rooms]
        self._addresses = list(map(Tensor.data_ptr, self._tensors))

    def run(self, rows: Tensor) -> None:
        """Copies the rows ``[K]``, int64 and on the tensors' device.

        Raises:
            IndexError: a number is not that of a row (on the CPU; other devices say it in their way).
        """
        numbers = rows.numpy() if rows.is_cpu and self._sources and len(rows) else None
        if numbers is not None:
            num_rows = len(self._sources[0])
            # Negative ones are large as unsigned numbers: one look finds both.
            if numbers.view(np.uint64).max() >= num_rows:
                raise IndexError(
                    f"Rows {numbers.min()} to {numbers.max()} were asked for; "
                    f"there are rows 0 to {num_rows - 1}."
                )
            # Autograd does not see what numpy writes: a graph that was kept must notice, not go wrong.
            increment_version(self._rooms)
            # Sharing a tensor with other processes (`share_memory_`) moves the memory below it and its views;
            # numpy would go on reading and writing where it was, which is somebody else's by then.
            if list(map(Tensor.data_ptr, self._tensors)) != self._addresses:
                numbers = None
        torch_has_one_thread = torch.get_num_threads() == 1
        for source, room, arrays, is_small in zip(
            self._sources, self._rooms, self._arrays, self._are_small, strict=True
        ):
            if numbers is None or arrays is None or not (is_small or torch_has_one_thread):
                torch.index_select(source, 0, rows, out=room)
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


def _flat_if_narrow(source: Tensor, room: Tensor) -> tuple[Tensor, Tensor]:
    """Both without gradients, and with one dimension if a row is one number."""
    if source.shape[1:].numel() == 1:
        return source.detach().reshape(-1), room.view(-1)
    return source.detach(), room


def _arrays(source: Tensor, room: Tensor) -> tuple[np.ndarray, np.ndarray] | None:
    """Both as numpy sees the same memory; None where it cannot."""
    if not (source.is_cpu and room.is_cpu and room.is_contiguous()):
        return None
    try:
        return source.numpy(), room.numpy()
    except (TypeError, RuntimeError):  # dtypes that numpy has not got; conjugate views
        return None
