"""AMP beside PPO: what the discriminator is shown, what a window earns, and that a resume changes nothing."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch
from oracles import tensors
from tensordict import TensorDict
from tiny import Simulator, equal, parameters, policy_of
from torchrl.data import Unbounded

from torchrl_rslstorage import (
    AMPConfig,
    AMPDiscriminator,
    AMPTrainer,
    MotionDataset,
    PointMassEnv,
    PPOConfig,
    RNNActor,
    RNNCritic,
    RolloutBuffer,
    RolloutCollector,
    StyleReward,
    circle_motion,
)
from torchrl_rslstorage.modules import ActorCritic
from torchrl_rslstorage.trainers.motion_report import align_motion, draw_motions, record_motion
from torchrl_rslstorage.trainers.options import StyleOptions, TrainOptions
from torchrl_rslstorage.trainers.runs import evaluate_run, resume_run, start_run

OBJECTIVES = ("lsgan", "bce", "wgan")


def circles(num: int) -> TensorDict:
    return MotionDataset(circle_motion()).pairs(num, 0.05, ["joint_pos", "joint_vel"])


def noise(num: int) -> TensorDict:
    return TensorDict(
        {"observation": torch.randn(num, 4), "next": {"observation": torch.randn(num, 4)}}, [num]
    )


def make_trainer(env=None, *, demonstrations=None, iterations=3, seed=0, amp=None, policy=None, **options):
    """An AMPTrainer on ``env`` (six point masses with episodes of five steps), all drawn from ``seed``."""
    torch.manual_seed(seed)
    if env is None:
        env = PointMassEnv(6, seed=seed, max_episode_steps=5)
    policy = policy_of(env) if policy is None else policy(env)
    num_envs = env.batch_size[0]
    collector = RolloutCollector(env, policy, replay_buffer=RolloutBuffer(4, num_envs))
    trainer = AMPTrainer(
        collector,
        policy.actor,
        policy.critic,
        AMPDiscriminator(["observation"], in_features=4, hidden_dims=(8,)),
        demonstrations or circles,
        dt=0.05,
        amp=amp or AMPConfig(history_length=8),
        total_frames=iterations * 4 * num_envs,
        progress_bar=False,
        **{"config": PPOConfig(num_learning_epochs=2, num_mini_batches=2), **options},
    )
    return trainer


def recurrent(env):
    shape = {"rnn_type": "gru", "rnn_hidden_dim": 4, "hidden_dims": (8,)}
    return ActorCritic(RNNActor.for_env(env, **shape), RNNCritic.for_env(env, **shape))


# -- what a window earns -----------------------------------------------------------------------


@pytest.mark.parametrize("weight", [0.0, 0.3, 1.0])
def test_rewards_are_the_lerp_of_the_style_of_each_pair_and_the_task(weight):
    trainer = make_trainer(amp=AMPConfig(history_length=8, task_style_lerp=weight, style_reward_scale=3.0))
    trainer.collector.rollout()
    window, rows = trainer.buffer.window, trainer.buffer
    task = window["next", "reward"].clone()
    # By hand: the next state is the next row, or the final observation.
    after = torch.cat([window["observation"][1:], window["observation"][-1:]])
    t, n, final = rows.final_observations
    after[t, n] = final["observation"]
    pairs = TensorDict(
        {"observation": window["observation"], "next": {"observation": after}}, window.batch_size
    )
    score = trainer.discriminator.evaluate(pairs).detach()
    style = (1 - (score - 1) ** 2 / 4).clamp_min(0) * 3.0 * 0.05
    trainer._prepare()
    torch.testing.assert_close(window["next", "reward"], weight * task + (1 - weight) * style)


def test_advantages_are_those_of_the_lerped_rewards():
    trainer = make_trainer()
    trainer.collector.rollout()
    trainer._prepare()
    got = trainer.buffer.window["advantage"].clone()
    trainer.advantages(trainer.buffer)
    assert torch.equal(got, trainer.buffer.window["advantage"])


# -- what the discriminator is shown -----------------------------------------------------------


def test_no_pair_that_the_discriminator_sees_reaches_across_a_reset():
    # (step, environment, episode, sum of the last action): steps of one episode follow each other
    seen = []
    trainer = make_trainer(Simulator([3, 2, 5, 1]), demonstrations=noise, iterations=4)
    trainer._teach = lambda policy, demonstration: seen.append(policy.clone())
    trainer._fetch_metrics = lambda window: {"Train/mean_step_reward": 0.0}
    trainer.train()
    pairs = torch.cat(seen)
    before, after = pairs["observation"], pairs["next", "observation"]
    assert len(pairs) == 4 * 2 * 16
    assert torch.equal(after[:, 0], before[:, 0] + 1)
    assert torch.equal(after[:, 1:3], before[:, 1:3])


class Blind(Simulator):
    """Shows NaN where an episode ends, as simulators do that reset themselves."""

    def _step(self, tensordict):
        stepped = super()._step(tensordict)
        stepped["observation"] = stepped["observation"].masked_fill(stepped["done"], torch.nan)
        return stepped


@pytest.mark.filterwarnings("ignore:.*have no final observation")
def test_where_an_environment_shows_no_final_observation_the_pair_is_left_out_and_earns_nothing():
    seen = []
    trainer = make_trainer(Blind([3, 2, 5, 2]), demonstrations=noise, iterations=3)
    taught = trainer._teach
    trainer._teach = lambda policy, demonstration: (
        seen.append(policy.clone()),
        taught(policy, demonstration),
    )
    rewards = []
    prepared = trainer._prepare

    def prepare():
        prepared()
        rewards.append(
            (trainer.buffer.window["next", "reward"].clone(), trainer.buffer.window["next", "done"].clone())
        )

    trainer._prepare = prepare
    trainer.train()
    pairs = torch.cat(seen)
    assert not bool(torch.cat([pairs["observation"], pairs["next", "observation"]]).isnan().any())
    assert torch.equal(pairs["next", "observation"][:, 0], pairs["observation"][:, 0] + 1)
    for reward, done in rewards:
        assert bool(done.any()) and bool((reward[done] == 0).all()) and bool(reward.isfinite().all())


@pytest.mark.filterwarnings("ignore:.*have no final observation")
def test_fewer_whole_pairs_than_mini_batches_are_shown_several_times():
    config = PPOConfig(num_learning_epochs=2, num_mini_batches=6)
    trainer = make_trainer(Blind([1, 1, 5]), demonstrations=noise, iterations=1, config=config)
    shown, taught = [], trainer._teach
    trainer._teach = lambda policy, demonstration: (shown.append(len(policy)), taught(policy, demonstration))
    with pytest.warns(UserWarning, match="holds 4 cells and 6 are asked for"):
        trainer.train()
    assert shown == [1] * 12


@pytest.mark.filterwarnings("ignore:.*have no final observation")
def test_a_window_without_a_single_whole_pair_is_refused_with_the_reason():
    trainer = make_trainer(Blind([1, 1]), demonstrations=noise)
    with pytest.raises(RuntimeError, match=r"is it known which state followed.*no final observation"):
        trainer.train()


def test_each_mini_batch_of_ppo_has_one_of_either_side_and_every_cell_of_the_first_window_is_seen():
    trainer = make_trainer(iterations=1)
    shown = []
    trainer._teach = lambda policy, demonstration: shown.append((policy.clone(), demonstration.clone()))
    trainer.collector.rollout()
    trainer._begin_update()
    sizes = [len(batch) for batch in trainer._batches]
    assert sizes == [12] * 4 and [len(policy) for policy, _ in shown] == [12] * 4
    assert [len(demonstration) for _, demonstration in shown] == [12] * 4
    window = trainer.buffer.window["observation"].reshape(-1, 4)
    for epoch in (shown[:2], shown[2:]):
        rows = torch.cat([policy["observation"] for policy, _ in epoch])
        assert torch.equal(rows.sort(0).values, window.sort(0).values)


def test_the_policys_side_remembers_earlier_windows_up_to_its_length():
    trainer = make_trainer(iterations=3)
    trainer.train()
    assert trainer.policy_history.lengths.tolist() == [8] * 6
    assert trainer.demonstration_history.lengths.tolist() == [4] * 6


def test_the_normaliser_takes_in_both_sides_raw_once_an_update():
    trainer = make_trainer(iterations=1)
    trainer.train()
    normalizer = trainer.discriminator.normalizer
    assert normalizer is not None and normalizer.count == 2 * 24
    shown = torch.cat([side["observation"].reshape(-1, 4) for side in trainer._new])
    torch.testing.assert_close(normalizer.mean, shown.mean(0))
    torch.testing.assert_close(normalizer.var, shown.var(0, correction=0))


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_the_discriminator_learns_and_the_actor_is_none_of_its_business(objective):
    trainer = make_trainer(amp=AMPConfig(objective=objective, history_length=8))
    networks = (trainer.discriminator, trainer.actor)
    before = [parameters(net) for net in networks]
    trainer.collector.rollout()
    trainer._begin_update()
    for _ in trainer._batches:
        pass
    assert not equal(before[0], parameters(networks[0]))
    assert equal(before[1], parameters(networks[1]))


@pytest.mark.parametrize("policy", [None, recurrent], ids=["mlp", "gru"])
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_a_run_logs_what_shows_saturation(objective, policy):
    trainer = make_trainer(policy=policy, amp=AMPConfig(objective=objective, history_length=8))
    trainer.train()
    names = ("policy_score", "demonstration_score", "policy_accuracy", "demonstration_accuracy")
    names += ("gradient_penalty", "style_reward", "task_reward")
    for name in [f"AMP/{name}" for name in names] + ["Loss/discriminator", "Loss/value"]:
        assert torch.tensor(trainer.metrics[name]).isfinite(), name
    assert 0 <= trainer.metrics["AMP/policy_accuracy"] <= 1


# -- resuming ----------------------------------------------------------------------------------


@pytest.mark.parametrize("objective", ["lsgan", "wgan"])
def test_a_resumed_run_is_the_uninterrupted_one_histories_included(objective, tmp_path):
    amp = AMPConfig(objective=objective, history_length=10)
    whole = make_trainer(iterations=5, amp=amp)
    whole.train()
    half = make_trainer(iterations=3, amp=amp, checkpoint_dir=tmp_path, save_interval=3)
    half.train()
    resumed = make_trainer(iterations=5, seed=7, amp=amp, checkpoint_dir=tmp_path)
    assert resumed.latest_checkpoint is not None
    resumed.load_checkpoint(resumed.latest_checkpoint)
    resumed.train()
    parts = ("actor", "critic", "discriminator", "style_reward")
    for part in parts:
        assert equal(parameters(getattr(whole, part)), parameters(getattr(resumed, part))), part
    ours, theirs = (tensors(trainer.policy_history.history()) for trainer in (whole, resumed))
    assert all(torch.equal(value, theirs[key]) for key, value in ours.items())
    for key in (key for key in whole.metrics if not key.startswith("Perf/")):
        assert whole.metrics[key] == resumed.metrics[key], key


# -- what is refused ---------------------------------------------------------------------------


def test_a_trainer_is_refused_with_a_reason():
    for name, value, message in (
        ("history_length", 0, "`history_length` must be at least 1"),
        ("task_style_lerp", 1.1, "`task_style_lerp` must be between 0 and 1"),
        ("discriminator_learning_rate", 0.0, "`discriminator_learning_rate` must be positive"),
        ("gradient_penalty_coef", -1.0, "`gradient_penalty_coef` must be zero or more"),
        ("objective", "gan", "`objective` must be one of"),
    ):
        with pytest.raises(ValueError, match=message):
            make_trainer(amp=AMPConfig(**{name: value}))


def test_demonstrations_that_do_not_fit_are_named():
    trainer = make_trainer(demonstrations=lambda num: circles(num)["next"].clone())
    with pytest.raises(KeyError, match="next"):
        trainer.train()
    wide = TensorDict({"observation": torch.zeros(24, 7), "next": {"observation": torch.zeros(24, 7)}}, [24])
    with pytest.raises(ValueError, match=r"expects 4 features.*24, 7|expects 4 features.*12, 7"):
        make_trainer(demonstrations=lambda num: wide).train()


def test_hyper_parameters_that_make_every_number_nan_are_refused():
    for name in ("discriminator_learning_rate", "gradient_penalty_coef", "style_reward_scale"):
        with pytest.raises(ValueError, match=f"`{name}` must be .*, got inf"):
            make_trainer(amp=AMPConfig(**{name: float("inf")}))
    make_trainer(amp=AMPConfig(discriminator_max_grad_norm=float("inf")))  # a bound that is switched off


def test_demonstrations_are_told_apart_from_the_environment_where_they_are_wrong():
    def faulty(num):
        pairs = circles(num)
        pairs["next", "observation"][0, 0] = torch.nan
        return pairs

    for demonstrations, error, message in (
        (faulty, ValueError, r"demonstrations hold values that are not finite: \('next', 'observation'\)\."),
        (lambda num: circles(num + 1), ValueError, r"asked for 24 pairs and returned \(25,\)"),
        (lambda num: circles(num).to_dict(), TypeError, "returned a dict, expected a TensorDict of 24 pairs"),
        (
            lambda num: circles(num).exclude("observation"),
            KeyError,
            "demonstrations lack 'observation'",
        ),
    ):
        with pytest.raises(error, match=message):
            make_trainer(demonstrations=demonstrations).train()
    with pytest.raises(TypeError, match="`demonstrations` is a MotionDataset, expected a function"):
        make_trainer(demonstrations=MotionDataset(circle_motion()))


def test_demonstrations_may_be_doubles_or_laid_out_as_a_window():
    def run(demonstrations):
        trainer = make_trainer(demonstrations=demonstrations)
        trainer.train()
        return parameters(trainer.actor, trainer.discriminator)

    expected = run(circles)
    assert equal(run(lambda num: circles(num).double()), expected)
    assert equal(run(lambda num: circles(num).reshape(4, 6)), expected)


class Scored(Simulator):
    """Rewards that are integers."""

    def __init__(self, lengths):
        super().__init__(lengths)
        self.reward_spec = Unbounded((*self.batch_size, 1), dtype=torch.int64)

    def _step(self, tensordict):
        stepped = super()._step(tensordict)
        return stepped.set("reward", stepped["reward"].long())


def test_rewards_that_no_style_can_be_mixed_into_are_refused():
    with pytest.raises(ValueError, match="rewards are int64, into which no style reward can be mixed"):
        make_trainer(Scored([3, 2]), demonstrations=noise).train()


def test_a_buffer_in_use_is_refused():
    env = PointMassEnv(6, seed=0)
    policy = policy_of(env)
    collector = RolloutCollector(env, policy, replay_buffer=RolloutBuffer(4, 6))
    collector.rollout()
    with pytest.raises(RuntimeError, match="before the first one"):
        AMPTrainer(
            collector,
            policy.actor,
            policy.critic,
            AMPDiscriminator(["observation"], in_features=4),
            circles,
            dt=0.05,
            total_frames=24,
            progress_bar=False,
        )


# -- the report --------------------------------------------------------------------------------


def test_the_error_of_a_motion_is_found_at_any_phase_and_counted_in_standard_deviations():
    motion = MotionDataset(circle_motion()).resample(0.05).clips[0].frames
    reference = torch.cat([motion["joint_pos"], motion["joint_vel"]], -1)
    states = torch.stack([reference[13:93], reference[40:120]], 1)
    error, phase = align_motion(states, reference)
    assert error.max() < 1e-6 and phase.tolist() == [13, 40]
    shifted = states + 0.5 * reference.std(0, correction=0)
    # half a standard deviation in each of four features, and no phase explains it
    assert (align_motion(shifted, reference).error - 1.0).abs().max() < 0.05
    with pytest.raises(ValueError, match="do not fit"):
        align_motion(reference.unsqueeze(1).repeat(2, 1, 1), reference)


def test_recorded_states_are_those_of_the_mean_action():
    env, policy = PointMassEnv(3, seed=0, init_at_random_ep_len=False), policy_of(PointMassEnv(3, seed=0))
    states = record_motion(env, policy.actor, ["observation"], num_steps=4, settle_steps=2)
    again = PointMassEnv(3, seed=0, init_at_random_ep_len=False)
    root = again.reset()
    for step in range(6):
        if step >= 2:
            assert torch.equal(states[step - 2], root["observation"])
        root["action"] = policy.actor.get_dist(root).loc.detach()
        _, root = again.step_and_maybe_reset(root)


def test_both_motions_are_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    reference = torch.randn(20, 3)
    draw_motions(tmp_path / "motions.png", torch.randn(10, 2, 3), reference, 0.1, "random")
    assert (tmp_path / "motions.png").read_bytes().startswith(b"\x89PNG")


# -- the command -------------------------------------------------------------------------------


def small(tmp_path, **options):
    values = {"task": "point-mass", "num_envs": 8, "max_iterations": 3, "save_interval": 2, "amp": "circle"}
    style = StyleOptions(history_length=8, discriminator_hidden_dims=(8,))
    return TrainOptions(
        **{**values, "run_dir": tmp_path / "run", "style": style, "progress_bar": False, **options}
    )


def quiet(_: str) -> None:
    """Tells nobody."""


def test_a_run_leaves_the_error_and_the_picture_and_can_be_resumed_and_evaluated(tmp_path):
    pytest.importorskip("matplotlib")
    summary = start_run(small(tmp_path), quiet)
    assert 0 < summary["motion_error"] < 20 and 0 < summary["motion_error_untrained"] < 20
    assert (tmp_path / "run" / "motions.png").is_file()
    assert json.loads((tmp_path / "run" / "config.json").read_text())["style"]["history_length"] == 8
    more = resume_run(tmp_path / "run", 5, quiet)
    assert more["iterations"] == 5 and more["motion_error_untrained"] == summary["motion_error_untrained"]
    assert evaluate_run(tmp_path / "run", num_episodes=8)["num_episodes"] == 8


def test_motions_are_read_from_files(tmp_path):
    np = pytest.importorskip("numpy")
    pytest.importorskip("matplotlib")
    frames = circle_motion(fps=30.0).frames
    np.savez(tmp_path / "circle.npz", fps=30.0, **{key: value.numpy() for key, value in frames.items()})
    summary = start_run(small(tmp_path, amp=str(tmp_path / "circle.npz"), max_iterations=1), quiet)
    assert summary["iterations"] == 1


def test_a_motion_that_does_not_fit_the_task_leaves_no_run_behind(tmp_path):
    np = pytest.importorskip("numpy")
    np.savez(tmp_path / "walk.npz", fps=30.0, joint_pos=np.zeros((9, 5)), joint_vel=np.zeros((9, 5)))
    for amp, error, message in (
        (str(tmp_path / "walk.npz"), ValueError, "have 10 numbers, but a state of point-mass has 4"),
        (str(tmp_path / "missing.npz"), FileNotFoundError, "missing.npz"),
    ):
        with pytest.raises(error, match=message):
            start_run(small(tmp_path, amp=amp), quiet)
    with pytest.raises(ValueError, match="'pendulum' does not say which fields of a motion"):
        start_run(small(tmp_path, task="pendulum"), quiet)
    assert not (tmp_path / "run").exists()


def test_a_task_brings_what_was_left_out_of_the_style_and_nothing_else():
    style = StyleOptions(discriminator_learning_rate=1e-2)
    options = TrainOptions("point-mass", amp="circle", style=style).resolved()
    assert (options.style.gradient_penalty_coef, options.style.discriminator_learning_rate) == (0.2, 1e-2)
    assert TrainOptions("pendulum").resolved().style.gradient_penalty_coef == 10.0
    critic = TrainOptions("point-mass", amp="circle", style=StyleOptions(objective="wgan")).resolved()
    assert critic.style.gradient_penalty_coef == 10.0
    with pytest.raises(ValueError, match="`gradient_penalty_coef` must be zero or more, got -2"):
        TrainOptions("point-mass", style=StyleOptions(gradient_penalty_coef=-2)).resolved()


def test_a_style_without_a_motion_is_refused_instead_of_ignored(tmp_path):
    style = StyleOptions(objective="wgan", gradient_penalty_coef=5.0)
    with pytest.raises(ValueError, match=r"no motion .* `objective`, `gradient_penalty_coef` would"):
        start_run(small(tmp_path, amp=None, style=style), quiet)
    assert not (tmp_path / "run").exists()
    # What a run without a motion wrote can be read again: it holds the task's own style.
    options = TrainOptions("point-mass").resolved()
    assert TrainOptions.from_config(options.as_config(), tmp_path) == dataclasses.replace(
        options, run_dir=tmp_path
    )


@pytest.mark.slow
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_a_policy_learns_the_circle_without_any_task_reward(objective, tmp_path):
    options = TrainOptions("point-mass", run_dir=tmp_path / "run", amp="circle", progress_bar=False)
    options.style.objective = objective
    summary = start_run(options, quiet)
    assert summary["motion_error_untrained"] > 5 * summary["motion_error"]


def test_the_style_reward_is_part_of_a_checkpoint_only_where_it_has_a_state():
    discriminator = AMPDiscriminator(["observation"], in_features=4, hidden_dims=(8,))
    assert set(StyleReward(discriminator, "wgan").state_dict()) == {
        f"normalizer.{name}" for name in ("mean", "var", "std", "count")
    }
