"""RolloutCollector and EpisodeStatistics: what is stored, and what is counted."""

from __future__ import annotations

import math
import warnings
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict
from tiny import FLAGS, Simulator, policy_of
from torchrl.collectors import Collector
from torchrl.data import Composite, Unbounded
from torchrl.envs import (
    Compose,
    ExplorationType,
    InitTracker,
    ParallelEnv,
    RewardScaling,
    SerialEnv,
    StepCounter,
    TensorDictPrimer,
    TransformedEnv,
    VecNormV2,
)

from torchrl_rslstorage import (
    ActorCritic,
    EpisodeStatistics,
    GymnasiumEnv,
    MLPActor,
    MLPCritic,
    PendulumEnv,
    RolloutBuffer,
    RolloutCollector,
)
from torchrl_rslstorage.data.leaves import leaves


def collector_of(env, num_steps=6, *, policy=None, **kwargs) -> RolloutCollector:
    buffer = RolloutBuffer(num_steps, env.batch_size[0])
    return RolloutCollector(env, policy or policy_of(env), replay_buffer=buffer, **kwargs)


def windows(collector, num_windows: int) -> list[tuple[TensorDict, TensorDict]]:
    """Clones of the next windows, each with its final observations."""
    found, buffer = [], collector.replay_buffer
    for _ in range(num_windows):
        collector.rollout()
        found.append(snapshot(buffer))
        buffer.empty()
    return found


def snapshot(buffer: RolloutBuffer) -> tuple[TensorDict, TensorDict]:
    t, n, observation = buffer.final_observations
    return buffer.window.clone(), observation.clone().update({"t": t, "n": n})


def assert_same(left, right, *, but: tuple[str, ...] = ()) -> None:
    for ours, theirs in zip(left, right, strict=True):
        for a, b in zip(ours, theirs, strict=True):
            a, b = a.exclude(*but), b.exclude(*but)
            assert set(a.keys(True, True)) == set(b.keys(True, True))
            for key, value in a.items(True, True):
                assert value.dtype == b[key].dtype and torch.equal(value, b[key]), key


# -- what is stored ------------------------------------------------------------------------------


ENVS = {
    "pendulum": lambda: PendulumEnv(3, seed=5, max_episode_steps=4),
    "pendulum with transforms": lambda: TransformedEnv(
        PendulumEnv(3, seed=5, max_episode_steps=4), Compose(InitTracker(), StepCounter())
    ),
    "simulator": lambda: Simulator([2, 3, 5]),
    "gymnasium": lambda: GymnasiumEnv("Pendulum-v1", 3, seed=5, max_episode_steps=4),
    "serial": lambda: SerialEnv(3, lambda: Simulator(4)),
}


@pytest.mark.parametrize("torchrl", [False, True], ids=["our policy", "torchrl's policy"])
@pytest.mark.parametrize("name", ENVS)
def test_a_window_equals_what_torchrls_own_collector_stores(name, torchrl):
    if name == "gymnasium":
        pytest.importorskip("gymnasium")
    torch.manual_seed(1)
    ours = collector_of(ENVS[name](), policy=policy_of(ENVS[name](), torchrl=torchrl))
    buffer = RolloutBuffer(6, 3)
    theirs = Collector(
        ENVS[name](),
        ours.policy,
        replay_buffer=buffer,
        frames_per_batch=18,
        total_frames=36,
        auto_register_policy_transforms=False,
    )
    torch.manual_seed(2)
    mine = windows(ours, 2)
    torch.manual_seed(2)
    stock = []
    for _ in theirs:
        stock.append(snapshot(buffer))
        buffer.empty()
    assert any(window["next", "done"].any() for window, _ in mine)
    # Theirs has is_init only where InitTracker writes it.
    assert_same(mine, stock, but=() if "transforms" in name else ("is_init",))


@pytest.mark.parametrize(
    "wrapped",
    [
        lambda env: env,
        lambda env: TransformedEnv(env, Compose()),
        lambda env: TransformedEnv(env, StepCounter()),
    ],
    ids=["bare", "no transform", "a transform"],
)
def test_a_simulator_that_overwrites_all_it_handed_out_gives_the_rollout_of_its_copying_twin(wrapped):
    torch.manual_seed(0)
    twins = [wrapped(Simulator([2, 3, 5, 4], in_place=in_place)) for in_place in (True, False)]
    policy = policy_of(twins[0])
    found, statistics = [], []
    for env in twins:
        torch.manual_seed(1)
        collector = collector_of(env, 5, policy=policy)
        found.append(windows(collector, 3))
        statistics.append(collector.statistics.summary())
    assert_same(*found)
    assert statistics[0] == statistics[1] and statistics[0].num_episodes == 7 + 5 + 3 + 3


def test_rows_tell_the_steps_of_the_simulator_in_order_and_truncations_keep_their_last_observation():
    collector = collector_of(Simulator([2, 3]), 4)
    (window, final), (after, _) = windows(collector, 2)
    assert window["observation"][:, :, 0].tolist() == [[0, 0], [1, 1], [0, 2], [1, 0]]
    assert window["observation"][:, :, 2].tolist() == [[1, 1], [1, 1], [2, 1], [2, 2]]
    assert window["next", "reward"].squeeze(-1).tolist() == [[101, 101], [102, 102], [201, 103], [202, 201]]
    # Environment 1 is cut off after its third step; both stand in the last row.
    assert list(zip(final["t"].tolist(), final["n"].tolist(), strict=True)) == [(2, 1), (3, 0), (3, 1)]
    assert final["observation"][:, :3].tolist() == [[3, 1, 1], [2, 0, 2], [1, 1, 2]]
    assert torch.equal(final["observation"][0, 3], window["action"][2, 1].sum())
    # No reset between windows: environment 1 goes on, environment 0 starts its third episode.
    assert after["observation"][0, :, 0].tolist() == [0, 1]
    assert after["observation"][0, :, 2].tolist() == [3, 2]


def test_is_init_marks_the_first_step_and_every_step_after_a_done():
    first, second = (window for window, _ in windows(collector_of(Simulator([2, 3]), 4), 2))
    is_init = torch.cat([first["is_init"], second["is_init"]])
    done = torch.cat([first["next", "done"], second["next", "done"]])
    assert is_init[0].all()
    assert torch.equal(is_init[1:], done[:-1])


@pytest.mark.parametrize("torchrl", [False, True], ids=["our policy", "torchrl's policy"])
def test_nothing_recorded_has_a_gradient_or_comes_from_inference_mode(torchrl):
    env = Simulator([2, 3])
    collector = collector_of(env, policy=policy_of(env, torchrl=torchrl))
    for _ in collector:
        break
    for key, value in collector.replay_buffer.window.items(True, True):
        assert not value.requires_grad and not value.is_inference(), key
    assert torch.is_grad_enabled()


def test_actions_are_sampled_unless_another_exploration_type_is_asked_for():
    env = Simulator([9])
    policy = policy_of(env)
    ((sampled, _),) = windows(collector_of(env, policy=policy), 1)
    assert not torch.equal(sampled["action"], sampled["loc"])
    mean = collector_of(Simulator([9]), policy=policy, exploration_type=ExplorationType.DETERMINISTIC)
    ((means, _),) = windows(mean, 1)
    assert torch.equal(means["action"], means["loc"])


def test_a_part_filled_window_is_filled_to_its_end():
    collector = collector_of(Simulator([2, 3]), 4)
    collector.rollout()
    row = collector.replay_buffer.window[0].clone()
    row["next", "observation"] = row["observation"] + 1
    collector.replay_buffer.empty()
    collector.replay_buffer.add(row)
    collector.rollout()
    assert collector.replay_buffer.is_full
    assert collector.num_frames == 8 + 6  # the row that someone else added is not the collector's
    assert torch.equal(collector.replay_buffer.window["observation"][0], row["observation"])


def test_a_recurrent_policy_finds_its_memory_in_the_next_step_and_loses_it_with_the_episode():
    spec = Composite(memory=Unbounded((2, 1)), shape=(2,))
    env = TransformedEnv(Simulator([3, 9]), TensorDictPrimer(spec, default_value=0.0))
    inner = policy_of(env.base_env)

    def policy(td):
        return inner(td.set(("next", "memory"), td["memory"] + 1))

    ((window, final),) = windows(collector_of(env, 5, policy=policy), 1)
    assert window["memory"].squeeze(-1).tolist() == [[0, 0], [1, 1], [2, 2], [0, 3], [1, 4]]
    assert final["memory"].flatten().tolist() == [2, 5]


@pytest.mark.parametrize("kind", [SerialEnv, ParallelEnv])
def test_batched_single_environments_are_collected(kind):
    in_place = kind is SerialEnv  # a process of ParallelEnv steps and resets before it hands anything over
    makers = [partial(Simulator, length, in_place=in_place) for length in (2, 3)]
    env = kind(2, makers) if kind is SerialEnv else kind(2, makers, mp_start_method="fork")
    try:
        ((window, final),) = windows(collector_of(env, 5), 1)
    finally:
        env.close()
    assert window["observation"][:, :, 0].tolist() == [[0, 0], [1, 1], [0, 2], [1, 0], [0, 1]]
    assert window["next", "terminated"].squeeze(-1).tolist() == [[0, 0], [1, 0], [0, 1], [1, 0], [0, 0]]
    assert final["observation"][:, 0].tolist() == [1, 2]


# -- iteration -----------------------------------------------------------------------------------


def test_iteration_yields_none_per_window_until_total_frames_and_counts_them():
    collector = collector_of(Simulator([2, 3]), 4, total_frames=20)
    yielded = []
    for batch in collector:
        yielded.append(batch)
        assert collector.getattr_rb("write_count") == collector.num_frames
        collector.replay_buffer.empty()
    assert yielded == [None] * 3 and collector.num_frames == 24


def test_a_window_that_nobody_emptied_is_not_passed_off_as_the_next_one():
    collector = collector_of(Simulator([2, 3]), 4)
    iterator = iter(collector)
    next(iterator)
    with pytest.raises(OverflowError, match=r"full \(4 rows\).*buffer\.empty\(\)"):
        next(iterator)


def test_a_batch_size_other_than_the_buffers_is_refused_with_both():
    with pytest.raises(ValueError, match=r"batch size \(2,\) but the buffer holds N = 3"):
        RolloutCollector(Simulator([1, 1]), lambda td: td, replay_buffer=RolloutBuffer(4, 3))


def test_a_buffer_with_transforms_is_refused():
    buffer = RolloutBuffer(4, 2, transform=RewardScaling(0.0, 1.0))
    with pytest.raises(ValueError, match=r"TransformedEnv.*or use TorchRL's Collector"):
        RolloutCollector(Simulator([1, 1]), lambda td: td, replay_buffer=buffer)


def test_an_exception_while_collecting_closes_the_environment_and_is_passed_on():
    class Crashes(Simulator):
        def _step(self, tensordict):
            if self.num_steps == 5:
                raise ArithmeticError("the simulation diverged")
            return super()._step(tensordict)

    collector = collector_of(Crashes([2, 3]), 4)
    with pytest.raises(ArithmeticError, match="diverged"):
        for _ in collector:
            collector.replay_buffer.empty()
    assert collector.env.is_closed
    collector.shutdown()  # closing it once more is no error


def test_shutdown_can_leave_the_environment_open():
    collector = collector_of(Simulator([2]))
    collector.shutdown(close_env=False)
    assert not collector.env.is_closed
    collector.shutdown()
    assert collector.env.is_closed


def test_weights_to_send_are_refused_because_the_policy_itself_acts():
    collector = collector_of(Simulator([2]))
    collector.update_policy_weights_()
    with pytest.raises(ValueError, match="the very policy it was given"):
        collector.update_policy_weights_(TensorDict())


def test_set_seed_seeds_the_environment():
    found = []
    for seed in (3, 3, 4):
        collector = collector_of(PendulumEnv(2), policy=policy_of(PendulumEnv(2)))
        assert collector.set_seed(seed) != seed
        collector.rollout()
        found.append(collector.replay_buffer.window["observation"][0].clone())
    assert torch.equal(found[0], found[1]) and not torch.equal(found[0], found[2])


# -- saving --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "transform", [None, StepCounter, lambda: VecNormV2(in_keys=["observation"])], ids=str
)
@pytest.mark.filterwarnings("ignore:Support of VecNormV2 for containers:UserWarning")
@pytest.mark.filterwarnings("ignore:VecNorm wasn't initialized and the tensordict:UserWarning")
@pytest.mark.filterwarnings("ignore:Querying state_dict on an uninitialized VecNorm:UserWarning")
def test_a_collector_resumed_from_its_state_continues_to_the_bit(transform):
    def make():
        env = PendulumEnv(3, seed=0, max_episode_steps=4)
        env = env if transform is None else TransformedEnv(env, transform())
        torch.manual_seed(0)
        return collector_of(env, 5, policy=policy_of(env))

    first, second = make(), make()
    windows(first, 2)
    state, rng = first.state_dict(), torch.get_rng_state()
    expected = windows(first, 2)
    windows(second, 1)  # it has been somewhere else meanwhile
    second.load_state_dict(state)
    torch.set_rng_state(rng)
    assert_same(windows(second, 2), expected)
    assert second.statistics.summary() == first.statistics.summary()
    assert second.num_frames == first.num_frames == 60


def test_a_saved_state_is_a_snapshot():
    collector = collector_of(PendulumEnv(3, seed=0, max_episode_steps=4))
    windows(collector, 1)
    state = collector.state_dict()
    carrier = {key: value.clone() for key, value in state["carrier"].items()}
    sums = state["statistics"]["sums"].clone()
    windows(collector, 1)
    assert all(torch.equal(carrier[key], value) for key, value in state["carrier"].items())
    assert torch.equal(sums, state["statistics"]["sums"])


def test_a_fresh_state_is_loaded_without_a_word():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        collector_of(Simulator([2])).load_state_dict(collector_of(Simulator([2])).state_dict())


@pytest.mark.parametrize("wrap", [lambda env: env, TransformedEnv], ids=["bare", "transformed"])
def test_an_environment_that_cannot_save_its_state_is_reset_and_said_so(wrap):
    first = collector_of(wrap(Simulator([4, 4])), 3)
    windows(first, 1)
    second = collector_of(wrap(Simulator([4, 4])), 3)
    windows(second, 1)
    with pytest.warns(UserWarning, match="Simulator cannot save its state: environments start new episodes"):
        second.load_state_dict(first.state_dict())
    ((window, _),) = windows(second, 1)
    assert window["is_init"][0].all() and (window["observation"][0, :, 0] == 0).all()
    windows(second, 1)
    assert second.statistics.summary().mean_length == 4  # not 3 + 4: the old sums went with the old episode


def test_batched_single_environments_have_no_state_to_save():
    collector = collector_of(SerialEnv(2, lambda: Simulator(3)), 2)
    collector.rollout()
    assert "env" not in collector.state_dict()


# -- episode statistics --------------------------------------------------------------------------


class Listed:
    """The statistics, kept in Python lists."""

    def __init__(self, num_envs: int, window: int, skip_first: bool) -> None:
        self.running = [(0.0, 0)] * num_envs
        self.skip = [skip_first] * num_envs
        self.window, self.ended = window, []

    def update(self, reward: list[float], done: list[bool]) -> None:
        for n, (value, ends) in enumerate(zip(reward, done, strict=True)):
            total, length = self.running[n]
            self.running[n] = (total + value, length + 1)
            if ends:
                if not self.skip[n]:
                    self.ended.append(self.running[n])
                self.skip[n], self.running[n] = False, (0.0, 0)

    def summary(self) -> tuple[float, float, int]:
        last = self.ended[-self.window :]
        if not last:
            return math.nan, math.nan, 0
        returns, lengths = zip(*last, strict=True)
        return sum(returns) / len(last), sum(lengths) / len(last), len(self.ended)


def assert_counts_as_a_list_does(steps, window, skip_first, looking_is_free) -> None:
    num_envs = len(steps[0])
    statistics = EpisodeStatistics(num_envs, window, skip_first=skip_first)
    statistics._looking_is_free = looking_is_free
    listed = Listed(num_envs, window, skip_first)
    for step in steps:
        reward, done = [float(r) for r, _ in step], [d for _, d in step]
        statistics.update(torch.tensor(reward).view(-1, 1), torch.tensor(done).view(-1, 1))
        listed.update(reward, done)
        # Rewards are small integers: sums are exact, and only the means are rounded.
        assert statistics.summary() == pytest.approx(listed.summary(), nan_ok=True, rel=1e-12)


@st.composite
def episodes(draw):
    num_envs = draw(st.integers(1, 5))
    cell = st.tuples(st.integers(-9, 9), st.booleans())
    return draw(st.lists(st.lists(cell, min_size=num_envs, max_size=num_envs), min_size=1, max_size=12))


@pytest.mark.parametrize("looking_is_free", [True, False], ids=["cpu", "accelerator"])
@given(steps=episodes(), window=st.integers(1, 7), skip_first=st.booleans())
def test_statistics_are_those_of_a_plain_list_of_episodes(looking_is_free, steps, window, skip_first):
    assert_counts_as_a_list_does(steps, window, skip_first, looking_is_free)


@pytest.mark.parametrize("looking_is_free", [True, False], ids=["cpu", "accelerator"])
def test_of_more_episodes_than_slots_ending_at_once_the_last_ones_stay(looking_is_free):
    steps = [[(n, (n + t) % 3 != 0) for n in range(250)] for t in range(4)]
    assert sum(done for _, done in steps[0]) > 100
    assert_counts_as_a_list_does(steps, 100, False, looking_is_free)


def test_sums_do_not_lose_small_rewards_of_long_episodes():
    statistics = EpisodeStatistics(1)
    reward, going = torch.full((1, 1), 1e8), torch.zeros(1, 1, dtype=torch.bool)
    statistics.update(reward, going)
    for _ in range(10):
        statistics.update(torch.ones(1, 1), going)
    statistics.update(torch.ones(1, 1), ~going)
    assert statistics.summary().mean_return == 1e8 + 11  # float32 would stay at 1e8


def test_statistics_resumed_from_their_state_count_on():
    torch.manual_seed(0)
    first, second = (EpisodeStatistics(4, 3, skip_first=True) for _ in range(2))
    reward, done = torch.randn(20, 4, 1), torch.rand(20, 4, 1) < 0.3
    for t in range(10):
        first.update(reward[t], done[t])
    second.load_state_dict(first.state_dict())
    for t in range(10, 20):
        first.update(reward[t], done[t])
        second.update(reward[t], done[t])
    assert first.summary() == second.summary()


def test_the_statistics_of_another_number_of_environments_or_another_window_are_refused():
    state = EpisodeStatistics(1, 5).state_dict()
    for other in (EpisodeStatistics(3, 5), EpisodeStatistics(1, 6)):
        with pytest.raises(ValueError, match="count 1 environments over 5 episodes"):
            other.load_state_dict(state)
    with pytest.raises(ValueError, match="`window` must be at least 1"):
        EpisodeStatistics(1, 0)


def test_partial_first_episodes_are_left_out_where_the_environment_says_so():
    for env, skipped in (
        (PendulumEnv(2), True),
        (TransformedEnv(PendulumEnv(2)), True),
        (PendulumEnv(2, init_at_random_ep_len=False), False),
        (Simulator([2, 2]), False),
        (SerialEnv(2, lambda: Simulator(3)), False),
    ):
        collector = collector_of(env, policy=lambda td: td)
        assert collector.statistics.state_dict()["skip"].all().item() is skipped
    collector = collector_of(PendulumEnv(2), policy=lambda td: td, skip_first_episode=False)
    assert not collector.statistics.state_dict()["skip"].any()


def test_whole_pendulum_episodes_alone_are_counted():
    collector = collector_of(PendulumEnv(8, seed=0, max_episode_steps=7), 20)
    windows(collector, 1)
    summary = collector.statistics.summary()
    assert summary.mean_length == 7 and summary.num_episodes >= 8


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_collecting_waits_for_the_device_only_where_final_observations_are_looked_for():
    env = PendulumEnv(8, seed=0, device="cuda", max_episode_steps=100)
    policy = policy_of(env).to("cuda")
    collector = RolloutCollector(env, policy, replay_buffer=RolloutBuffer(7, 8, device="cuda"))
    windows(collector, 1)
    torch.cuda.set_sync_debug_mode("error")
    try:
        collector.statistics.update(torch.ones(8, 1, device="cuda"), torch.ones(8, 1, device="cuda").bool())
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_the_flags_of_the_simulator_are_those_torchrl_knows():
    assert set(FLAGS) <= set(Simulator([1]).done_keys)


class CountingPendulum(PendulumEnv):
    """A subclass that overrides TorchRL's own method, as users do to shape rewards."""

    def _step(self, tensordict):
        stepped = super()._step(tensordict)
        return stepped.set("reward", torch.full_like(stepped["reward"], 7.0))


@pytest.mark.parametrize("how", ["collector", "step_and_maybe_reset"])
def test_a_subclass_that_overrides_the_step_is_stepped_its_own_way(how):
    env = CountingPendulum(num_envs=3, seed=0)
    if how == "step_and_maybe_reset":
        stepped, _ = env.step_and_maybe_reset(env.rand_action(env.reset()))
        assert (stepped["next", "reward"] == 7).all()
        return
    actor, critic = MLPActor.for_env(env, hidden_dims=(4,)), MLPCritic.for_env(env, hidden_dims=(4,))
    buffer = RolloutBuffer(2, 3)
    RolloutCollector(env, ActorCritic(actor, critic), replay_buffer=buffer).rollout()
    assert (buffer.window["next", "reward"] == 7).all()


# -- without a TensorDict in a step ------------------------------------------------------------------


class AlsoActorCritic(ActorCritic):
    """The same, but a class of its own: it is asked with TensorDicts."""


@pytest.mark.parametrize("hide_velocity", [False, True])
def test_our_own_networks_collect_the_same_with_and_without_tensordicts(hide_velocity):
    collectors = []
    for policy_class in (ActorCritic, AlsoActorCritic):
        torch.manual_seed(0)
        env = PendulumEnv(5, seed=0, max_episode_steps=7, hide_velocity=hide_velocity)
        networks = [
            network.for_env(env, hidden_dims=(8,), normalize_observations=True)
            for network in (MLPActor, MLPCritic)
        ]
        buffer = RolloutBuffer(4, 5)
        collectors.append(RolloutCollector(env, policy_class(*networks), replay_buffer=buffer))
    for _ in range(4):
        windows = []
        for collector in collectors:
            torch.manual_seed(1)
            collector.rollout()
            buffer = collector.replay_buffer
            windows.append((buffer.window.clone(), buffer.final_observations.observation.clone()))
            collector.policy.actor.update_normalizer(buffer.window)
            buffer.empty()
        (ours, our_finals), (theirs, their_finals) = windows
        assert set(ours.keys(True, True)) == set(theirs.keys(True, True))
        assert (ours == theirs).all()
        assert (our_finals == their_finals).all()
        for key, value in leaves(collectors[1]._carrier).items():
            assert torch.equal(collectors[0]._carrier[key], value)
        assert repr(collectors[0].statistics.summary()) == repr(collectors[1].statistics.summary())


def test_a_step_that_fails_leaves_the_carrier_at_the_row_that_is_open(monkeypatch):
    env = PendulumEnv(5, seed=0)
    policy = ActorCritic(MLPActor.for_env(env, hidden_dims=(8,)), MLPCritic.for_env(env, hidden_dims=(8,)))
    buffer = RolloutBuffer(4, 5)
    collector = RolloutCollector(env, policy, replay_buffer=buffer)
    calls = []

    def advance(action, step=env.advance):
        calls.append(action)
        if len(calls) == 3:
            raise RuntimeError("the simulator is gone")
        return step(action)

    monkeypatch.setattr(env, "advance", advance)
    with pytest.raises(RuntimeError, match="the simulator is gone"):
        collector.rollout()
    assert buffer.num_rows == 2
    assert torch.equal(collector._carrier["action"], calls[-1])


def hooked(policy, seen):
    policy.actor.register_forward_hook(lambda module, args, out: seen.append(out["observation"].shape))


def replaced(policy, seen):
    forward = policy.forward
    policy.forward = lambda td: (seen.append(td["observation"].shape), forward(td))[1]


@pytest.mark.parametrize("add", [hooked, replaced])
def test_what_users_add_to_our_networks_gets_tensordicts(add):
    env = PendulumEnv(5, seed=0)
    policy = ActorCritic(MLPActor.for_env(env, hidden_dims=(8,)), MLPCritic.for_env(env, hidden_dims=(8,)))
    collector = RolloutCollector(env, policy, replay_buffer=RolloutBuffer(4, 5))
    kinds, seen = [], []
    add(policy, seen)
    policy.critic.register_forward_pre_hook(
        lambda module, args: kinds.append(isinstance(args[0], TensorDict))
    )
    collector.rollout()
    assert len(seen) == 4
    assert kinds == [True] * 4
