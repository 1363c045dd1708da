"""Curiosity: what is new is rewarded, the predictor learns, and training with it can be resumed.

That the numbers are RSL-RL's is in test_parity_extensions.py.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from oracles_objectives import Sizes, in_buffer, make_rollout
from rsl_rl.modules import EmpiricalDiscountedVariationNormalization, EmpiricalNormalization
from tensordict import TensorDict
from test_recurrent_training import filled, short_episodes, spoilt
from tiny import Simulator, equal, make_trainer, parameters

from torchrl_rslstorage import (
    ActorCritic,
    EmpiricalNormalizer,
    PendulumEnv,
    RandomNetworkDistillation,
    RNNActor,
    RNNCritic,
    RolloutBuffer,
    RolloutCollector,
    RSLPPOTrainer,
    intrinsic_weight,
)
from torchrl_rslstorage.modules.novelty import _ReturnNormalizer
from torchrl_rslstorage.trainers.checkpoints import CheckpointError
from torchrl_rslstorage.trainers.curiosity import Curiosity


def make_rnd(in_features: int = 3, **options: Any) -> RandomNetworkDistillation:
    torch.manual_seed(5)
    shape = {"num_outputs": 4, "predictor_hidden_dims": (8,), "target_hidden_dims": (8,), "weight": 0.5}
    return RandomNetworkDistillation(["observation"], in_features, **{**shape, **options})


# -- the novelty of the next observation ---------------------------------------------------------


@pytest.mark.parametrize("seed", range(3))
def test_each_step_is_rewarded_for_the_observation_that_it_led_to(seed):
    rollout = make_rollout(Sizes(6, 4, 0.2, 0.3, seed), torch.float32)
    buffer, rnd = in_buffer(rollout), make_rnd()
    before = buffer.window["next", "reward"].clone()
    intrinsic = Curiosity(rnd, 4).reward(buffer)
    assert torch.equal(buffer.window["next", "reward"], before + intrinsic)
    terminated = rollout["next", "terminated"]
    for t in range(6):
        for n in range(4):
            cell = rollout[t, n]
            led_to = cell["next", "observation"]
            if bool(terminated[t, n]) and not bool(cell["next", "truncated"]) and t < 5:
                led_to = rollout["observation"][t + 1, n]  # a terminal observation is kept nowhere
            novelty = (rnd.target(led_to) - rnd.predictor(led_to)).norm()
            torch.testing.assert_close(intrinsic[t, n, 0], 0.5 * novelty.detach())


def test_where_an_environment_gives_no_final_observation_the_next_row_stands_in():
    rollout = make_rollout(Sizes(4, 3, 0.0, 0.5, 1), torch.float32)
    done = rollout["next", "done"]
    assert done[:-1].any() and done[-1].any()
    rollout["next", "observation"] = rollout["next", "observation"].masked_fill(done, torch.nan)
    buffer, rnd = in_buffer(rollout), make_rnd()
    intrinsic = Curiosity(rnd, 3).reward(buffer)
    novelty = 0.5 * rnd.novelty(rollout)
    torch.testing.assert_close(intrinsic[:-1], novelty[1:])
    torch.testing.assert_close(intrinsic[-1][done[-1]], novelty[-1][done[-1]])


@pytest.mark.parametrize("steps", [1, 3])
def test_normalised_rewards_go_on_from_window_to_window_and_from_state_to_state(steps):
    torch.manual_seed(0)
    theirs = EmpiricalDiscountedVariationNormalization([], until=int(1e8))
    ours = _ReturnNormalizer()
    for _ in range(4):
        again = _ReturnNormalizer()
        again.load_state_dict(ours.state_dict())
        ours = again
        for row in torch.rand(steps, 5, 1):
            torch.testing.assert_close(ours(row).squeeze(-1), theirs(row.squeeze(-1)))
    ours.eval()
    before = parameters(ours)
    ours(torch.rand(5, 1))
    assert equal(before, parameters(ours))


def test_a_normaliser_stops_to_learn_where_rsl_rls_does():
    torch.manual_seed(0)
    theirs, ours = EmpiricalNormalization(3, until=8), EmpiricalNormalizer(3, until=8)
    for _ in range(4):
        x = torch.randn(5, 3)
        theirs.update(x)
        ours.update(x)
    for a, b in zip(parameters(ours), parameters(theirs), strict=True):
        assert torch.equal(a, b.view_as(a))
    assert ours.count == 10


# -- the predictor -------------------------------------------------------------------------------


def test_the_predictor_learns_from_the_valid_cells_of_trajectories_alone():
    _, _, buffer = filled()
    for clean in buffer:
        updated = []
        flat = TensorDict({"observation": clean["observation"][clean["mask"]]}, [int(clean["mask"].sum())])
        for batch in (clean, spoilt(clean, float("nan")), flat):
            curiosity = Curiosity(make_rnd(state_normalization=True), 6)
            curiosity.update(batch)
            updated.append(parameters(curiosity.rnd.predictor))
        for left, middle, right in zip(*updated, strict=True):
            assert torch.equal(left, middle)
            torch.testing.assert_close(left, right)


def test_the_target_never_moves_and_what_was_seen_is_no_longer_new():
    rnd = make_rnd(learning_rate=1e-2)
    curiosity = Curiosity(rnd, 4)
    seen = TensorDict({"observation": torch.randn(32, 3)}, [32])
    new = TensorDict({"observation": 5 + torch.randn(32, 3)}, [32])
    target, before = parameters(rnd.target), rnd.novelty(new).mean()
    for _ in range(300):
        curiosity.update(seen)
    assert equal(target, parameters(rnd.target))
    assert rnd.novelty(seen).mean() < 0.2 * rnd.novelty(new).mean()
    assert rnd.novelty(new).mean() > 0.3 * before


# -- what is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"weight_schedule": {"mode": "cosine"}}, r"mode out of \['constant', 'step', 'linear'\], got"),
        ({"weight_schedule": {}}, "needs a mode out of"),
        ({"weight_schedule": "linear"}, "needs a mode out of"),
        ({"weight": math.nan}, "`weight` must be finite from start to end, got nan"),
        (
            {"weight_schedule": {"mode": "step", "final_step": 3, "final_value": math.inf}},
            "`weight` must be finite from start to end, got .* and inf",
        ),
        ({"learning_rate": math.inf}, "`learning_rate` must be positive"),
        (
            {"weight_schedule": {"mode": "step", "final_step": 3}},
            r"'step' takes \['final_step', 'final_value'\]",
        ),
        ({"weight_schedule": {"mode": "constant", "final_step": 3}}, "takes nothing, got"),
        (
            {"weight_schedule": {"mode": "linear", "initial_step": 3, "final_step": 3, "final_value": 0.0}},
            "`final_step` must come after `initial_step` 3, got 3",
        ),
        ({"learning_rate": 0.0}, "`learning_rate` must be positive"),
        ({"num_outputs": 0}, "`num_outputs` must be at least 1"),
        ({"activation": "step"}, "`activation` must be one of"),
        ({"predictor_hidden_dims": (-2,)}, "`hidden_dims` must be positive"),
    ],
)
def test_options_that_make_no_sense_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        make_rnd(**options)


def test_observations_that_are_missing_or_of_another_width_are_named():
    rnd = make_rnd()
    with pytest.raises(KeyError, match="RandomNetworkDistillation reads 'observation', which is not there"):
        rnd(TensorDict({"other": torch.zeros(4, 3)}, [4]))
    with pytest.raises(ValueError, match=r"expects 3 features.*'observation' \(4, 2\)"):
        rnd(TensorDict({"observation": torch.zeros(4, 2)}, [4]))
    with pytest.raises(KeyError, match="no observation 'state'"):
        RandomNetworkDistillation.for_env(PendulumEnv(2), ["state"], weight=1.0)


# -- training ------------------------------------------------------------------------------------

EVERYTHING: dict[str, Any] = {
    "state_normalization": True,
    "reward_normalization": True,
    "weight_schedule": {"mode": "linear", "initial_step": 8, "final_step": 40, "final_value": 0.1},
}


def curious_trainer(num_iterations: int = 6, **options: Any) -> RSLPPOTrainer:
    env = PendulumEnv(16, seed=1, max_episode_steps=20)
    return make_trainer(
        env, num_steps=8, num_iterations=num_iterations, rnd=make_rnd(**EVERYTHING), **options
    )


def timeless(trainer: RSLPPOTrainer) -> dict[str, float]:
    return {name: value for name, value in trainer.metrics.items() if not name.startswith("Perf/")}


def test_training_with_curiosity_reports_rsl_rls_metrics_and_a_resumed_run_ends_in_the_same_numbers(tmp_path):
    whole = curious_trainer()
    whole.train()
    stopped = curious_trainer(num_iterations=3, checkpoint_dir=tmp_path)
    stopped.train()
    resumed = curious_trainer()
    resumed.load_checkpoint(stopped.latest_checkpoint)
    resumed.train()
    metrics = whole.metrics
    assert metrics["Loss/rnd"] > 0
    assert metrics["Rnd/weight"] == pytest.approx(intrinsic_weight(48, 0.5, EVERYTHING["weight_schedule"]))
    extrinsic = whole.collector.statistics.summary().mean_return
    assert metrics["Rnd/mean_extrinsic_reward"] == extrinsic < 0
    assert metrics["Rnd/mean_intrinsic_reward"] > 0
    assert metrics["Train/mean_reward"] == extrinsic + metrics["Rnd/mean_intrinsic_reward"]
    assert timeless(whole) == timeless(resumed)
    curious = (whole.actor, whole.critic, whole.curiosity.rnd)
    assert equal(parameters(*curious), parameters(resumed.actor, resumed.critic, resumed.curiosity.rnd))


def test_intrinsic_and_extrinsic_returns_are_those_of_the_same_episodes():
    trainer = curious_trainer()
    trainer.train()
    ours, theirs = trainer.curiosity.statistics.summary(), trainer.collector.statistics.summary()
    assert ours.num_episodes == theirs.num_episodes > 10
    assert ours.mean_length == theirs.mean_length


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_an_observation_that_is_not_finite_is_named_and_not_the_reward_for_it(value):
    env = Simulator([5, 3, 9], faults={("observation", 1, 2): value})
    trainer = make_trainer(env, rnd=make_rnd(4, reward_normalization=True))
    with pytest.raises(ValueError, match=r"'observation' is (nan|inf) at step 2 of environment 2"):
        trainer.train()


def test_a_weight_of_zero_changes_no_policy():
    plain = make_trainer(PendulumEnv(16, seed=1, max_episode_steps=20), num_steps=8)
    plain.train()
    curious = make_trainer(
        PendulumEnv(16, seed=1, max_episode_steps=20), num_steps=8, rnd=make_rnd(weight=0.0)
    )
    curious.train()
    assert equal(parameters(plain.actor, plain.critic), parameters(curious.actor, curious.critic))


def test_a_checkpoint_without_curiosity_is_refused_by_a_trainer_with_it(tmp_path):
    trainer = make_trainer(checkpoint_dir=tmp_path)
    trainer.train()
    with pytest.raises(CheckpointError, match="curiosity"):
        make_trainer(rnd=make_rnd()).load_checkpoint(trainer.latest_checkpoint)


def test_a_checkpoint_with_curiosity_is_refused_by_a_trainer_without_it(tmp_path):
    trainer = make_trainer(checkpoint_dir=tmp_path, rnd=make_rnd())
    trainer.train()
    plain = make_trainer()
    before = [p.clone() for p in parameters(plain.actor, plain.critic)]
    with pytest.raises(CheckpointError, match="holds 'curiosity', which nothing here corresponds to"):
        plain.load_checkpoint(trainer.latest_checkpoint)
    assert equal(before, parameters(plain.actor, plain.critic))


@pytest.mark.parametrize("rnn_type", ["lstm", "gru"])
def test_recurrent_policies_train_with_curiosity(rnn_type):
    env = short_episodes()
    memory = {"rnn_type": rnn_type, "rnn_hidden_dim": 8, "hidden_dims": (16,)}
    torch.manual_seed(0)
    actor, critic = RNNActor.for_env(env, **memory), RNNCritic.for_env(env, **memory)
    collector = RolloutCollector(env, ActorCritic(actor, critic), replay_buffer=RolloutBuffer(10, 6))
    rnd = make_rnd(**EVERYTHING)
    trainer = RSLPPOTrainer(collector, actor, critic, total_frames=120, progress_bar=False, rnd=rnd)
    trainer.train()
    assert trainer.metrics["Loss/rnd"] > 0
