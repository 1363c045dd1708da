"""The distillation trainer: what one iteration does, what it logs, what a checkpoint brings back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict.nn import TensorDictModule, TensorDictSequential
from tensordict.nn.distributions import NormalParamExtractor
from tiny import equal, parameters
from torch import nn
from torchrl.checkpoint import CheckpointError
from torchrl.modules import GRUModule, IndependentNormal, LSTMModule, ProbabilisticActor

from torchrl_rslstorage import (
    DistillationConfig,
    DistillationLoss,
    DistillationStepper,
    DistillationTrainer,
    MLPActor,
    PendulumEnv,
    RNNActor,
    RolloutBuffer,
    RolloutCollector,
    StudentTeacher,
    TimeStepSampler,
)

NUM_STEPS, NUM_ENVS = 7, 4


def make_trainer(
    student: str = "lstm",
    teacher: str = "mlp",
    *,
    num_iterations: int = 4,
    seed: int = 0,
    state_keys: tuple[str, ...] = (),
    checkpoint_dir: Path | None = None,
    **config: Any,
) -> DistillationTrainer:
    env = PendulumEnv(NUM_ENVS, seed=seed, max_episode_steps=5, hide_velocity=True, show_teacher=True)
    torch.manual_seed(100)
    policy = StudentTeacher.for_env(env, _actor(student, 2), _actor(teacher, 3))
    torch.manual_seed(seed)
    collector = RolloutCollector(env, policy, replay_buffer=RolloutBuffer(NUM_STEPS, NUM_ENVS))
    return DistillationTrainer(
        collector,
        policy,
        total_frames=num_iterations * NUM_STEPS * NUM_ENVS,
        config=DistillationConfig(**{"gradient_length": 3, **config}),
        checkpoint_dir=checkpoint_dir,
        save_interval=1,
        keep_last=10,
        progress_bar=False,
    )


def _actor(kind: str, width: int) -> MLPActor | RNNActor:
    options: dict[str, Any] = {"hidden_dims": (8,), "normalize_observations": True}
    if kind == "mlp":
        return MLPActor(["observation"], width, 1, **options)
    return RNNActor(["observation"], width, 1, rnn_type=kind, rnn_hidden_dim=6, **options)


@pytest.mark.parametrize("student", ["mlp", "gru", "lstm"])
@pytest.mark.parametrize("teacher", ["mlp", "gru"])
def test_a_student_trains_and_its_teacher_does_not(student, teacher):
    trainer = make_trainer(student, teacher, num_iterations=30, learning_rate=1e-2)
    before, taught = parameters(trainer.policy.student), parameters(trainer.policy.teacher)
    errors = []
    trainer.register_op("post_steps", lambda: errors.append(trainer.metrics["Loss/behavior"]))
    trainer.train()
    assert trainer.num_iterations == 30 and trainer.collected_frames == 30 * 28
    assert not equal(before, parameters(trainer.policy.student))
    assert equal(taught, parameters(trainer.policy.teacher))
    assert sum(errors[-5:]) < sum(errors[:5])


@pytest.mark.parametrize("kind", [LSTMModule, GRUModule])
def test_a_student_of_torchrls_trains_with_states_that_go_on(kind):
    torch.manual_seed(0)
    states = ["h", "c"] if kind is LSTMModule else ["h"]
    made = [("next", name) for name in states]
    memory = kind(input_size=2, hidden_size=6, in_keys=["observation", *states], out_keys=["features", *made])
    head = nn.Sequential(nn.Linear(6, 2), NormalParamExtractor())
    student = ProbabilisticActor(
        TensorDictSequential(memory, TensorDictModule(head, ["features"], ["loc", "scale"])),
        ["loc", "scale"],
        distribution_class=IndependentNormal,
    )
    env = PendulumEnv(NUM_ENVS, seed=0, max_episode_steps=5, hide_velocity=True, show_teacher=True)
    policy = StudentTeacher.for_env(env, student, _actor("gru", 3))
    buffer = RolloutBuffer(NUM_STEPS, NUM_ENVS)
    trainer = DistillationTrainer(
        RolloutCollector(env, policy, replay_buffer=buffer),
        policy,
        total_frames=30 * NUM_STEPS * NUM_ENVS,
        config=DistillationConfig(gradient_length=3, learning_rate=1e-2),
        progress_bar=False,
    )
    errors, entered = [], []
    trainer.register_op("pre_optim_steps", lambda: entered.append(next(iter(buffer))["h"][0].abs().sum()))
    trainer.register_op("post_steps", lambda: errors.append(trainer.metrics["Loss/behavior"]))
    trainer.train()
    assert sum(errors[-5:]) < sum(errors[:5])
    assert entered[0] == 0 and min(entered[1:]) > 0


@pytest.mark.parametrize(("length", "epochs", "steps"), [(3, 1, 3), (7, 2, 2), (15, 1, 1), (1, 1, 7)])
def test_an_iteration_takes_a_step_for_every_stretch_of_every_epoch(length, epochs, steps):
    trainer = make_trainer(gradient_length=length, num_learning_epochs=epochs, num_iterations=2)
    trainer.train()
    assert trainer.stepper.optimizer._steps == 2 * steps


def test_an_iteration_is_the_sampler_the_loss_and_the_stepper():
    trainer = make_trainer("gru", num_iterations=1, num_learning_epochs=2, max_grad_norm=0.5)
    other = make_trainer("gru", num_iterations=1)
    trainer.train()

    torch.manual_seed(0)
    buffer, student = other.buffer, other.policy.student
    other.collector.rollout()
    buffer.set_sampler(TimeStepSampler(2, length=3))
    loss, stepper = DistillationLoss(student), DistillationStepper(student, max_grad_norm=0.5)
    losses = [stepper.update(loss, rows) for rows in buffer]
    student.update_normalizer(buffer.window)
    assert equal(parameters(student), parameters(trainer.policy.student))
    # The mean over all rows, though the last stretch of a pass is shorter.
    assert trainer.metrics["Loss/behavior"] == pytest.approx(float(sum(losses)) / 14, rel=1e-5)


def test_the_metrics_have_rsl_rls_names():
    trainer = make_trainer(num_iterations=3)
    trainer.train()
    assert set(trainer.metrics) == {
        *("Loss/behavior", "Loss/learning_rate", "Train/mean_step_reward", "Policy/mean_std"),
        *("Train/mean_reward", "Train/mean_episode_length"),
        *("Perf/collection_time", "Perf/learning_time", "Perf/total_fps"),
    }
    assert trainer.metrics["Policy/mean_std"] == 1.0, "nothing teaches the student how much to explore"
    assert -20 < trainer.metrics["Train/mean_step_reward"] < 0


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, [0.0, 0.0, 0.0, 0.0]),
        ({"acting": "teacher"}, [1.0, 1.0, 1.0, 1.0]),
        ({"acting": "dagger", "teacher_anneal": 0.5}, [1.0, 0.5, 0.0, 0.0]),
        ({"acting": "dagger", "teacher_anneal": 1.0}, [1.0, 0.75, 0.5, 0.25]),
    ],
    ids=str,
)
def test_who_acts_changes_over_the_training_as_asked(config, expected):
    trainer = make_trainer(**config)
    shares, actions = [], []
    trainer.register_op("pre_optim_steps", lambda: shares.append(trainer.policy.teacher_share))
    trainer.register_op("pre_optim_steps", lambda: actions.append(_executed(trainer)))
    trainer.train()
    assert shares == expected
    for share, executed in zip(shares, actions, strict=True):
        assert (executed == share) if share in (0.0, 1.0) else (0.0 < executed < 1.0)


def _executed(trainer: DistillationTrainer) -> float:
    window = trainer.buffer.window
    return float((window["action"] == window["teacher_action"]).float().mean())


@pytest.mark.parametrize(("student", "teacher"), [("lstm", "mlp"), ("gru", "lstm"), ("mlp", "gru")])
@pytest.mark.parametrize("acting", ["student", "dagger"])
def test_a_resumed_training_makes_the_numbers_of_one_that_never_stopped(tmp_path, student, teacher, acting):
    whole = make_trainer(student, teacher, checkpoint_dir=tmp_path, acting=acting)
    whole.train()
    checkpoints = sorted(tmp_path.iterdir())
    assert len(checkpoints) == 4
    for checkpoint in checkpoints[:3]:
        resumed = make_trainer(student, teacher, seed=7, acting=acting)
        resumed.policy.teacher.mlp[0].weight.data.zero_()  # a checkpoint holds the teacher, too
        resumed.load_checkpoint(checkpoint)
        resumed.train()
        assert resumed.num_iterations == 4
        assert equal(parameters(resumed.policy), parameters(whole.policy))
        timeless = [{k: v for k, v in t.metrics.items() if "Perf" not in k} for t in (whole, resumed)]
        assert timeless[0] == timeless[1]


def test_a_checkpoint_of_another_student_is_refused(tmp_path):
    trainer = make_trainer("gru", num_iterations=1, checkpoint_dir=tmp_path)
    trainer.train()
    with pytest.raises(CheckpointError, match="component 'actor'"):
        make_trainer("lstm").load_checkpoint(trainer.latest_checkpoint)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"gradient_length": 0}, "`gradient_length` must be at least 1, got 0"),
        ({"num_learning_epochs": 0}, "`num_learning_epochs` must be at least 1, got 0"),
        ({"learning_rate": 0.0}, r"`learning_rate` must be positive, got 0\.0"),
        ({"max_grad_norm": -1.0}, r"`max_grad_norm` must be positive, got -1\.0"),
        ({"loss_type": "mae"}, r"`loss_type` must be one of \('mse', 'huber'\), got 'mae'"),
        ({"acting": "nobody"}, r"`acting` must be one of \('student', 'teacher', 'dagger'\), got 'nobody'"),
        ({"teacher_anneal": 0.0}, r"`teacher_anneal` must be above 0 and at most 1, got 0\.0"),
    ],
    ids=str,
)
def test_what_cannot_be_trained_with_is_named(config, message):
    with pytest.raises(ValueError, match=message):
        make_trainer(**config)


def test_a_policy_without_a_teacher_is_refused():
    env = PendulumEnv(NUM_ENVS, seed=0)
    student = MLPActor.for_env(env, hidden_dims=(8,))
    collector = RolloutCollector(env, student, replay_buffer=RolloutBuffer(NUM_STEPS, NUM_ENVS))
    with pytest.raises(TypeError, match=r"collects with StudentTeacher\(student, teacher\), got a MLPActor"):
        DistillationTrainer(collector, student, total_frames=10)
    policy = StudentTeacher(student, MLPActor.for_env(env, hidden_dims=(8,)))
    elsewhere = StudentTeacher(MLPActor.for_env(env, hidden_dims=(8,)), policy.teacher)
    with pytest.raises(ValueError, match="The student is not the one that collects"):
        acting = RolloutCollector(env, policy, replay_buffer=RolloutBuffer(NUM_STEPS, NUM_ENVS))
        DistillationTrainer(acting, elsewhere, total_frames=10)
    collector.rollout()
    with pytest.raises(KeyError, match="DistillationLoss needs 'teacher_action'"):
        DistillationLoss(student)(collector.replay_buffer.window)


@pytest.mark.parametrize("max_grad_norm", [None, 1.0])
@pytest.mark.parametrize("broken", ["teacher", "std"])
def test_a_student_that_learns_from_numbers_that_are_none_stops(broken, max_grad_norm) -> None:
    trainer = make_trainer("mlp", "mlp", max_grad_norm=max_grad_norm)
    policy = trainer.policy
    weight = policy.teacher.mlp[0].weight if broken == "teacher" else policy.student.std_param
    weight.data.fill_(torch.nan)
    with pytest.raises(ValueError, match="loss is nan in iteration 1"):
        trainer.train()
