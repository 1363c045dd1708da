"""The driven point mass: against the closed form of its motion, and the contracts of every environment."""

from __future__ import annotations

import math

import pytest
import torch
from test_envs import assert_same, rolled
from torchrl.envs import TransformedEnv
from torchrl.envs.utils import check_env_specs

from torchrl_rslstorage import PointMassEnv, circle_motion, make_env
from torchrl_rslstorage.envs import PointMassState


def pushed(env, action, steps):
    """The last step of ``steps`` under one constant action."""
    root = env.reset()
    for _ in range(steps):
        root["action"] = action
        stepped, root = env.step_and_maybe_reset(root)
    return stepped


def test_a_constant_force_makes_the_parabola_of_the_textbook():
    env = PointMassEnv(3, seed=0, max_episode_steps=100)
    env.reset()
    at_rest = torch.zeros(3, 2, dtype=torch.float64)
    action = torch.tensor([[0.2, 0.0], [-1.0, 1.0], [-7.0, 0.1]])
    env.state = PointMassState(at_rest, at_rest, torch.zeros(3, 1, dtype=torch.int64))
    root = env.reset().exclude("observation")
    env.state = PointMassState(at_rest, at_rest, torch.zeros(3, 1, dtype=torch.int64))
    for _ in range(8):
        root["action"] = action
        stepped, root = env.step_and_maybe_reset(root)
    seconds, force = 8 * 0.05, 5.0 * action.clamp(-1, 1)
    expected = torch.cat([force * seconds**2 / 2, force * seconds], -1)
    torch.testing.assert_close(stepped["next", "observation"], expected, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(
        stepped["next", "reward"], -expected[:, :2].square().sum(-1, True), rtol=1e-5, atol=1e-6
    )


def test_it_keeps_the_contract_of_its_specs():
    check_env_specs(PointMassEnv(5, seed=0, max_episode_steps=2), seed=1)


def test_the_lean_step_equals_torchrls_own_path_to_the_bit():
    lean = rolled(PointMassEnv(7, seed=5, max_episode_steps=40), 90)
    generic = rolled(TransformedEnv(PointMassEnv(7, seed=5, max_episode_steps=40)), 90)
    ends = [torch.stack([s["next", key] for _, s, _ in lean]).any() for key in ("terminated", "truncated")]
    assert all(ends)
    for (seen, stepped, _), (their_seen, their_stepped, _) in zip(lean, generic, strict=True):
        assert_same(seen.exclude("action"), their_seen.exclude("action"))
        assert_same(stepped, their_stepped)


def test_leaving_the_arena_terminates_and_shows_where_it_was_left():
    env = PointMassEnv(1, seed=0, init_at_random_ep_len=False)
    root, left = env.reset(), None
    for _ in range(60):
        root["action"] = torch.ones(1, 2)
        stepped, root = env.step_and_maybe_reset(root)
        if stepped["next", "done"].item():
            left = stepped["next"]
            break
    assert left is not None and left["terminated"].item() and not left["truncated"].item()
    assert left["observation"][0, :2].abs().max() > 3.0
    assert root["observation"][0, :2].abs().max() <= 1.5


def test_a_point_mass_resumed_from_its_state_dict_continues_to_the_bit():
    env, other = PointMassEnv(3, seed=1, max_episode_steps=4), PointMassEnv(3, seed=9, max_episode_steps=4)
    rolled(env, 6)
    other.load_state_dict(env.state_dict())
    for env_ in (env, other):
        env_.reset = lambda env_=env_: env_._reset()  # the same next draw
    for (_, a, _), (_, b, _) in zip(rolled(env, 9), rolled(other, 9), strict=True):
        assert_same(a, b)
    with pytest.raises(ValueError, match="build it with `num_envs=3`"):
        PointMassEnv(2, seed=0).load_state_dict(env.state_dict())


def test_the_circle_has_exact_velocities_and_closes():
    motion = circle_motion(fps=200.0, num_cycles=1).frames
    position, velocity = motion["joint_pos"], motion["joint_vel"]
    assert position.shape == velocity.shape == (801, 2)
    torch.testing.assert_close(position[0], position[-1])
    torch.testing.assert_close(velocity[0], velocity[-1])
    # central differences of a circle are its velocity times sin(w h) / (w h)
    step = 2 * math.pi / 4 / 200
    central = (position[2:] - position[:-2]) * 100
    torch.testing.assert_close(central, velocity[1:-1] * math.sin(step) / step, rtol=1e-9, atol=1e-9)


def test_the_circle_can_be_followed_with_the_forces_there_are():
    motion = circle_motion(fps=20.0).frames
    acceleration = (motion["joint_vel"][1:] - motion["joint_vel"][:-1]) * 20
    assert acceleration.abs().max() < 5.0 * 0.6


def test_a_motion_is_refused_with_a_reason():
    with pytest.raises(ValueError, match="`fps` must be positive, and finite, got 0"):
        circle_motion(fps=0)
    with pytest.raises(ValueError, match="`num_cycles` must be at least 1"):
        circle_motion(num_cycles=0)


def test_make_env_knows_it_by_name():
    env = make_env("point-mass", 4, seed=0, train=False)
    assert isinstance(env, PointMassEnv) and env.batch_size == (4,)
    stepped = pushed(env, torch.zeros(4, 2), 1)
    assert env.state is not None and stepped["next", "observation"].shape == (4, 4)
    assert env.state.step_count.unique().item() == 1


def test_numbers_that_make_no_motion_and_no_episode_are_refused():
    for fps in (0.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="`fps` must be positive, and finite"):
            circle_motion(fps=fps)
    with pytest.raises(ValueError, match=r"`max_episode_steps` must be at least 1, a whole number, got 2\.5"):
        PointMassEnv(2, max_episode_steps=2.5)  # pyright: ignore[reportArgumentType]
