"""Distillation: one pass over a full window, from weights to new weights, for an MLP and an LSTM student.

Both sides hold the same window with the teacher's actions, start from the same weights and take a step
every 12 rows, a divisor of T: rsl-rl-lib drops the rest otherwise. Ours is every stretch that
`TimeStepSampler` hands out through `DistillationStepper`, and the normaliser; theirs is
``Distillation.update``. Half a percent of the steps end an episode, which at 4096 environments is some in
every row.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any, Literal

import torch
from rsl_rl.algorithms import Distillation
from rsl_rl.models import MLPModel, RNNModel
from rsl_rl.storage import RolloutStorage
from tensordict import TensorDict

from benchmarks.contenders import LEARNING_RATE, keeper, make_rollout, rows_of
from benchmarks.harness import OURS, RSL_RL, Contender, Row, Settings, Shape, measure
from torchrl_rslstorage import (
    DistillationLoss,
    DistillationStepper,
    MLPActor,
    RNNActor,
    RolloutBuffer,
    TimeStepSampler,
)

Student = Literal["mlp", "lstm"]

SUBJECTS = {"mlp": "distillation", "lstm": "distillation_recurrent"}
SHAPES = ("M",)
GRADIENT_LENGTH = 12
HIDDEN, HEAD = 256, (128,)
_ROUNDS = 5


def distillation_rollout(shape: Shape, student: Student, device: torch.device) -> TensorDict:
    """Random steps with the teacher's actions and, of a recurrent student, states of zero."""
    rollout = make_rollout(shape, device).exclude("loc", "scale", "action_log_prob", "state_value")
    rollout["teacher_action"] = rollout["action"].flip(0)
    done = rollout["next", "done"]
    rollout["is_init"] = torch.cat([torch.ones_like(done[:1]), done[:-1]])
    if student == "lstm":
        state = torch.zeros(shape.num_envs, 1, HIDDEN, device=device)
        for part in ("h", "c"):
            rollout["actor_state", part] = state.expand(*rollout.shape, 1, HIDDEN)
            rollout["next", "actor_state", part] = state.expand(*rollout.shape, 1, HIDDEN)
    return rollout


class OurPass:
    """One pass of ours."""

    def __init__(self, shape: Shape, student: Student, rollout: TensorDict) -> None:
        width, device = shape.groups["policy"], rollout.device
        hidden: dict[str, Any] = {"hidden_dims": shape.hidden_dims, "normalize_observations": True}
        made = (
            MLPActor(["policy"], width, shape.num_actions, **hidden)
            if student == "mlp"
            else RNNActor(["policy"], width, shape.num_actions, rnn_hidden_dim=HIDDEN, **hidden)
        )
        self.student = made.to(device)
        self.buffer = RolloutBuffer(
            shape.num_steps,
            shape.num_envs,
            sampler=TimeStepSampler(length=GRADIENT_LENGTH),
            device=device or "cpu",
            state_keys=["actor_state"] if student == "lstm" else [],
        )
        for row in rows_of(rollout):
            self.buffer.add(row)
        self.loss = DistillationLoss(self.student)
        self.stepper = DistillationStepper(self.student, learning_rate=LEARNING_RATE)

    def __call__(self) -> float:
        losses = torch.stack([self.stepper.update(self.loss, rows) for rows in self.buffer])
        self.student.update_normalizer(self.buffer.window)
        return losses.sum().item() / self.buffer.num_steps


class RSLRLPass:
    """One pass of rsl-rl-lib's, from the weights of ours."""

    def __init__(
        self, shape: Shape, student: Student, rollout: TensorDict, ours: MLPActor | RNNActor
    ) -> None:
        observations = rollout[0].select(*shape.groups)
        device = str(observations.device)
        groups = {"student": ["policy"], "teacher": [shape.critic_group]}
        network: dict[str, Any] = {"hidden_dims": list(shape.hidden_dims), "obs_normalization": True}
        teacher = MLPModel(observations, groups, "teacher", shape.num_actions, **network)
        student_class = MLPModel
        if student == "lstm":
            student_class = RNNModel
            network |= {"rnn_type": "lstm", "rnn_hidden_dim": HIDDEN}
        self.student = student_class(observations, groups, "student", shape.num_actions, **network)
        self.student.mlp.load_state_dict(
            dict(zip(self.student.mlp.state_dict(), ours.mlp.state_dict().values(), strict=True))
        )
        if isinstance(ours, RNNActor):
            self.student.rnn.rnn.load_state_dict(ours.core.rnn.state_dict())
        self.storage = RolloutStorage(
            "distillation", shape.num_envs, shape.num_steps, observations, [shape.num_actions], device
        )
        for row in rows_of(rollout):
            transition = RolloutStorage.Transition()
            transition.observations = row.select(*shape.groups)
            transition.actions, transition.privileged_actions = row["action"], row["teacher_action"]
            transition.rewards, transition.dones = row["next", "reward"], row["next", "done"]
            self.storage.add_transition(transition)
        self.alg = Distillation(
            self.student,
            teacher,
            self.storage,
            gradient_length=GRADIENT_LENGTH,
            learning_rate=LEARNING_RATE,
            device=device,
        )

    def __call__(self) -> float:
        # Each pass is one from the start of an episode, as ours.
        self.alg.last_hidden_states = (None, None)
        return self.alg.update()["behavior"]


def contenders(shape: Shape, student: Student, settings: Settings) -> list[Contender]:
    torch.manual_seed(0)
    rollout = distillation_rollout(shape, student, settings.device)
    ours = OurPass(shape, student, rollout)
    theirs = RSLRLPass(shape, student, rollout, ours.student)
    return [
        Contender(OURS, ours, keeper(ours.student)),
        Contender(RSL_RL, theirs, keeper(theirs.student)),
    ]


def run(settings: Settings) -> Iterator[Row]:
    few = dataclasses.replace(settings, rounds=settings.rounds or _ROUNDS)
    for plain in settings.chosen(SHAPES):
        for student, subject in SUBJECTS.items():
            shape = plain if student == "mlp" else dataclasses.replace(plain, hidden_dims=HEAD)
            yield Row(subject, shape, measure(contenders(shape, student, settings), few))


if __name__ == "__main__":
    import sys

    from benchmarks.__main__ import main

    main(["distillation", *sys.argv[1:]])
