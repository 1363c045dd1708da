"""The two environments: against Gymnasium itself, and the lean step against TorchRL's own path."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from torchrl.envs import TransformedEnv
from torchrl.envs.utils import check_env_specs

from torchrl_rslstorage.envs import GymnasiumEnv, PendulumEnv, make_env

try:
    import gymnasium
except ImportError:
    gymnasium = None
needs_gymnasium = pytest.mark.skipif(
    gymnasium is None, reason="gymnasium is missing: pip install torchrl-rslstorage[gym]"
)
FLAGS = ("done", "terminated", "truncated")


def rolled(env, num_steps, seed=0):
    """What was acted on, what came, and the next root of each step, with seeded actions beyond the bounds."""
    generator = torch.Generator().manual_seed(seed)
    root, steps = env.reset(), []
    for _ in range(num_steps):
        seen = root.clone()
        spec = env.action_spec
        if spec.dtype.is_floating_point:
            root["action"] = 3 * torch.randn(spec.shape, generator=generator)
        else:
            root["action"] = torch.randint(spec.space.n, spec.shape, generator=generator)
        stepped, root = env.step_and_maybe_reset(root)
        steps.append((seen, stepped.copy(), root.copy()))  # their tensors, whatever is set next
    return steps


def assert_same(left, right):
    """Two TensorDicts have the same keys and the same bits."""
    keys = set(left.keys(True, True))
    assert keys == set(right.keys(True, True))
    for key in keys:
        assert left[key].dtype == right[key].dtype, key
        assert torch.equal(left[key], right[key]), key


# ---------------------------------------------------------------- the embedded pendulum


@needs_gymnasium
def test_a_pendulum_moves_as_gymnasiums_does():
    env = PendulumEnv(6, seed=3, init_at_random_ep_len=False, max_episode_steps=1000)
    root = env.reset()
    env.state.theta_dot[0], env.state.theta_dot[1] = 7.9, -7.9  # to be stopped at 8 rad/s
    theirs = [gymnasium.make("Pendulum-v1").unwrapped for _ in range(6)]
    for one, theta, theta_dot in zip(theirs, *env.state[:2], strict=True):
        one.reset()
        one.state = np.array([theta.item(), theta_dot.item()])
    generator, fastest = torch.Generator().manual_seed(0), 0.0
    for _ in range(300):
        action = torch.empty(6, 1).uniform_(-3, 3, generator=generator)  # a third is clipped
        action[0], action[1] = 3.0, -3.0
        root["action"] = action
        stepped, root = env.step_and_maybe_reset(root)
        for i, one in enumerate(theirs):
            obs, reward, terminated, _, _ = one.step(action[i].numpy())
            state = torch.tensor(one.state)
            ours = torch.cat([x[i] for x in env.state[:2]])
            torch.testing.assert_close(ours, state, rtol=1e-11, atol=1e-11)
            torch.testing.assert_close(
                stepped["next", "observation"][i], torch.from_numpy(obs), rtol=0, atol=1e-6
            )
            assert stepped["next", "reward"][i].item() == pytest.approx(float(reward), abs=2e-6)
            assert stepped["next", "terminated"][i].item() is terminated is False
            one.state = ours.numpy()  # from equal states, so that each step is judged alone
        fastest = max(fastest, env.state.theta_dot.abs().max().item())
    assert fastest == 8.0


def test_pendulums_start_uniformly_within_gymnasiums_bounds():
    env = PendulumEnv(20_000, seed=0)
    env.reset()
    for values, bound in ((env.state.theta, torch.pi), (env.state.theta_dot, 1.0)):
        counts = torch.histc(values / bound, bins=10, min=-1, max=1)
        assert counts.sum() == 20_000, "a start lies outside the bounds"
        # 10 bins of 2,000 expected, standard deviation 42
        assert (counts - 2_000).abs().max() < 5 * 42


def test_the_pendulum_keeps_the_contract_of_its_specs():
    env = PendulumEnv(5, seed=0, max_episode_steps=2)
    check_env_specs(env, seed=1)
    assert env.batch_size == (5,)
    assert env.action_spec.shape == (5, 1)
    assert env.action_spec.space.low.unique().item() == -2
    assert env.action_spec.space.high.unique().item() == 2


def test_the_lean_step_equals_torchrls_own_path_to_the_bit():
    lean = rolled(PendulumEnv(7, seed=5, max_episode_steps=9), 60)
    generic = rolled(TransformedEnv(PendulumEnv(7, seed=5, max_episode_steps=9)), 60)
    assert sum(int(stepped["next", "done"].sum()) for _, stepped, _ in lean) >= 7 * 6
    for (seen, stepped, _), (their_seen, their_stepped, _) in zip(lean, generic, strict=True):
        # TorchRL zeroes last step's action where it reset; it is written over before it is read
        assert_same(seen.exclude("action"), their_seen.exclude("action"))
        assert_same(stepped, their_stepped)


@pytest.mark.parametrize("wrap", [lambda env: env, TransformedEnv], ids=["lean", "generic"])
def test_what_a_policy_left_at_the_root_and_under_next_is_carried_as_torchrl_does(wrap):
    env = wrap(PendulumEnv(3, seed=0, max_episode_steps=2))
    root = env.reset()
    root["action"], root["loc"] = torch.zeros(3, 1), torch.ones(3, 1)
    root["collector", "traj_ids"] = torch.arange(3)
    root["reward"] = torch.full((3, 1), 5.0)  # of an earlier step: must not survive
    root["next", "hidden"] = torch.full((3, 2), 7.0)
    root["next", "reward"] = torch.full((3, 1), 9.0)  # the environment's own prevails
    stepped, after = env.step_and_maybe_reset(root)
    assert stepped is root
    assert torch.equal(stepped["next", "hidden"], torch.full((3, 2), 7.0))
    assert (stepped["next", "reward"] <= 0).all()
    assert set(after.keys(True, True)) == {
        "action",
        "loc",
        ("collector", "traj_ids"),
        "observation",
        *FLAGS,
    }
    after["collector", "traj_ids"] = torch.zeros(3)
    assert torch.equal(stepped["collector", "traj_ids"], torch.arange(3))


def test_a_truncated_step_carries_the_observation_in_which_the_episode_really_ended():
    short = PendulumEnv(4, seed=1, max_episode_steps=3, init_at_random_ep_len=False)
    endless = PendulumEnv(4, seed=1, max_episode_steps=100, init_at_random_ep_len=False)
    steps = zip(rolled(short, 3), rolled(endless, 3), strict=True)
    for t, ((_, ours, root), (_, truth, _)) in enumerate(steps):
        last = t == 2
        assert torch.equal(ours["next", "observation"], truth["next", "observation"])
        for key, expected in (("done", last), ("truncated", last), ("terminated", False)):
            assert (ours["next", key] == expected).all()
            assert not root[key].any()
        unmoved = torch.equal(root["observation"], ours["next", "observation"])
        assert unmoved is not last
    state = short.state
    assert (state.step_count == 0).all()
    cos, sin, speed = root["observation"].double().unsqueeze(1).unbind(-1)
    torch.testing.assert_close(torch.atan2(sin, cos), state.theta, atol=1e-6, rtol=0)
    torch.testing.assert_close(speed, state.theta_dot, atol=1e-6, rtol=0)


def test_only_the_truncated_pendulums_are_moved_by_a_reset():
    env = PendulumEnv(64, seed=0, max_episode_steps=8)
    for _, stepped, root in rolled(env, 20):
        done = stepped["next", "done"].squeeze(-1)
        assert 0 < done.sum() < 64
        moved = (root["observation"] != stepped["next", "observation"]).any(-1)
        assert torch.equal(moved, done)


def test_the_first_reset_spreads_the_step_counters_and_later_ones_do_not():
    env = PendulumEnv(20_000, seed=0, max_episode_steps=10)
    assert env.partial_first_episodes
    env.reset()
    counts = env.state.step_count.flatten().bincount(minlength=10)
    assert len(counts) == 10
    assert (counts - 2_000).abs().max() < 5 * 42  # as above
    env.reset()
    assert (env.state.step_count == 0).all()


def test_without_random_lengths_every_episode_is_whole():
    env = PendulumEnv(4, seed=0, max_episode_steps=5, init_at_random_ep_len=False)
    assert not env.partial_first_episodes
    ends = [bool(stepped["next", "done"].all()) for _, stepped, _ in rolled(env, 10)]
    assert ends == ([False] * 4 + [True]) * 2


def test_every_episode_after_the_first_has_the_full_length():
    env = PendulumEnv(16, seed=2, max_episode_steps=6)
    done = torch.stack([stepped["next", "done"].squeeze(-1) for _, stepped, _ in rolled(env, 30)])
    for column in done.T:
        ends = column.nonzero().flatten()
        assert ends[0] < 6
        assert (ends.diff() == 6).all()


@pytest.mark.parametrize("steps_before", [0, 4, 11])
def test_a_pendulum_resumed_from_its_state_dict_continues_to_the_bit(steps_before, tmp_path):
    env = PendulumEnv(5, seed=8, max_episode_steps=4)
    root = env.reset()
    for _ in range(steps_before):
        _, root = env.step_and_maybe_reset(root.set("action", torch.ones(5, 1)))
    torch.save(env.state_dict(), tmp_path / "env.pt")

    def future(env, root):
        out = []
        for _ in range(9):
            stepped, root = env.step_and_maybe_reset(root.set("action", torch.ones(5, 1)))
            out.append(stepped.clone())
        return torch.stack([*out, env.reset().set("action", torch.ones(5, 1)).set("next", out[0]["next"])])

    expected = future(env, root.clone())
    other = PendulumEnv(5, seed=99, max_episode_steps=4)
    rolled(other, 3)
    other.load_state_dict(torch.load(tmp_path / "env.pt", weights_only=True))
    assert_same(future(other, root.clone()), expected)


def test_a_state_saved_before_the_first_reset_brings_back_the_first_reset():
    env = PendulumEnv(50, seed=8)
    saved = env.state_dict()
    expected = (env.reset(), env.state.step_count)
    other = PendulumEnv(50, seed=1)
    other.reset()
    other.load_state_dict(saved)
    assert_same(other.reset(), expected[0])
    assert torch.equal(other.state.step_count, expected[1])
    assert other.state.step_count.any()


def test_a_saved_state_is_a_snapshot():
    env = PendulumEnv(4, seed=0, max_episode_steps=3)
    root = rolled(env, 3)[-1][-1]
    saved = env.state_dict()["_extra_state"]
    copies = {name: value.clone() for name, value in saved["state"].items()}
    generator = saved["generator"].clone()
    for _ in range(5):
        _, root = env.step_and_maybe_reset(root.set("action", torch.ones(4, 1)))
    assert all(torch.equal(saved["state"][name], value) for name, value in copies.items())
    assert torch.equal(saved["generator"], generator)


def test_the_state_of_another_number_of_pendulums_is_refused_and_changes_nothing():
    env, other = PendulumEnv(3, seed=0), PendulumEnv(4, seed=0)
    env.reset(), other.reset()
    before = env.state
    with pytest.raises(ValueError, match=r"\(4, 1\).*\(3, 1\).*num_envs=4"):
        env.load_state_dict(other.state_dict())
    assert env.state is before


def test_the_same_seed_gives_the_same_pendulums_and_another_seed_does_not():
    env = PendulumEnv(6, seed=4, max_episode_steps=3)
    first = rolled(env, 5)
    again = rolled(PendulumEnv(6, seed=4, max_episode_steps=3), 5)
    other = rolled(PendulumEnv(6, seed=5, max_episode_steps=3), 5)
    for (left, _, _), (right, _, _) in zip(first, again, strict=True):
        assert_same(left, right)
    assert not torch.equal(first[0][0]["observation"], other[0][0]["observation"])


def test_the_pendulum_neither_reads_nor_moves_torchs_global_generator():
    torch.manual_seed(0)
    before = torch.get_rng_state()
    rolled(PendulumEnv(6, seed=4, max_episode_steps=2), 5)
    assert torch.equal(torch.get_rng_state(), before)


def test_an_action_with_a_graph_leaves_none_in_the_state():
    env = PendulumEnv(3, seed=0)
    action = torch.zeros(3, 1, requires_grad=True)
    stepped, root = env.step_and_maybe_reset(env.reset().set("action", action))
    assert not env.state.theta_dot.requires_grad, "the graph would grow by every step"
    assert not stepped["next", "reward"].requires_grad and not root["observation"].requires_grad
    assert stepped["action"].requires_grad, "the policy's own action stays as it came"


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_the_lean_step_never_waits_for_the_device():
    env = PendulumEnv(8, seed=0, device="cuda", max_episode_steps=3)
    root = env.reset()
    action = torch.zeros(8, 1, device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(10):
            _, root = env.step_and_maybe_reset(root.set("action", action))
    finally:
        torch.cuda.set_sync_debug_mode("default")


# ---------------------------------------------------------------- both


MAKERS = {
    "pendulum": lambda: PendulumEnv(4, seed=0, max_episode_steps=3),
    "gymnasium": lambda: GymnasiumEnv("Pendulum-v1", 4, seed=0, max_episode_steps=3),
    "gymnasium, one array": lambda: GymnasiumEnv("rslstorage-test/OneArray-v0", 4, seed=0),
}
makers = pytest.mark.parametrize(
    "make",
    [
        pytest.param(make, id=name, marks=needs_gymnasium if name != "pendulum" else ())
        for name, make in MAKERS.items()
    ],
)


@makers
@pytest.mark.parametrize("wrap", [lambda env: env, TransformedEnv], ids=["lean", "generic"])
def test_nothing_handed_out_is_written_to_again(make, wrap):
    handed_out = []
    for _, stepped, root in rolled(wrap(make()), 12):
        for td in (stepped, root):
            handed_out += [(td[key], td[key].clone()) for key in td.keys(True, True)]
    assert len(handed_out) >= 12 * 12
    assert all(torch.equal(kept, then) for kept, then in handed_out)


@makers
def test_no_two_done_flags_share_memory(make):
    _, stepped, root = rolled(make(), 4)[-1]
    for td in (stepped["next"], root):
        assert len({td[key].data_ptr() for key in FLAGS}) == 3


@makers
def test_a_step_before_the_first_reset_says_to_reset(make):
    env = make()
    td = TensorDict({"action": env.action_spec.zero()}, [4])
    with pytest.raises(RuntimeError, match=r"call `reset\(\)` before"):
        env.step_and_maybe_reset(td)
    with pytest.raises(RuntimeError, match=r"call `reset\(\)` before"):
        env.step(td)


def test_an_action_that_would_broadcast_is_refused_with_both_shapes():
    env = PendulumEnv(3, seed=0)
    with pytest.raises(ValueError, match=r"\(3,\).*\(3, 1\)"):
        env.step_and_maybe_reset(env.reset().set("action", torch.zeros(3)))


def test_another_batch_size_is_refused():
    env = PendulumEnv(3, seed=0)
    env.reset()
    with pytest.raises(RuntimeError, match=r"env.batch_size"):
        env.step_and_maybe_reset(TensorDict({"action": torch.zeros(2, 1)}, [2]))


@pytest.mark.parametrize("num_envs", [0, -1, 2.5, True])
def test_a_number_of_environments_that_is_no_positive_integer_is_refused(num_envs):
    with pytest.raises(ValueError, match="`num_envs` must be a positive integer"):
        PendulumEnv(num_envs)


def test_an_episode_of_no_step_is_refused():
    with pytest.raises(ValueError, match="`max_episode_steps` must be at least 1"):
        PendulumEnv(2, max_episode_steps=0)


def test_make_env_takes_the_embedded_task_by_name_and_whole_episodes_for_evaluation():
    train, evaluation = make_env("pendulum", 99, seed=0), make_env("pendulum", 99, train=False)
    train.reset(), evaluation.reset()
    assert isinstance(train, PendulumEnv) and train.can_save_state
    assert train.partial_first_episodes and train.state.step_count.any()
    assert not evaluation.partial_first_episodes and not evaluation.state.step_count.any()


@needs_gymnasium
def test_make_env_takes_any_other_name_as_a_gymnasium_id():
    env = make_env("CartPole-v1", 2, seed=0)
    assert isinstance(env, GymnasiumEnv) and env.batch_size == (2,)
    assert not env.can_save_state and not env.partial_first_episodes


# ---------------------------------------------------------------- Gymnasium

if gymnasium is not None:
    from gymnasium import spaces

    class OneArray(gymnasium.Env):
        """Counts its steps in arrays that it writes to for ever; ends after 2, 3, 4, ... steps."""

        observation_space = spaces.Dict(
            {
                "observation": spaces.Box(-np.inf, np.inf, (2,), np.float64),
                "camera": spaces.Dict({"rgb": spaces.Box(0, 255, (4, 3), np.uint8)}),
                "gear": spaces.Discrete(5),
            }
        )
        action_space = spaces.Box(-1, 1, (3,), np.float32)

        def __init__(self):
            self.array, self.image = np.zeros(2), np.zeros((4, 3), np.uint8)
            self.steps, self.length, self.taken = 0, 1, None

        def _obs(self):
            self.array[:] = self.steps + 0.25, self.length
            self.image[:] = self.steps
            return {"observation": self.array, "camera": {"rgb": self.image}, "gear": self.steps % 5}

        def reset(self, *, seed=None, options=None):
            super().reset(seed=seed)
            self.steps, self.length = 0, self.length + 1
            return self._obs(), {}

        def step(self, action):
            self.steps, self.taken = self.steps + 1, action
            return self._obs(), 1.0, self.steps == self.length, False, {}

    class Tupled(OneArray):
        observation_space = spaces.Tuple([spaces.Discrete(2)])

    class Clash(OneArray):
        observation_space = spaces.Dict({"reward": spaces.Discrete(2)})

    class ManyButtons(OneArray):
        action_space = spaces.MultiBinary(3)

    class FromTen(OneArray):
        action_space = spaces.Discrete(2, start=10)

    for entry in (OneArray, Tupled, Clash, ManyButtons, FromTen):
        gymnasium.register(
            f"rslstorage-test/{entry.__name__}-v0", entry_point=entry, disable_env_checker=True
        )


def raw_vector_env(task, num_envs, **kwargs):
    return gymnasium.make_vec(
        task,
        num_envs=num_envs,
        vectorization_mode="sync",
        vector_kwargs={"autoreset_mode": gymnasium.vector.AutoresetMode.SAME_STEP},
        **kwargs,
    )


@needs_gymnasium
@pytest.mark.parametrize(
    ("task", "kwargs", "ends"),
    [
        ("InvertedPendulum-v5", {}, "terminated"),
        ("Pendulum-v1", {"max_episode_steps": 7}, "truncated"),
        ("CartPole-v1", {}, "terminated"),
    ],
)
def test_a_task_gives_what_a_raw_vector_env_gives(task, kwargs, ends):
    if task.startswith("Inverted"):
        pytest.importorskip("mujoco", reason="mujoco is missing")
        pytest.importorskip("imageio", reason="imageio is missing, which Gymnasium's MuJoCo tasks import")
    steps = rolled(GymnasiumEnv(task, 3, seed=11, **kwargs), 80)
    raw = raw_vector_env(task, 3, **kwargs)
    obs, _ = raw.reset(seed=11)
    space, ended = raw.single_action_space, 0
    for root, stepped, after in steps:
        np.testing.assert_array_equal(root["observation"].numpy(), obs.astype(np.float32))
        action = stepped["action"].numpy()
        if isinstance(space, spaces.Box):
            action = np.clip(action, space.low, space.high)
        obs, reward, terminated, truncated, infos = raw.step(action)
        final = obs.copy()
        for i in np.flatnonzero(terminated | truncated):
            final[i] = infos["final_obs"][i]
            ended += 1
        for key, value in (
            ("observation", final.astype(np.float32)),
            ("reward", reward.astype(np.float32)[:, None]),
            ("terminated", terminated[:, None]),
            ("truncated", truncated[:, None]),
            ("done", (terminated | truncated)[:, None]),
        ):
            ours = stepped["next", key].numpy()
            assert ours.dtype == value.dtype
            np.testing.assert_array_equal(ours, value)
        np.testing.assert_array_equal(after["observation"].numpy(), obs.astype(np.float32))
        assert not any(after[key].any() for key in FLAGS)
    assert ended >= 6
    assert all(bool(s["next", "done"].any()) == bool(s["next", ends].any()) for _, s, _ in steps)


@needs_gymnasium
@pytest.mark.parametrize("task", ["Pendulum-v1", "CartPole-v1", "rslstorage-test/OneArray-v0"])
def test_a_task_keeps_the_contract_of_its_specs(task):
    check_env_specs(GymnasiumEnv(task, 3), seed=0)


@needs_gymnasium
@pytest.mark.parametrize("task", ["CartPole-v1", "rslstorage-test/OneArray-v0"])
def test_the_lean_step_of_a_task_equals_torchrls_own_path(task):
    lean = rolled(GymnasiumEnv(task, 3, seed=2), 50)
    generic = rolled(TransformedEnv(GymnasiumEnv(task, 3, seed=2)), 50)
    assert sum(int(stepped["next", "done"].sum()) for _, stepped, _ in lean) >= 3
    for (seen, stepped, _), (their_seen, their_stepped, _) in zip(lean, generic, strict=True):
        # TorchRL zeroes last step's action where it reset; it is written over before it is read
        assert_same(seen.exclude("action"), their_seen.exclude("action"))
        assert_same(stepped, their_stepped)


@needs_gymnasium
def test_a_dict_space_becomes_one_key_per_entry_and_keeps_every_dtype_but_float64():
    root = GymnasiumEnv("rslstorage-test/OneArray-v0", 2).reset()
    assert (root["observation"].dtype, root["observation"].shape) == (torch.float32, (2, 2))
    assert (root["camera", "rgb"].dtype, root["camera", "rgb"].shape) == (torch.uint8, (2, 4, 3))
    assert (root["gear"].dtype, root["gear"].shape) == (torch.int64, (2,))


@needs_gymnasium
def test_the_final_observation_is_true_for_a_task_that_writes_into_one_array():
    # episodes last 2, 3, 4, ... steps, and an observation says (steps + 1/4, length)
    for _, stepped, root in rolled(GymnasiumEnv("rslstorage-test/OneArray-v0", 2), 9):
        done = stepped["next", "done"]
        steps, length = stepped["next", "observation"].split(1, -1)
        assert torch.equal(steps - 0.25 == length, done)
        assert torch.equal(stepped["next", "camera", "rgb"][:, 0, :1].float(), steps - 0.25)
        assert torch.equal(root["observation"][:, :1] == 0.25, done)


@needs_gymnasium
@pytest.mark.parametrize(("clip", "expected"), [(True, [-1.0, 0.5, 1.0]), (False, [-5.0, 0.5, 5.0])])
def test_a_task_sees_the_actions_clipped_to_its_box_unless_told_not_to(clip, expected):
    env = GymnasiumEnv("rslstorage-test/OneArray-v0", 1, clip_actions=clip)
    action = torch.tensor([[-5.0, 0.5, 5.0]])
    stepped, _ = env.step_and_maybe_reset(env.reset().set("action", action))
    (taken,) = env.vector_env.get_attr("taken")
    assert taken.dtype == np.float32
    assert taken.tolist() == expected
    assert torch.equal(stepped["action"], torch.tensor([[-5.0, 0.5, 5.0]])), "the policy's own stays"


@needs_gymnasium
def test_discrete_actions_count_from_the_spaces_start():
    env = GymnasiumEnv("rslstorage-test/FromTen-v0", 2)
    assert env.action_spec.shape == (2,)
    env.step_and_maybe_reset(env.reset().set("action", torch.tensor([0, 1])))
    assert env.vector_env.get_attr("taken") == (10, 11)
    with pytest.raises(ValueError, match="takes integers"):
        env.step(env.reset().set("action", torch.zeros(2)))


@needs_gymnasium
def test_a_partial_reset_restarts_the_marked_tasks_only_and_none_twice():
    env = GymnasiumEnv("rslstorage-test/OneArray-v0", 3)  # first episodes last 2 steps
    root = env.reset()
    for _ in range(2):
        td = env.rand_step(root)
        root = env.step_mdp(td)
    assert root["done"].all()
    root["_reset"] = torch.tensor([[True], [True], [True]])
    root = env.reset(root)
    assert root["observation"].tolist() == [[0.25, 3.0]] * 3  # their second episode, not their third
    root = env.step_mdp(env.rand_step(root))
    root["_reset"] = torch.tensor([[False], [True], [False]])  # midway, by the user's own wish
    root = env.reset(root)
    assert root["observation"].tolist() == [[1.25, 3.0], [0.25, 4.0], [1.25, 3.0]]
    root["_reset"] = torch.tensor([[False], [True], [False]])  # and again
    root = env.reset(root)
    assert root["observation"].tolist() == [[1.25, 3.0], [0.25, 5.0], [1.25, 3.0]]
    root = env.step_mdp(env.rand_step(root))
    assert root["observation"].tolist() == [[2.25, 3.0], [1.25, 5.0], [2.25, 3.0]]


@needs_gymnasium
@pytest.mark.parametrize("wrap", [lambda env: env, TransformedEnv], ids=["lean", "generic"])
def test_a_partial_reset_right_after_a_task_reset_itself_is_a_reset_of_its_own(wrap):
    env = wrap(GymnasiumEnv("rslstorage-test/OneArray-v0", 2))  # first episodes last 2 steps
    root = rolled(env, 2)[-1][-1]
    assert root["observation"].tolist() == [[0.25, 3.0]] * 2
    root["_reset"] = torch.tensor([[True], [False]])
    assert env.reset(root)["observation"].tolist() == [[0.25, 4.0], [0.25, 3.0]]


@needs_gymnasium
def test_set_seed_decides_the_next_reset():
    env = GymnasiumEnv("Pendulum-v1", 3, seed=7)
    first = env.reset()
    assert not torch.equal(env.reset()["observation"], first["observation"])
    env.set_seed(7)
    assert torch.equal(env.reset()["observation"], first["observation"])


@needs_gymnasium
@pytest.mark.parametrize("task", ["NoSuchTask-v0", "CartPole-v77", "not an id", "no_module:X-v0"])
def test_an_unknown_task_is_one_clear_sentence(task):
    with pytest.raises(ValueError, match="is not a Gymnasium task that can be made") as caught:
        make_env(task, 2)
    assert task in str(caught.value) and "\n" not in str(caught.value)


def test_without_gymnasium_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "gymnasium", None)
    with pytest.raises(ImportError, match=r"pip install torchrl-rslstorage\[gym\]"):
        make_env("CartPole-v1", 2)


def test_without_gymnasium_the_package_and_the_pendulum_work():
    code = (
        "import sys; sys.modules['gymnasium'] = None\n"
        "from torchrl_rslstorage.envs import make_env\n"
        "print(make_env('pendulum', 2).rollout(2).shape)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "torch.Size([2, 2])", done.stderr


@needs_gymnasium
@pytest.mark.parametrize("module", ["mujoco", "imageio"])
def test_without_what_mujoco_tasks_import_the_extra_is_named(module, monkeypatch):
    for name in [name for name in sys.modules if name.startswith("gymnasium.envs.mujoco")]:
        monkeypatch.delitem(sys.modules, name)  # so that its imports are made again
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ImportError, match=rf"needs {module}: pip install torchrl-rslstorage\[gym\]"):
        make_env("HalfCheetah-v5", 2)


@needs_gymnasium
def test_n_copies_of_a_mujoco_model_warn_once_and_leave_no_log(capfd, monkeypatch, tmp_path):
    mujoco = pytest.importorskip("mujoco", reason="mujoco is missing")
    pytest.importorskip("imageio", reason="imageio is missing, which Gymnasium's MuJoCo tasks import")
    monkeypatch.chdir(tmp_path)
    GymnasiumEnv("HalfCheetah-v5", 3)  # MuJoCo 4.0 calls one of its model's attributes deprecated
    assert capfd.readouterr().err.count("settotalmass") <= 1
    assert list(tmp_path.iterdir()) == []
    assert mujoco.get_mju_user_warning() is None, "MuJoCo's own handler is back"


@needs_gymnasium
@pytest.mark.parametrize(
    ("task", "message"),
    [
        ("Tupled", "observation space .* no fixed array"),
        ("Clash", r"names an observation \['reward'\]"),
        ("ManyButtons", "action space .* not served"),
    ],
)
def test_spaces_that_torchrl_cannot_carry_are_refused(task, message):
    with pytest.raises(ValueError, match=message):
        GymnasiumEnv(f"rslstorage-test/{task}-v0", 2)


@needs_gymnasium
def test_a_task_is_closed_once():
    env = GymnasiumEnv("CartPole-v1", 2)
    env.close()
    assert env.is_closed and env.vector_env.closed
    env.close()
    with pytest.raises(RuntimeError, match="already closed"):
        env.close(raise_if_closed=True)


# -- what a teacher sees -------------------------------------------------------------------------


def test_a_teacher_sees_the_velocity_that_is_hidden_in_every_step_and_after_every_reset():
    whole = PendulumEnv(3, seed=4, max_episode_steps=5)
    shown = PendulumEnv(3, seed=4, max_episode_steps=5, hide_velocity=True, show_teacher=True)
    assert set(shown.observation_spec.keys()) == {"observation", "teacher_observation"}
    assert shown.observation_spec["observation"].shape == (3, 2)
    roots = [env.reset() for env in (whole, shown)]
    for step in range(12):
        action = torch.full((3, 1), 0.1 * step)
        (ours, root), (theirs, other) = (
            env.step_and_maybe_reset(td.set("action", action))
            for env, td in zip((whole, shown), roots, strict=True)
        )
        for a, b in ((ours["next"], theirs["next"]), (root, other)):
            assert torch.equal(a["observation"], b["teacher_observation"])
            assert torch.equal(a["observation"][:, :2], b["observation"])
        roots = [root, other]
    check_env_specs(shown)
    assert "teacher_observation" not in PendulumEnv(3, hide_velocity=True).observation_spec.keys()
    assert make_env("pendulum-hidden-velocity", 3, show_teacher=True).show_teacher
