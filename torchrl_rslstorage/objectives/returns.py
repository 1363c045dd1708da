"""Advantage maths as pure functions on ``[T, N, 1]`` tensors."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

NORMALIZE_EPS = 1e-8
"""Added to the standard deviation (rsl_rl 5.5.1, algorithms/ppo.py, ``compute_returns``)."""


def bootstrapped_gae_(
    advantage: Tensor,
    value_target: Tensor,
    value: Tensor,
    done: Tensor,
    *,
    gamma: float,
    lmbda: float,
) -> None:
    """Turns ``r_t + bootstrap_t − V(s_t)`` into advantages and value targets, in place.

        A_t = (r_t + bootstrap_t − V(s_t)) + γ·(1 − done_t)·(V(s_{t+1}) + λ·A_{t+1}),   t < T − 1
        A_t = (r_t + bootstrap_t − V(s_t)),                                              t = T − 1
        target_t = A_t + V(s_t)

    ``bootstrap_t`` is γ·V of whatever follows a step whose next row belongs to another episode: a
    truncated step, or the window's last row. With it folded into the first term, one recursion serves
    every rule for time-outs. Schulman et al. 2016, arXiv:1506.02438, eq. 16.

    Args:
        advantage: ``[T, N, 1]``, holds the first term; overwritten with A.
        value_target: ``[T, N, 1]``, overwritten.
        value: V(s_t), ``[T, N, 1]``.
        done: ``[T, N, 1]`` bool.
        gamma: discount.
        lmbda: trace decay.
    """
    # value_target doubles as the float mask, so that nothing of the window's size is allocated.
    torch.logical_not(done, out=value_target)
    ahead = torch.empty_like(advantage[0])
    rows = advantage.unbind(0)
    values = value.unbind(0)
    alive = value_target.unbind(0)
    for t in range(len(rows) - 2, -1, -1):
        torch.add(values[t + 1], rows[t + 1], alpha=lmbda, out=ahead)
        rows[t].addcmul_(ahead, alive[t], value=gamma)
    torch.add(advantage, value, out=value_target)


def normalize_advantage(
    advantage: Tensor, *, eps: float = NORMALIZE_EPS, out: Tensor | None = None
) -> Tensor:
    """``(A − mean A) / (std A + eps)`` over all elements, zero for a single one.

    The standard deviation is unbiased, as RSL-RL's (rsl_rl 5.5.1, algorithms/ppo.py), which yields NaN
    where there is only one element.

    Args:
        advantage: any shape.
        eps: added to the standard deviation.
        out: where to write; may be ``advantage`` itself.

    Examples:
        >>> import torch
        >>> from torchrl_rslstorage import normalize_advantage
        >>> normalize_advantage(torch.tensor([1.0, 3.0]))
        tensor([-0.7071,  0.7071])
        >>> normalize_advantage(torch.tensor([5.0]))
        tensor([0.])
    """
    if advantage.numel() == 1:
        return torch.zeros_like(advantage) if out is None else out.zero_()
    std, mean = torch.std_mean(advantage)
    if out is None:
        return (advantage - mean) / (std + eps)
    return torch.sub(advantage, mean, out=out).div_(std + eps)


def require_same_shape(tensors: dict[str, Tensor], shape: Sequence[int], form: str) -> None:
    """Raises a ValueError that names the first tensor whose shape is not ``shape``."""
    for name, tensor in tensors.items():
        if tuple(tensor.shape) != tuple(shape):
            raise ValueError(
                f"`{name}` has shape {tuple(tensor.shape)}, expected {tuple(shape)}. All of "
                f"{', '.join(tensors)} must be {form}: a missing trailing 1 would broadcast."
            )
