"""KL, entropy and log-probability for any distribution that TorchRL's actors use."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDictBase
from tensordict.nn import CompositeDistribution
from torch import Tensor
from torch.distributions import Distribution, kl_divergence


def log_prob(dist: Distribution, action: Any) -> Tensor:
    """The action's log-probability, heads of a composite action summed."""
    return summed(dist.log_prob(action))


def summed(log_probs: Tensor | TensorDictBase) -> Tensor:
    """One tensor out of the log-probabilities of several heads.

    A composite distribution leaves its batch size unsaid, so heads with feature dimensions are summed
    down to the dimensions that all heads have.
    """
    if isinstance(log_probs, Tensor):
        return log_probs
    heads = [head for head in log_probs.values(True, True) if isinstance(head, Tensor)]
    dims = min(head.ndim for head in heads)
    total = torch.zeros((), device=heads[0].device)
    for head in heads:
        total = total + (head.flatten(dims).sum(-1) if head.ndim > dims else head)
    return total


def exact_kl(old: Distribution, new: Distribution) -> Tensor | None:
    """KL(old ‖ new) per sample where ``torch.distributions`` has it registered, else nothing."""
    if isinstance(old, CompositeDistribution) and isinstance(new, CompositeDistribution):
        heads = [exact_kl(old.dists[name], new.dists[name]) for name in new.dists]
        if any(head is None for head in heads):
            return None
        return sum((head for head in heads if head is not None), torch.zeros(()))
    try:
        return kl_divergence(old, new)
    except NotImplementedError:
        return None


def estimated_kl(log_ratio: Tensor) -> Tensor:
    """``r − 1 − log r`` per sample, ``r`` = new over old: an unbiased, non-negative estimate of KL.

    Schulman 2020, "Approximating KL divergence", estimator k3.
    """
    return log_ratio.exp() - 1 - log_ratio


def exact_entropy(dist: Distribution) -> Tensor | None:
    """Entropy per sample where the distribution has a formula for it, else nothing."""
    if isinstance(dist, CompositeDistribution):
        heads = [exact_entropy(head) for head in dist.dists.values()]
        if any(head is None for head in heads):
            return None
        return sum((head for head in heads if head is not None), torch.zeros(()))
    try:
        return dist.entropy()
    except NotImplementedError:
        return None


def sampled_entropy(dist: Distribution) -> Tensor:
    """``−log p(a)`` of one fresh sample: an unbiased estimate of the entropy, with its gradient.

    Distributions that cannot be sampled through (discrete ones have exact entropies) get no gradient
    from the sample, only from its log-probability, which is zero in expectation.
    """
    with torch.set_grad_enabled(torch.is_grad_enabled() and dist.has_rsample):
        sample = dist.rsample() if dist.has_rsample else dist.sample()
    return -log_prob(dist, sample)
