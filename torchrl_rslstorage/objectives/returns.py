"""Advantage maths as pure functions on ``[T, N, 1]`` tensors."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from torchrl_rslstorage.modules.normalizer import Pool

NORMALIZE_EPS = 1e-8
"""Added to the standard deviation (rsl_rl 5.5.1, algorithms/ppo.py, ``compute_returns``)."""


class GAERecursion:
    """Turns ``r_t + bootstrap_t`` into advantages and value targets, in place.

        δ'_t = r_t + bootstrap_t − V(s_t)
        A_t = δ'_t + γ·(1 − done_t)·G_{t+1},     G_t = V(s_t) + λ·A_t,     G_T = 0
        target_t = A_t + V(s_t)

    ``bootstrap_t`` is γ·V of whatever follows a step whose next row belongs to another episode: a
    truncated step, or the window's last row. With it folded into the reward, one recursion serves every
    rule for time-outs. Schulman et al. 2016, arXiv:1506.02438, eq. 16.

    G alone recurs, ``G_t = V(s_t) + λ·δ'_t + γλ·(1 − done_t)·G_{t+1}``: one call a row. The views that
    this takes are made once for a set of buffers.

    Args:
        advantage: ``[T, N, 1]``; holds the reward and the bootstrap when called, then A.
        value_target: ``[T, N, 1]``; overwritten.
        value: V(s_t), ``[T, N, 1]``.


    Examples:
        >>> import torch
        >>> from torchrl_rslstorage.objectives.returns import GAERecursion
        >>> first_term, target = torch.ones(2, 1, 1), torch.empty(2, 1, 1)
        >>> recursion = GAERecursion(first_term, target, value=torch.zeros(2, 1, 1))
        >>> recursion(torch.zeros(2, 1, 1, dtype=torch.bool), gamma=1.0, lmbda=1.0)
        >>> target.flatten()
        tensor([2., 1.])
    """

    def __init__(self, advantage: Tensor, value_target: Tensor, value: Tensor) -> None:
        self._buffers = (advantage, value_target, value)
        self._trace = torch.empty_like(advantage)
        rows, alive = self._trace.unbind(0), value_target.unbind(0)
        self._steps = [(rows[t], alive[t], rows[t + 1]) for t in range(len(rows) - 2, -1, -1)]
        self._but_last = (advantage[:-1], value_target[:-1], self._trace[1:])

    def is_of(self, advantage: Tensor, value_target: Tensor, value: Tensor) -> bool:
        """Whether it was made for these very tensors."""
        mine = self._buffers
        return mine[0] is advantage and mine[1] is value_target and mine[2] is value

    def __call__(self, done: Tensor, *, gamma: float, lmbda: float) -> None:
        """Runs backwards over the window.

        Args:
            done: ``[T, N, 1]`` bool.
            gamma: discount.
            lmbda: trace decay.
        """
        advantage, value_target, value = self._buffers
        # value_target doubles as the float mask.
        torch.logical_not(done, out=value_target)
        advantage.sub_(value)
        torch.add(value, advantage, alpha=lmbda, out=self._trace)
        decay = gamma * lmbda
        for row, alive, following in self._steps:
            row.addcmul_(alive, following, value=decay)
        first_terms, alive, following = self._but_last
        first_terms.addcmul_(alive, following, value=gamma)
        torch.add(advantage, value, out=value_target)


def rsl_rl_gae_(
    advantage: Tensor,
    value_target: Tensor,
    value: Tensor,
    done: Tensor,
    *,
    gamma: float,
    lmbda: float,
) -> None:
    """RSL-RL's recursion, rounded as RSL-RL rounds it: ``r_t + bootstrap_t`` becomes A, in place.

        δ_t = (r_t + bootstrap_t) + γ·(1 − done_t)·V(s_{t+1}) − V(s_t),   V(s_T) = 0
        A_t = δ_t + γλ·(1 − done_t)·A_{t+1},                              A_T = 0
        target_t = A_t + V(s_t)

    ``bootstrap_t`` is γ·V of whatever follows a step whose next row belongs to another episode: a
    truncated step, or the window's last row. With it folded into the reward, one recursion serves every
    rule for time-outs. Schulman et al. 2016, arXiv:1506.02438, eq. 16.

    Products and sums are rounded in RSL-RL's order (rsl_rl 5.5.1, algorithms/ppo.py, ``compute_returns``).
    Adam divides by the size of a gradient, so that where one is almost zero the last bit of an advantage
    decides about 1e-5 of a weight.

    Args:
        advantage: ``[T, N, 1]``, holds the reward and the bootstrap; overwritten with A.
        value_target: ``[T, N, 1]``, overwritten.
        value: V(s_t), ``[T, N, 1]``.
        done: ``[T, N, 1]`` bool.
        gamma: discount.
        lmbda: trace decay.
    """
    # value_target doubles as scratch, so that nothing of the window's size is allocated.
    scratch = value_target
    torch.logical_not(done, out=scratch).mul_(gamma)
    scratch[:-1].mul_(value[1:])
    advantage[:-1].add_(scratch[:-1])
    advantage.sub_(value)
    torch.logical_not(done, out=scratch).mul_(gamma).mul_(lmbda)
    rows, decays = advantage.unbind(0), scratch.unbind(0)
    for t in range(len(rows) - 2, -1, -1):
        rows[t].add_(decays[t].mul_(rows[t + 1]))
    torch.add(advantage, value, out=value_target)
    # RSL-RL takes the advantage back from the target, which rounds once more.
    torch.sub(value_target, value, out=advantage)


def normalize_advantage(
    advantage: Tensor, *, eps: float = NORMALIZE_EPS, out: Tensor | None = None, pool: Pool | None = None
) -> Tensor:
    """``(A − mean A) / (std A + eps)`` over all elements, zero for a single one.

    The standard deviation is unbiased, as RSL-RL's (rsl_rl 5.5.1, algorithms/ppo.py), which yields NaN
    where there is only one element.

    Args:
        advantage: any shape.
        eps: added to the standard deviation.
        out: where to write; may be ``advantage`` itself.
        pool: gives moments of all ranks' elements, which are then those that count (`Ranks.pool`).

    Examples:
        >>> import torch
        >>> from torchrl_rslstorage import normalize_advantage
        >>> normalize_advantage(torch.tensor([1.0, 3.0]))
        tensor([-0.7071,  0.7071])
        >>> normalize_advantage(torch.tensor([5.0]))
        tensor([0.])
    """
    if pool is not None:
        count, mean, var = pool(advantage.reshape(-1, 1))
        std = (var * (count / (count - 1))).sqrt()
    elif advantage.numel() == 1:
        return torch.zeros_like(advantage) if out is None else out.zero_()
    else:
        mean, std = advantage.mean(), advantage.std()
    if out is None:
        return (advantage - mean) / (std + eps)
    return torch.sub(advantage, mean, out=out).div_(std + eps)


def explained_variance(value: Tensor, value_target: Tensor) -> Tensor:
    """``1 − Var[R − V] / Var[R]``, 0-dim, with biased variances; finite where all targets are the same.

    Args:
        value: V, any shape.
        value_target: R, of the same shape.
    """
    # `var` alone takes twice the time of `var_mean`.
    unexplained, _ = torch.var_mean(value_target - value, correction=0)
    spread, _ = torch.var_mean(value_target, correction=0)
    # As in TorchRL's PPOLoss: targets that are all the same would make it NaN.
    return 1 - unexplained / (spread + torch.finfo(spread.dtype).eps)


def require_same_shape(tensors: dict[str, Tensor], shape: Sequence[int], form: str) -> None:
    """Raises a ValueError that names the first tensor whose shape is not ``shape``."""
    for name, tensor in tensors.items():
        if tuple(tensor.shape) != tuple(shape):
            raise ValueError(
                f"`{name}` has shape {tuple(tensor.shape)}, expected {tuple(shape)}. All of "
                f"{', '.join(tensors)} must be {form}: a missing trailing 1 would broadcast."
            )
