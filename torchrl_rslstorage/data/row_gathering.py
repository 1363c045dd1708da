"""Rows of a tensor by their numbers, most of them in the order in which they stand, by the fastest kernel.

torch 2.13 has three of them on a CPU. ``index_select`` calls memcpy for each row, which takes longer than
copying one number does, and copies rows of 512 to 2048 bytes at half the speed of longer ones. Of a tensor
with one dimension it loads and stores. ``gather``, by an index expanded over the rows, copies in vectors.
Measured for the padded trajectories of a window of 24 x 1024, of which 30 % end an episode (AMD EPYC, ms):

| bytes of a row | memcpy | load and store | vectors |
|---|---|---|---|
| 4 | 0.43 | 0.15 | 0.33 |
| 192 | 2.1 | | 2.6 |
| 1024 | 15.9 | | 9.0 |

Rows in random order are another matter: vectors take 1.4 times as long there.
"""

from __future__ import annotations

import torch
from torch import Tensor

_IN_VECTORS = (torch.float32, torch.float64, torch.bfloat16)
_BYTES_IN_VECTORS = range(512, 2049)
_HAS_VECTORS = torch.backends.openmp.is_available() and "fbgemm" in torch.backends.quantized.supported_engines
"""Where torch was built otherwise, ``gather`` reads the index once a number: four times slower."""


def gather_rows(x: Tensor, index: Tensor, *, out: Tensor | None = None) -> Tensor:
    """``x.index_select(0, index)``.

    Args:
        x: ``[R, *]``, any dtype.
        index: ``[P]`` int64.
        out: ``[P, *]`` to write into.

    Examples:
        >>> import torch
        >>> from torchrl_rslstorage.data.row_gathering import gather_rows
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
