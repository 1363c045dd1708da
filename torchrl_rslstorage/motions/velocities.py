"""Joint velocities by finite differences, for files that hold positions only.

The rate of an interval is the difference of its two frames over its duration; for a spherical joint, the
angular velocity that turns one into the other. Between two intervals a frame takes both, the shorter one
weighing more (second order, also where durations differ); the first and the last frame take their only one.

    frames       q₀ ──── q₁ ── q₂         d₀ = (q₁ − q₀)/h₀      d₁ = (q₂ − q₁)/h₁
    durations        h₀     h₁            v₀ = d₀,  v₁ = (h₁·d₀ + h₀·d₁)/(h₀ + h₁),  v₂ = d₁
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from torchrl_rslstorage.motions.quaternions import angular_velocity


def at_frames(rates: Tensor, dt: Tensor) -> Tensor:
    """The rates ``[F - 1, *]`` of the intervals ``dt [F - 1]`` as rates of the frames, ``[F, *]``.

    For differences of positions these are `torch.gradient`'s second-order estimates. Fornberg 1988,
    "Generation of finite difference formulas on arbitrarily spaced grids", order 1 on three points.

    >>> at_frames(torch.tensor([2.0, 8.0]), torch.tensor([1.0, 2.0])).tolist()
    [2.0, 4.0, 8.0]
    """
    dt = dt.view(-1, *[1] * (rates.ndim - 1))
    inner = (dt[1:] * rates[:-1] + dt[:-1] * rates[1:]) / (dt[1:] + dt[:-1])
    return torch.cat([rates[:1], inner, rates[-1:]])


def joint_velocity(joint_pos: Tensor, dt: Tensor, quaternions: Sequence[int] = ()) -> Tensor:
    """The velocity of every degree of freedom, ``[F, D]``: three columns a spherical joint, one any other.

    Args:
        joint_pos: ``[F, W]``, radians (metres for slides), and four columns a spherical joint.
        dt: ``[F - 1]`` seconds from each frame to the next.
        quaternions: the columns in which a spherical joint's quaternion starts.

    Returns:
        ``[F, W - Q]`` in the order of the joints; a spherical joint's is in the moved body's own axes, as
        pybullet 3.2.7 has it (deep_mimic/env/humanoid_pose_interpolator.py, ``ComputeAngVelRel``).

    >>> joint_velocity(torch.tensor([[0.0], [1.0], [4.0]]), torch.ones(2)).flatten().tolist()
    [1.0, 2.0, 3.0]
    """
    rates, column = [], 0
    for start in sorted(quaternions):
        rates.append(joint_pos[:, column:start].diff(dim=0) / dt.unsqueeze(-1))
        rates.append(angular_velocity(joint_pos[:, start : start + 4], dt))
        column = start + 4
    rates.append(joint_pos[:, column:].diff(dim=0) / dt.unsqueeze(-1))
    return at_frames(torch.cat(rates, -1), dt)
