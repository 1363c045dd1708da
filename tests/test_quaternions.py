"""Rotations between frames, against the matrix exponential; velocities, against NumPy's gradient."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from torchrl_rslstorage.motions.quaternions import angular_velocity, continuous, slerp
from torchrl_rslstorage.motions.velocities import at_frames, joint_velocity

seeds = st.integers(0, 2**31 - 1)
# Of a rotation by more than half a turn, the other way round is the shorter one.
angles = st.one_of(st.floats(0, math.pi - 1e-3), st.sampled_from([0.0, 1e-300, 1e-12, 1e-8, 1e-4]))


def random_axis(seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.nn.functional.normalize(torch.randn(3, dtype=torch.float64, generator=generator), dim=0)


def random_quaternions(seed: int, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(*shape, 4, dtype=torch.float64, generator=generator)
    return torch.nn.functional.normalize(q, dim=-1)


def turned(axis: Tensor, angle: Tensor) -> Tensor:
    """The quaternions of turns about ``axis [3]`` by ``angle [*]``."""
    half = angle.unsqueeze(-1) / 2
    return torch.cat([half.cos(), half.sin() * axis], -1)


def product(a: Tensor, b: Tensor) -> Tensor:
    """Hamilton's product, from its multiplication table."""
    w, x, y, z = a.unbind(-1)
    table = [[w, -x, -y, -z], [x, w, -z, y], [y, z, w, -x], [z, -y, x, w]]
    left = torch.stack([torch.stack(row, -1) for row in table], -2)
    return (left @ b.unsqueeze(-1)).squeeze(-1)


def matrix(q: Tensor) -> Tensor:
    """The rotation matrix: what q·v·q⁻¹ makes of the three axes."""
    axes = torch.eye(4, dtype=q.dtype)[1:]
    inverse = q * torch.tensor([1.0, -1, -1, -1], dtype=q.dtype)
    images = product(product(q.unsqueeze(-2), axes), inverse.unsqueeze(-2))
    return images[..., 1:].transpose(-1, -2)


def exponential(rotation_vector: Tensor) -> Tensor:
    x, y, z = rotation_vector.unbind(-1)
    zero = torch.zeros_like(x)
    cross = [[zero, -z, y], [z, zero, -x], [-y, x, zero]]
    return torch.linalg.matrix_exp(torch.stack([torch.stack(row, -1) for row in cross], -2))


@given(seeds, angles, st.floats(0, 1))
def test_slerp_follows_the_matrix_exponential(seed: int, angle: float, t: float) -> None:
    a, axis = random_quaternions(seed), random_axis(seed + 1)
    b = product(a, turned(axis, torch.tensor(angle, dtype=torch.float64)))
    between = slerp(a, b, torch.tensor(t, dtype=torch.float64))
    # torch's matrix_exp itself is off by up to 2e-11 (from Rodrigues' formula) where the norm is near 0.03.
    torch.testing.assert_close(matrix(between), matrix(a) @ exponential(t * angle * axis), rtol=0, atol=1e-10)


@given(seeds, st.floats(0, 1))
def test_slerp_does_not_care_which_of_the_two_quaternions_of_a_rotation_it_gets(seed: int, t: float) -> None:
    a, b = random_quaternions(seed, 2, 9)
    time = torch.tensor(t, dtype=torch.float64)
    between = slerp(a, b, time)
    assert torch.equal(slerp(a, -b, time), between)
    torch.testing.assert_close(slerp(-a, b, time), -between, rtol=0, atol=1e-15)


@given(seeds)
def test_slerp_takes_the_shorter_way(seed: int) -> None:
    a, b = random_quaternions(seed, 2, 50)
    half = slerp(a, b, torch.tensor(0.5, dtype=torch.float64))
    cosine = (a * b).sum(-1).abs()
    torch.testing.assert_close((half * a).sum(-1), ((1 + cosine) / 2).sqrt(), rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("sign", [1, -1], ids=["equal", "antipodal"])
def test_slerp_between_equal_and_between_antipodal_quaternions_stays(dtype: torch.dtype, sign: int) -> None:
    a = random_quaternions(3, 100).to(dtype)
    between = slerp(a, sign * a, torch.linspace(0, 1, 100, dtype=dtype))
    torch.testing.assert_close(between, a, rtol=0, atol=4 * torch.finfo(dtype).eps)


@given(seeds, st.sampled_from([1e-3, 1e-5, 1e-7, 1e-9, math.pi / 2, math.pi, 3.0]), st.floats(0, 1))
def test_slerp_in_single_precision_is_finite_of_unit_length_and_near_double(
    seed: int, angle: float, t: float
) -> None:
    a = random_quaternions(seed, 20)
    b = product(a, turned(random_axis(seed), torch.full((20,), angle, dtype=torch.float64)))
    time = torch.full((20,), t, dtype=torch.float64)
    single, double = slerp(a.float(), b.float(), time.float()), slerp(a, b, time)
    torch.testing.assert_close(single.norm(dim=-1), torch.ones(20), rtol=0, atol=1e-6)
    if angle < math.pi:  # at half a turn both ways are as short, and rounding decides
        torch.testing.assert_close(single.double(), double, rtol=0, atol=1e-6)


def test_slerp_ends_where_it_should() -> None:
    a, b = random_quaternions(4, 2, 50)
    ends = slerp(a, b, torch.tensor([[0.0], [1.0]], dtype=torch.float64))
    torch.testing.assert_close(ends[0], a, rtol=0, atol=1e-15)
    torch.testing.assert_close(matrix(ends[1]), matrix(b), rtol=0, atol=1e-14)


@given(seeds, st.integers(2, 6), st.floats(0, 3))
def test_the_velocity_of_an_even_turn_is_exact_whatever_the_frames_and_their_signs(
    seed: int, num: int, speed: float
) -> None:
    generator = torch.Generator().manual_seed(seed)
    dt = torch.rand(num - 1, dtype=torch.float64, generator=generator) + 1e-3
    times = torch.cat([dt.new_zeros(1), dt.cumsum(0)])
    axis = random_axis(seed)
    q = product(random_quaternions(seed), turned(axis, speed * times))
    q = q * (torch.randint(2, (num, 1), generator=generator) * 2 - 1)
    expected = (speed * axis).expand(num, 3)
    torch.testing.assert_close(angular_velocity(q, dt), expected[1:], rtol=0, atol=1e-10)
    torch.testing.assert_close(at_frames(angular_velocity(q, dt), dt), expected, rtol=0, atol=1e-10)


@given(seeds, st.integers(3, 9))
def test_joint_velocities_are_numpys_gradient(seed: int, num: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    dt = torch.rand(num - 1, dtype=torch.float64, generator=generator) + 0.1
    times = torch.cat([dt.new_zeros(1), dt.cumsum(0)])
    joint_pos = torch.randn(num, 4, dtype=torch.float64, generator=generator)
    expected = np.gradient(joint_pos.numpy(), times.numpy(), axis=0)
    torch.testing.assert_close(joint_velocity(joint_pos, dt), torch.from_numpy(expected), rtol=0, atol=1e-12)


def test_spherical_joints_have_three_velocities_each_in_the_order_of_the_joints() -> None:
    times = torch.linspace(0, 1, 6, dtype=torch.float64)
    x, y, _ = torch.eye(3, dtype=torch.float64)
    hinge = times.unsqueeze(-1)
    joint_pos = torch.cat([2 * hinge, turned(x, 3 * times), turned(y, 4 * times), 5 * hinge, 6 * hinge], -1)
    velocity = joint_velocity(joint_pos, times.diff(), [5, 1])
    expected = torch.tensor([2.0, 3, 0, 0, 0, 4, 0, 5, 6], dtype=torch.float64)
    torch.testing.assert_close(velocity, expected.expand(6, 9), rtol=0, atol=1e-12)


@given(seeds)
def test_continuous_quaternions_are_the_same_rotations_without_jumps(seed: int) -> None:
    q = random_quaternions(seed, 12, 3)
    scaled = q * torch.linspace(-2, 3, 12, dtype=torch.float64).view(12, 1, 1)
    even = continuous(scaled)
    torch.testing.assert_close(matrix(even), matrix(q), rtol=0, atol=1e-14)
    assert ((even[1:] * even[:-1]).sum(-1) >= 0).all()
    assert (even[0, :, 0] >= 0).all()
