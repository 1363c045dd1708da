"""Running mean and standard deviation of observations."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

Pool = Callable[[Tensor], tuple[Tensor, Tensor, Tensor]]
"""Number (0-dim), mean and biased variance ``[F]`` of rows ``[M, F]`` and of those that others have."""


class EmpiricalNormalizer(nn.Module):
    """``(x − mean) / (std + eps)`` with the moments of all observations seen in `update`.

    Moments are merged batch by batch (Chan et al. 1979; rsl_rl 5.5.1, modules/normalization.py):

        mean ← mean + r·(m − mean)
        var  ← var + r·(v − var + (m − mean_old)·(m − mean)),     r = count_batch / count

    Call `update` once per iteration and *after* the optimisation: a normaliser that moves between acting
    and learning makes the first mini-batch's ratios differ from 1. Before the first update it is
    ``x / (1 + eps)``.

    Args:
        num_features: F.
        eps: added to the standard deviation; RSL-RL's 1e-2.
        until: take in no more batches once so many observations were seen.

    Batches that are spread over several processes count as one where ``pool`` is set (`Ranks.share` does it);
    all of them must call `update` then, also those without a row.

    Examples:
        >>> import torch
        >>> from torchrl_rslstorage import EmpiricalNormalizer
        >>> normalizer = EmpiricalNormalizer(1, eps=0.0)
        >>> normalizer.update(torch.tensor([[1.0], [3.0]]))
        >>> normalizer(torch.tensor([[4.0]]))
        tensor([[2.]])
    """

    mean: Tensor
    var: Tensor
    std: Tensor
    count: Tensor

    def __init__(self, num_features: int, eps: float = 1e-2, until: int | None = None) -> None:
        super().__init__()
        self.eps = eps
        self.until = until
        self.pool: Pool | None = None
        self.register_buffer("mean", torch.zeros(num_features))
        self.register_buffer("var", torch.ones(num_features))
        self.register_buffer("std", torch.ones(num_features))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        """Normalises ``[*, F]``."""
        return (x - self.mean) / (self.std + self.eps)

    @torch.no_grad()
    def update(self, x: Tensor) -> None:
        """Takes in a batch ``[M, F]``; does nothing in eval mode."""
        if not self.training or (len(x) == 0 and self.pool is None):
            return
        # Not var_mean, and no division of a Python number by a tensor: those round otherwise than RSL-RL.
        if self.pool is None:
            mean, var = x.mean(dim=0), x.var(dim=0, correction=0)
            added = torch.full_like(self.count, len(x))
        else:
            added, mean, var = self.pool(x)
        if self.until is not None:
            added = added * (self.count < self.until)
        self.count += added
        rate = added / self.count.clamp(min=1)
        shift = mean - self.mean
        self.mean += rate * shift
        self.var += rate * (var - self.var + shift * (mean - self.mean))
        self.std.copy_(self.var.sqrt())

    def extra_repr(self) -> str:
        """Shown in the module's repr."""
        return f"{len(self.mean)}, eps={self.eps}"
