"""RSL-RL's environments in TorchRL, and TorchRL's in RSL-RL."""

from __future__ import annotations

import warnings
from copy import deepcopy
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rsl_rl.runners import OnPolicyRunner
from simulators import Walkers
from tensordict import TensorDict
from tiny import Simulator, equal, parameters
from torchrl.collectors import Collector
from torchrl.data import Categorical
from torchrl.envs import RewardSum, SerialEnv, StepCounter, TransformedEnv, check_env_specs

from torchrl_rslstorage import (
    ActorCritic,
    MLPActor,
    MLPCritic,
    PendulumEnv,
    PPOConfig,
    RNNActor,
    RNNCritic,
    RolloutBuffer,
    RolloutCollector,
    RolloutGAE,
    RSLPPOTrainer,
    TorchRLVecEnv,
    TrajectorySampler,
    VecEnvWrapper,
)
from torchrl_rslstorage.envs.vec_env import FINAL_NAMES

LENGTHS = [3, 5, 4, 7]
GAMMA, LMBDA = 0.9, 0.8
NETWORKS: dict[str, Any] = {"hidden_dims": (8,)}


def policy(seed: int = 0) -> ActorCritic:
    torch.manual_seed(seed)
    return ActorCritic(MLPActor(["policy"], 3, 2, **NETWORKS), MLPCritic(["critic"], 4, **NETWORKS))


def collected(
    simulator: Walkers, num_steps: int = 12, *, torchrl: bool = False, seed: int = 0
) -> RolloutBuffer:
    """One window, by our collector or TorchRL's."""
    env = VecEnvWrapper(simulator)
    made = policy(seed)
    buffer = RolloutBuffer(num_steps, simulator.num_envs)
    torch.manual_seed(seed + 1)
    if torchrl:
        frames = num_steps * simulator.num_envs
        options = {
            "frames_per_batch": frames,
            "total_frames": frames,
            "auto_register_policy_transforms": False,
        }
        for _ in Collector(env, made, replay_buffer=buffer, **options):
            pass
    else:
        RolloutCollector(env, made, replay_buffer=buffer).rollout()
    return buffer


# -- a VecEnv in TorchRL -----------------------------------------------------------------------------


VARIANTS = {
    "plain": {},
    "final observations": {"final": "final_obs"},
    "memory used again": {"in_place": True, "final": "final_obs"},
    "columns": {"layout": "column"},
    "integer flags": {"layout": "integer", "final": "final_obs"},
    "no time-outs": {"time_outs": False},
}


@pytest.mark.parametrize("options", VARIANTS.values(), ids=VARIANTS)
@pytest.mark.parametrize("wrap", [False, True], ids=["bare", "transformed"])
def test_a_wrapped_simulator_keeps_the_contract_of_its_specs(options, wrap):
    env = VecEnvWrapper(Walkers([2, 3, 4, 7], **options))
    check_env_specs(TransformedEnv(env, RewardSum()) if wrap else env)


def test_specs_are_those_of_the_first_observations():
    env = VecEnvWrapper(Walkers(LENGTHS), clip_actions=2.0)
    assert env.batch_size == (4,)
    assert {key: spec.shape for key, spec in env.observation_spec.items()} == {
        "policy": (4, 3),
        "critic": (4, 4),
    }
    assert env.action_spec.shape == (4, 2)
    assert float(env.action_spec.space.high.max()) == 2.0
    assert (env.num_actions, env.max_episode_length) == (2, 7)


def recorded(lengths: list[int], actions: torch.Tensor, **options: Any) -> list[dict[str, torch.Tensor]]:
    """What really happens when these actions ``[T, N, 2]`` are taken, from a simulator that copies."""
    simulator = Walkers(lengths, final="final_obs", **options)
    steps = []
    for action in actions:
        before = simulator.get_observations()
        after, reward, done, extras = simulator.step(action)
        shown = {key: value.clone() for key, value in after.items()}
        for key, final in extras.get("final_obs", {}).items():
            shown[key][done] = final[done]
        steps.append(
            {
                **{key: value.clone() for key, value in before.items()},
                **{f"next {key}": value for key, value in shown.items()},
                "reward": reward.unsqueeze(-1),
                "done": done.unsqueeze(-1),
                "truncated": extras["time_outs"].unsqueeze(-1),
            }
        )
    return steps


@pytest.mark.parametrize("torchrl", [False, True], ids=["RolloutCollector", "Collector"])
@pytest.mark.parametrize("name", ["final observations", "memory used again", "integer flags"])
def test_a_window_holds_what_really_happened(name, torchrl):
    options = {"limit": 0.6, **VARIANTS[name]}
    window = collected(Walkers(LENGTHS, **options), torchrl=torchrl).window
    steps = recorded(LENGTHS, window["action"], limit=0.6)
    for key in ("policy", "critic"):
        assert torch.equal(window[key], torch.stack([step[key] for step in steps]))
    for key in ("reward", "done", "truncated"):
        assert torch.equal(window["next", key], torch.stack([step[key] for step in steps]))
    assert torch.equal(window["next", "terminated"], window["next", "done"] & ~window["next", "truncated"])
    assert window["next", "terminated"].any()
    assert window["next", "truncated"].any()


@given(
    lengths=st.lists(st.integers(1, 5), min_size=1, max_size=4),
    num_steps=st.integers(1, 8),
    in_place=st.booleans(),
    limit=st.sampled_from([0.5, 1e9]),
)
def test_final_observations_are_those_of_cut_off_walkers_whenever_they_are(
    lengths, num_steps, in_place, limit
):
    simulator = Walkers(lengths, in_place=in_place, final="final_obs", limit=limit)
    buffer = collected(simulator, num_steps)
    steps = recorded(lengths, buffer.window["action"], limit=limit)
    t, n, observation = buffer.final_observations
    cells = list(zip(t.tolist(), n.tolist(), strict=True))
    last = num_steps - 1
    assert cells == [
        (t, n) for t in range(num_steps) for n in range(len(lengths)) if t == last or steps[t]["truncated"][n]
    ]
    for key in ("policy", "critic"):
        assert torch.equal(observation[key], torch.stack([steps[t][f"next {key}"][n] for t, n in cells]))
        assert torch.equal(buffer.window[key], torch.stack([step[key] for step in steps]))


@pytest.mark.parametrize("torchrl", [False, True], ids=["RolloutCollector", "Collector"])
def test_what_is_done_keeps_its_final_observation_until_the_advantages(torchrl):
    buffer = collected(Walkers(LENGTHS, in_place=True, final="final_obs"), torchrl=torchrl)
    steps = recorded(LENGTHS, buffer.window["action"])
    t, n, observation = buffer.final_observations
    for row, env, seen in zip(t.tolist(), n.tolist(), observation["critic"], strict=True):
        assert torch.equal(seen, steps[row]["next critic"][env])
    assert len(t) > 2 * len(LENGTHS)


def advantages_by_definition(steps: list[dict[str, torch.Tensor]], critic: Any, rule: str) -> torch.Tensor:
    """``[T, N]`` float64, cell by cell, with V of what a walker ended in, or by RSL-RL's rule."""
    value = deepcopy(critic).double()

    def v(observation: torch.Tensor) -> float:
        with torch.no_grad():
            td = TensorDict({"critic": observation.double().unsqueeze(0)}, [1])
            return float(value(td)["state_value"])

    num_steps, num_envs = len(steps), len(steps[0]["reward"])
    advantage = torch.zeros(num_steps, num_envs, dtype=torch.float64)
    for n in range(num_envs):
        following = 0.0
        for t in reversed(range(num_steps)):
            step = steps[t]
            done, truncated = bool(step["done"][n]), bool(step["truncated"][n])
            here = v(step["critic"][n])
            after = v(step["next critic"][n]) if not done or truncated else 0.0
            if truncated and rule == "rsl_rl":
                after = here
            delta = float(step["reward"][n]) + GAMMA * after - here
            following = delta + (0.0 if done else GAMMA * LMBDA * following)
            advantage[t, n] = following
    return advantage


@pytest.mark.parametrize("name", [None, *FINAL_NAMES])
@pytest.mark.parametrize("in_place", [False, True])
def test_a_time_out_within_the_window_is_bootstrapped_from_the_final_observation_if_there_is_one(
    name, in_place
):
    buffer = collected(Walkers(LENGTHS, final=name, limit=0.6, in_place=in_place))
    critic = policy().critic
    gae = RolloutGAE(GAMMA, LMBDA, critic)
    if name is None:
        with pytest.warns(UserWarning, match="no final observation"):
            gae(buffer)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            gae(buffer)
    else:
        gae(buffer)
    steps = recorded(LENGTHS, buffer.window["action"], limit=0.6)
    rules = {rule: advantages_by_definition(steps, critic, rule) for rule in ("final", "rsl_rl")}
    wanted = rules["rsl_rl" if name is None else "final"]
    assert torch.allclose(buffer.window["advantage"].squeeze(-1).double(), wanted, atol=1e-5)
    assert not torch.allclose(rules["rsl_rl"], rules["final"], atol=1e-3), "the rules do not differ here"


def test_final_observations_of_some_groups_leave_nan_in_the_others():
    simulator = Walkers([1, 9], final="final_obs")
    env = VecEnvWrapper(simulator)
    step = simulator.step

    def only_policy(actions):
        *rest, extras = step(actions)
        return *rest, {**extras, "final_obs": {"policy": extras["final_obs"]["policy"]}}

    simulator.step = only_policy  # type: ignore[method-assign]
    after = env.step(env.rand_action(env.reset()))["next"]
    assert after["policy"].isfinite().all()
    assert after["critic"].isnan().all(-1).tolist() == [True, False]


def test_one_group_may_have_its_final_observation_as_a_plain_tensor():
    class OneGroup(Walkers):
        def _groups(self):
            return {"policy": super()._groups()["policy"]}

        def step(self, actions):
            *rest, extras = super().step(actions)
            return *rest, {**extras, "final_obs": extras["final_obs"]["policy"]}

    env = VecEnvWrapper(OneGroup([1, 1], final="final_obs"))
    assert env.step(env.rand_action(env.reset()))["next", "policy"][:, 1].tolist() == pytest.approx(
        [0.1, 0.1]
    )


def test_groups_that_cannot_be_nan_are_zero_where_an_episode_ended():
    class Cameras(Walkers):
        def _groups(self):
            pixels = self.episode_length_buf.add(5).view(-1, 1, 1).expand(-1, 2, 2).to(torch.uint8)
            return {**super()._groups(), "camera": pixels}

    env = VecEnvWrapper(Cameras([1, 9]))
    after = env.step(env.rand_action(env.reset()))["next"]
    assert after["camera"].dtype is torch.uint8
    assert after["camera"].flatten(1).tolist() == [[0] * 4, [6] * 4]


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("final", [None, "final_obs"])
def test_a_step_never_waits_for_the_device(final):
    class OnCuda(Walkers):
        """Hands out in every step what was moved there before."""

        def step(self, actions):
            return self.made

    simulator = OnCuda([1, 1, 9, 9])
    env = VecEnvWrapper(simulator, device="cuda")
    observations, *signals, extras = Walkers.step(simulator, torch.zeros(4, 2))
    extras = {"time_outs": extras["time_outs"].cuda()}
    if final is not None:
        extras[final] = observations.cuda()
    simulator.made = (observations.cuda(), *(x.cuda() for x in signals), extras)
    simulator.device = "cuda"
    root = env.reset().set("action", torch.zeros(4, 2, device="cuda"))
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(3):
            stepped, root = env.step_and_maybe_reset(root.set("action", root["action"]))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert stepped["next", "policy"].isfinite().all() == (final is not None)
    assert stepped["next", "done"].flatten().tolist() == [True, True, False, False]


def test_actions_are_clipped_before_the_simulator_sees_them():
    simulator = Walkers(LENGTHS)
    env = VecEnvWrapper(simulator, clip_actions=0.5)
    env.step(env.reset().set("action", torch.full((4, 2), -3.0)))
    assert torch.equal(simulator.seen[-1], torch.full((4, 2), -0.5))


def test_episode_lengths_are_the_simulators_and_may_be_set_or_spread():
    simulator = Walkers([50] * 64)
    env = VecEnvWrapper(simulator, init_at_random_ep_len=True)
    assert env.partial_first_episodes
    torch.manual_seed(0)
    env.reset()
    assert len(env.episode_length_buf.unique()) > 10
    assert int(env.episode_length_buf.max()) < 50
    env.episode_length_buf = torch.zeros(64, dtype=torch.long)
    assert not simulator.episode_length_buf.any()
    env.reset()
    assert not simulator.episode_length_buf.any(), "they are spread once"


def test_a_simulators_own_reset_seed_and_close_are_called():
    class Whole(Walkers):
        calls: list[Any]

        def reset(self):
            self.calls.append("reset")
            self._restart(torch.ones(self.num_envs, dtype=torch.bool))
            return self.get_observations(), {}

        def seed(self, seed):
            self.calls.append(seed)

        def close(self):
            self.calls.append("close")

    simulator = Whole(LENGTHS)
    simulator.calls = []
    env = VecEnvWrapper(simulator)
    env.set_seed(5)
    env.rollout(2)
    env.close()
    env.close(raise_if_closed=False)
    with pytest.raises(RuntimeError, match="already closed"):
        env.close()
    assert simulator.calls == [5, "reset", "close"]


def test_the_log_of_the_last_step_is_there():
    env = VecEnvWrapper(Walkers(LENGTHS))
    env.rollout(1)
    assert "/fallen" in env.extras["log"]


def test_episodes_cut_off_from_outside_are_refused():
    env = TransformedEnv(VecEnvWrapper(Walkers([9] * 4)), StepCounter(max_steps=2))
    with pytest.raises(RuntimeError, match="resets itself"):
        env.rollout(4, break_when_any_done=False)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda e: {"get_observations": lambda: torch.zeros(4, 3)}, "a Tensor, expected a TensorDict"),
        (
            lambda e: {"get_observations": lambda: {"reward": torch.zeros(4, 3)}},
            "'reward' is named as TorchRL",
        ),
        (
            lambda e: {"get_observations": lambda: {"policy": torch.zeros(3, 3)}},
            r"'policy' has shape \(3, 3\)",
        ),
    ],
)
def test_observations_that_cannot_be_carried_are_refused(change, message):
    simulator = Walkers(LENGTHS)
    vars(simulator).update(change(simulator))
    with pytest.raises(ValueError, match=message):
        VecEnvWrapper(simulator)


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        (1, torch.zeros(3), r"`rewards` has shape \(3,\)"),
        (2, torch.zeros(4, 2), r"`dones` has shape \(4, 2\)"),
        (3, {"time_outs": torch.zeros(4, 4)}, r"`time_outs` has shape \(4, 4\)"),
        (3, {"final_obs": {"policy": torch.zeros(1, 3)}}, r"'policy' of shape \(1, 3\), expected \(4, 3\)"),
        (3, {"final_obs": [None] * 4}, "a list, expected a TensorDict"),
    ],
)
def test_a_step_of_wrong_shapes_is_refused(place, value, message):
    simulator = Walkers([1, 1, 1, 1])
    env = VecEnvWrapper(simulator)
    root = env.reset()
    step = simulator.step

    def wrong(actions):
        came = list(step(actions))
        came[place] = value
        return tuple(came)

    simulator.step = wrong  # type: ignore[method-assign]
    with pytest.raises(ValueError, match=message):
        env.step(env.rand_action(root))


@pytest.mark.parametrize(
    ("later", "message"),
    [
        (lambda groups: groups.exclude("critic"), "'critic' is gone, but the simulator began with float32"),
        (lambda groups: groups.double(), r"is float64 \(4, [34]\) by now, but .* float32 \(4, [34]\)"),
        (lambda groups: groups.apply(lambda x: x[:, :2]), r"is float32 \(4, 2\) by now"),
    ],
)
def test_observations_that_change_their_form_on_the_way_are_refused(later, message):
    simulator = Walkers(LENGTHS)
    env = VecEnvWrapper(simulator)
    first = simulator.get_observations
    simulator.get_observations = lambda: later(first())
    with pytest.raises(ValueError, match=message):
        env.rollout(2)


@pytest.mark.parametrize("torchrl", [False, True], ids=["ours", "TorchRL's"])
def test_a_simulator_that_writes_into_the_actions_does_not_change_those_of_the_window(torchrl):
    class Scales(Walkers):
        def step(self, actions):
            return super().step(actions.mul_(0.0))

    window, others = (
        collected(simulator, torchrl=torchrl).window for simulator in (Scales(LENGTHS), Walkers(LENGTHS))
    )
    assert torch.equal(window["action"][0], others["action"][0])
    assert (window["action"] != 0).all()


def test_a_simulator_without_extras_is_one_without_time_outs():
    class Silent(Walkers):
        def step(self, actions):
            return *super().step(actions)[:3], None

    window = collected(Silent(LENGTHS)).window
    assert not window["next", "truncated"].any() and window["next", "terminated"].any()


def test_a_clip_that_is_not_positive_is_refused():
    with pytest.raises(ValueError, match="clip_actions"):
        VecEnvWrapper(Walkers(LENGTHS), clip_actions=0.0)


def test_a_trainer_learns_on_a_wrapped_simulator_in_place_as_on_its_copying_twin():
    def trained(**options):
        torch.manual_seed(0)
        made = policy()
        env = VecEnvWrapper(Walkers(LENGTHS, final="final_obs", limit=0.6, **options))
        collector = RolloutCollector(env, made, replay_buffer=RolloutBuffer(6, 4))
        trainer = RSLPPOTrainer(
            collector,
            made.actor,
            made.critic,
            total_frames=4 * 24,
            config=PPOConfig(num_learning_epochs=2, num_mini_batches=2),
            progress_bar=False,
        )
        trainer.train()
        assert collector.statistics.summary()
        return parameters(made.actor, made.critic)

    first = parameters(policy().actor, policy().critic)
    assert equal(trained(in_place=True), trained())
    assert not equal(trained(), first)


@pytest.mark.parametrize("recurrent", [False, True], ids=["mlp", "lstm"])
def test_a_trainer_learns_without_final_observations_and_says_once_what_stands_in(recurrent):
    torch.manual_seed(0)
    made, sampler = policy(), None
    if recurrent:
        options = {"rnn_hidden_dim": 8, **NETWORKS}
        made = ActorCritic(RNNActor(["policy"], 3, 2, **options), RNNCritic(["critic"], 4, **options))
        sampler = TrajectorySampler(2, 2)
    buffer = RolloutBuffer(6, 4, sampler=sampler)
    trainer = RSLPPOTrainer(
        RolloutCollector(VecEnvWrapper(Walkers(LENGTHS, limit=0.6)), made, replay_buffer=buffer),
        made.actor,
        made.critic,
        total_frames=4 * 24,
        config=PPOConfig(num_learning_epochs=2, num_mini_batches=2),
        progress_bar=False,
    )
    before = parameters(made)
    with pytest.warns(UserWarning, match="no final observation") as said:
        trainer.train()
    assert len(said) == 1
    assert not equal(before, parameters(made))
    assert all(value.isfinite().all() for value in parameters(made))


def test_a_wrapper_that_keeps_the_simulators_memory_is_noticed(monkeypatch):
    monkeypatch.setattr(VecEnvWrapper, "_copied", lambda env, came: dict(came.items()))
    window = collected(Walkers(LENGTHS, in_place=True), torchrl=True).window
    steps = recorded(LENGTHS, window["action"])
    assert not torch.equal(window["policy"], torch.stack([step["policy"] for step in steps]))


# -- TorchRL's environments in RSL-RL ----------------------------------------------------------------


def rsl_rl_config() -> dict[str, Any]:
    network = {"class_name": "MLPModel", "hidden_dims": [8]}
    gaussian = {"class_name": "GaussianDistribution", "init_std": 1.0, "std_type": "scalar"}
    return {
        "num_steps_per_env": 6,
        "save_interval": 100,
        "obs_groups": {"actor": ["observation"], "critic": ["observation"]},
        "actor": {**network, "distribution_cfg": gaussian},
        "critic": dict(network),
        "algorithm": {"class_name": "PPO"},
    }


@pytest.mark.parametrize("random_lengths", [False, True])
@pytest.mark.parametrize(
    "make",
    [
        lambda: PendulumEnv(4, seed=0, max_episode_steps=5),
        lambda: TransformedEnv(PendulumEnv(4, seed=0, max_episode_steps=5), RewardSum()),
        lambda: Simulator([3, 5, 4, 6]),
        lambda: SerialEnv(4, lambda: Simulator(3)),
    ],
    ids=["pendulums", "transformed", "simulator", "batched"],
)
def test_rsl_rls_runner_learns_on_torchrls_environments(make, random_lengths):
    torch.manual_seed(0)
    env = TorchRLVecEnv(make(), max_episode_length=5)
    config = rsl_rl_config()
    if "episode_reward" in env.get_observations().keys():
        config["obs_groups"]["critic"].append("episode_reward")
    runner = OnPolicyRunner(env, config, log_dir=None, device="cpu")
    before = parameters(runner.alg.actor)
    runner.learn(2, init_at_random_ep_len=random_lengths)
    assert not equal(before, parameters(runner.alg.actor))


def test_a_step_tells_rewards_ends_time_outs_and_the_final_observations_of_the_environment():
    lengths = [3, 5, 4, 6]
    env = TorchRLVecEnv(Simulator(lengths, in_place=True), log_keys=["reward"])
    assert env.get_observations()["observation"][:, 0].tolist() == [0, 0, 0, 0]
    for step in range(1, 13):
        observations, rewards, dones, extras = env.step(torch.full((4, 2), float(step)))
        inside = [(step - 1) % length + 1 for length in lengths]
        ended = [place == length for place, length in zip(inside, lengths, strict=True)]
        assert extras["final_obs"]["observation"][:, 0].tolist() == inside
        assert dones.tolist() == ended
        assert extras["time_outs"].tolist() == [end and n % 2 == 1 for n, end in enumerate(ended)]
        assert observations["observation"][:, 0].tolist() == [
            0 if end else place for place, end in zip(inside, ended, strict=True)
        ]
        assert rewards.shape == (4,)
        assert torch.equal(extras["log"]["/reward"].view(-1), rewards)
        assert env.episode_length_buf.tolist() == observations["observation"][:, 0].tolist()


def test_what_a_step_handed_out_stays_as_it_was():
    env = TorchRLVecEnv(Simulator([2, 3], in_place=True))
    first = env.step(torch.ones(2, 2))
    kept = deepcopy(first)
    for _ in range(4):
        env.step(torch.ones(2, 2))
    assert torch.equal(first[0]["observation"], kept[0]["observation"])
    assert torch.equal(first[1], kept[1])
    assert torch.equal(first[3]["final_obs"]["observation"], kept[3]["final_obs"]["observation"])


def test_set_episode_lengths_bring_the_time_outs_forward():
    env = TorchRLVecEnv(Simulator([100, 100]), max_episode_length=5)
    env.get_observations()
    env.episode_length_buf = torch.tensor([3, 0])
    ends = []
    for _ in range(7):
        observations, _, dones, extras = env.step(torch.zeros(2, 2))
        assert torch.equal(dones, extras["time_outs"])
        assert (observations["observation"][dones, 0] == 0).all()
        ends.append(dones.tolist())
    assert [step for step, (first, _) in enumerate(ends, 1) if first] == [2, 7]
    assert [step for step, (_, second) in enumerate(ends, 1) if second] == [5]


def test_there_and_back_again_is_the_simulator():
    simulator, twin = (
        Walkers(LENGTHS, final="final_obs", limit=0.6),
        Walkers(LENGTHS, final="final_obs", limit=0.6),
    )
    env = TorchRLVecEnv(VecEnvWrapper(simulator))
    assert torch.equal(env.get_observations()["critic"], twin.get_observations()["critic"])
    torch.manual_seed(0)
    for _ in range(12):
        action = torch.randn(4, 2)
        ours, theirs = env.step(action), twin.step(action)
        for key in ("policy", "critic"):
            assert torch.equal(ours[0][key], theirs[0][key])
            if theirs[2].any():
                assert torch.equal(
                    ours[3]["final_obs"][key][theirs[2]], theirs[3]["final_obs"][key][theirs[2]]
                )
        assert torch.equal(ours[1], theirs[1])
        assert torch.equal(ours[2], theirs[2])
        assert torch.equal(ours[3]["time_outs"], theirs[3]["time_outs"])


def test_nested_observations_become_groups_with_dots():
    inner = VecEnvWrapper(_Nested(LENGTHS))
    assert sorted(TorchRLVecEnv(inner).get_observations().keys()) == ["critic", "sensors.policy"]


class _Nested(Walkers):
    def get_observations(self):
        flat = super().get_observations()
        return TensorDict({"sensors": {"policy": flat["policy"]}, "critic": flat["critic"]}, [self.num_envs])


def test_the_length_of_episodes_is_asked_of_the_environment_and_else_said_to_be_missing():
    assert TorchRLVecEnv(PendulumEnv(2, max_episode_steps=9)).max_episode_length == 9
    with pytest.raises(AttributeError, match="max_episode_length="):
        _ = TorchRLVecEnv(Simulator([3, 4])).max_episode_length


def test_an_entry_to_log_that_no_step_brings_is_named_beside_those_that_are_there():
    env = TorchRLVecEnv(PendulumEnv(2), log_keys=["speed"])
    with pytest.raises(
        KeyError, match=r"`log_keys` names 'speed', .* it has 'done', 'observation', 'reward'"
    ):
        env.step(torch.zeros(2, 1))


def test_the_environment_below_is_seeded_and_closed():
    env = TorchRLVecEnv(PendulumEnv(2))
    env.seed(3)
    first = env.reset()[0]["observation"]
    env.seed(3)
    env.env._first_reset_done = False
    assert torch.equal(env.reset()[0]["observation"], first)
    env.close()
    env.close()
    assert env.env.is_closed


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: TorchRLVecEnv(Simulator(3)), r"batch size \(\), expected \[N\]"),
        (lambda: TorchRLVecEnv(PendulumEnv(2), max_episode_length=0), "at least 1, got 0"),
        (lambda: TorchRLVecEnv(_discrete()), "vectors of floats"),
    ],
)
def test_environments_that_rsl_rl_cannot_take_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def _discrete() -> Simulator:
    env = Simulator([3, 4])
    env.action_spec = Categorical(3, shape=(2,))
    return env
