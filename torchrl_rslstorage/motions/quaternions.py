"""Unit quaternions ``wxyz`` as pure functions on ``[*, 4]``.

A rotation has two quaternions, q and −q. Everything here takes the shorter way between two rotations, so
that it does not matter which of the two a file gives.

Neither function has a threshold below which it changes its formula: both divide by sin θ / θ with θ in
[0, π/2], which is never below 2/π, and measure θ by atan2, which is exact where arccos loses half its digits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor


def slerp(a: Tensor, b: Tensor, t: Tensor) -> Tensor:
    """The rotation that turns evenly from ``a`` (at t = 0) to ``b`` (at t = 1), the shorter way.

        θ = 2·atan2(|b − a|, |b + a|)        with b replaced by −b where a·b < 0
        q = (sin((1 − t)θ)·a + sin(tθ)·b) / sin θ

    Shoemake 1985, "Animating rotation with quaternion curves", section 3.3; the angle as in Kahan 2006,
    "How futile are mindless assessments of roundoff in floating-point computation?", section 12.

    Args:
        a: ``[*, 4]`` unit quaternions; the result's sign follows them.
        b: ``[*, 4]`` unit quaternions.
        t: ``[*]``, broadcast to them, within [0, 1].

    Returns:
        ``[*, 4]`` unit quaternions.

    >>> half = slerp(torch.tensor([1.0, 0, 0, 0]), torch.tensor([0.0, 0, 0, 1]), torch.tensor(0.5))
    >>> [round(x, 4) for x in half.tolist()]
    [0.7071, 0.0, 0.0, 0.7071]
    """
    b = torch.where((a * b).sum(-1, keepdim=True) < 0, -b, b)
    angle = 2 * torch.atan2(torch.linalg.vector_norm(b - a, dim=-1), torch.linalg.vector_norm(b + a, dim=-1))
    # torch.sinc(x) is sin(πx)/(πx): θ cancels, and nothing is left to divide by zero.
    from_a = (1 - t) * torch.sinc((1 - t) * angle / math.pi)
    from_b = t * torch.sinc(t * angle / math.pi)
    return torch.nn.functional.normalize(from_a.unsqueeze(-1) * a + from_b.unsqueeze(-1) * b, dim=-1)


def angular_velocity(q: Tensor, dt: Tensor) -> Tensor:
    """The constant angular velocity that turns each frame into the next, in the turning body's own axes.

        ω_i = 2·log(q_i⁻¹ q_{i+1}) / dt_i

    The axis of a rotation is the same before and after it: ω_i holds in the axes of frame i and of frame i+1.
    Solà 2017, arXiv:1711.02508, equation 105.

    Args:
        q: ``[F, *, 4]`` unit quaternions.
        dt: ``[F - 1]`` seconds from each frame to the next.

    Returns:
        ``[F - 1, *, 3]`` radians a second.

    >>> turn = torch.tensor([[1.0, 0, 0, 0], [0.0, 0, 0, 1]])
    >>> [round(x, 4) for x in angular_velocity(turn, torch.tensor([0.5])).flatten().tolist()]
    [0.0, 0.0, 6.2832]
    """
    w, v = q[:-1, ..., :1], q[:-1, ..., 1:]
    next_w, next_v = q[1:, ..., :1], q[1:, ..., 1:]
    real = w * next_w + (v * next_v).sum(-1, keepdim=True)
    imaginary = w * next_v - next_w * v - torch.linalg.cross(v, next_v)
    imaginary = torch.where(real < 0, -imaginary, imaginary)
    half = torch.atan2(torch.linalg.vector_norm(imaginary, dim=-1, keepdim=True), real.abs())
    return 2 * imaginary / torch.sinc(half / math.pi) / dt.view(-1, *[1] * (q.ndim - 1))


def continuous(q: Tensor) -> Tensor:
    """``q [F, *, 4]`` normalised, with signs such that neighbours agree and the first frame has w ≥ 0.

    >>> continuous(torch.tensor([[-2.0, 0, 0, 0], [3.0, 0, 0, 0]]))[:, 0]
    tensor([1., 1.])
    """
    q = q / torch.linalg.vector_norm(q, dim=-1, keepdim=True)
    agrees = torch.cat([q[:1, ..., 0], (q[1:] * q[:-1]).sum(-1)])
    sign = torch.where(agrees < 0, -torch.ones_like(agrees), torch.ones_like(agrees)).cumprod(0)
    return q * sign.unsqueeze(-1)


def columns(offsets: Sequence[int], device: torch.device | None = None) -> Tensor:
    """The columns ``[4Q]`` of the quaternions that start in the columns ``offsets``.

    >>> columns([0, 5]).tolist()
    [0, 1, 2, 3, 5, 6, 7, 8]
    """
    start = torch.tensor(list(offsets), dtype=torch.int64, device=device)
    return (start.unsqueeze(-1) + torch.arange(4, device=device)).view(-1)


def take(value: Tensor, columns: Tensor) -> Tensor:
    """The quaternions that stand in the ``columns`` of ``value [*, D]``, as ``[*, Q, 4]``."""
    return value.index_select(-1, columns).unflatten(-1, (-1, 4))


def put(value: Tensor, columns: Tensor, q: Tensor) -> Tensor:
    """``value [*, D]`` with the quaternions ``q [*, Q, 4]`` in its ``columns``, a copy."""
    return value.index_copy(-1, columns, q.flatten(-2))
