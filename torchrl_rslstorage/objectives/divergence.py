"""KL, entropy and log-probability for any distribution that TorchRL's actors use, one number per sample.

Heads of a composite distribution may keep feature dimensions (a ``Normal`` over an action vector gives
``[B, A]``); they are summed down to the ``ndim`` batch dimensions before heads are added to each other.
"""

from __future__ import annotations

from functools import reduce
from typing import Any

import torch
from tensordict import TensorDictBase
from tensordict.nn import CompositeDistribution
from torch import Tensor
from torch.distributions import Distribution, kl_divergence

from torchrl_rslstorage.modules import DiagonalGaussian


def log_prob(dist: Distribution, action: Any, ndim: int) -> Tensor:
    """The action's log-probability, heads of a composite action summed."""
    return summed(dist.log_prob(action), ndim)


def summed(log_probs: Tensor | TensorDictBase, ndim: int) -> Tensor:
    """One tensor out of the log-probabilities of several heads; a tensor stays as it is."""
    if isinstance(log_probs, Tensor):
        return log_probs
    return _total([head for head in log_probs.values(True, True) if isinstance(head, Tensor)], ndim)


def exact_kl(old: Distribution, new: Distribution, ndim: int) -> Tensor | None:
    """KL(old ‖ new) per sample where ``torch.distributions`` has it registered, else nothing."""
    if isinstance(old, CompositeDistribution) and isinstance(new, CompositeDistribution):
        heads = [exact_kl(old.dists[name], new.dists[name], ndim) for name in new.dists]
        known = [head for head in heads if head is not None]
        return _total(known, ndim) if len(known) == len(heads) else None
    try:
        return kl_divergence(old, new)
    except NotImplementedError:
        return None


def estimated_kl(log_ratio: Tensor) -> Tensor:
    """``r − 1 − log r`` per sample, ``r`` = new over old: an unbiased, non-negative estimate of KL.

    Schulman 2020, "Approximating KL divergence", estimator k3.
    """
    return log_ratio.exp() - 1 - log_ratio


def entropy(dist: Distribution, ndim: int) -> tuple[Tensor, bool]:
    """Entropy per sample, and whether it is exact; of a composite, head by head.

    Where a distribution has no formula, ``−log p(a)`` of one fresh sample stands in: unbiased, and with
    the entropy's gradient where the distribution can be sampled through.
    """
    if isinstance(dist, CompositeDistribution):
        heads = [entropy(head, ndim) for head in dist.dists.values()]
        return _total([value for value, _ in heads], ndim), all(exact for _, exact in heads)
    try:
        return dist.entropy(), True
    except NotImplementedError:
        return -dist.log_prob(dist.rsample() if dist.has_rsample else dist.sample()), False


def mean_entropy(dist: Distribution, ndim: int) -> tuple[Tensor, bool]:
    """Mean of `entropy` over all samples, 0-dim, and whether it is exact."""
    if type(dist) is DiagonalGaussian:
        return dist.mean_entropy(), True
    value, exact = entropy(dist, ndim)
    return value.mean(), exact


def _total(heads: list[Tensor], ndim: int) -> Tensor:
    return reduce(torch.add, (head.flatten(ndim).sum(-1) if head.ndim > ndim else head for head in heads))
