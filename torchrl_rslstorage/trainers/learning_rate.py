"""RSL-RL's adaptive learning rate."""

from __future__ import annotations

import torch
from torch import Tensor

LEARNING_RATE_RANGE = (1e-5, 1e-2)
LEARNING_RATE_FACTOR = 1.5
"""Bounds and factor of the adaptive learning rate (rsl_rl 5.5.1, algorithms/ppo.py, ``PPO.update``)."""


def adapted_learning_rate(
    learning_rate: Tensor, kl: Tensor, desired_kl: float, *, zero_kl: float = 0.0
) -> Tensor:
    """RSL-RL's rule, on the device: slower above twice the desired KL, faster below half of it.

        lr ← max(1e-5, lr / 1.5)   if KL > 2·desired
        lr ← min(1e-2, lr · 1.5)   if zero < KL < desired / 2

    Args:
        learning_rate: 0-dim float64.
        kl: 0-dim, mean KL(old ‖ new) of the mini-batch.
        desired_kl: the target.
        zero_kl: a KL up to this is none, and changes nothing. RSL-RL's 0 needs a KL that is exactly zero
            where the policy has not changed yet.
    """
    low, high = LEARNING_RATE_RANGE
    slower = (learning_rate / LEARNING_RATE_FACTOR).clamp(min=low)
    faster = (learning_rate * LEARNING_RATE_FACTOR).clamp(max=high)
    small = (kl < desired_kl / 2) & (kl > zero_kl)
    return torch.where(kl > desired_kl * 2, slower, torch.where(small, faster, learning_rate))
