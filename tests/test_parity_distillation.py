"""Whole updates from the same weights and data end in the weights of rsl-rl-lib's ``Distillation.update``."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from oracles_distillation import Problem, copy_of, rsl_rl_distillation, rsl_rl_rollout, tensors_of
from oracles_objectives import default_dtype

from torchrl_rslstorage import DistillationLoss, DistillationStepper, RolloutBuffer, TimeStepSampler

PROBLEMS = {
    "MLP": Problem("mlp"),
    "GRU": Problem("gru"),
    "LSTM": Problem("lstm"),
    "LSTM, two layers": Problem("lstm", num_layers=2),
    "GRU, normalised": Problem("gru", normalize=True),
    "MLP, normalised": Problem("mlp", normalize=True),
    "LSTM, no episode ends": Problem("lstm", p_done=0.0),
    "GRU, most episodes end": Problem("gru", p_done=0.7),
}
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-9}


def largest_differences(
    problem: Problem, seed: int, dtype: torch.dtype, length: int = 4, updates: int = 2, **options: Any
) -> tuple[list[float], float, list[tuple[float, float]]]:
    """Two updates by RSL-RL and by this package: differences after each, how far it moved, mean losses."""
    with default_dtype(dtype):
        torch.manual_seed(seed)
        alg = rsl_rl_distillation(problem, gradient_length=length, **options)
        if problem.normalize:
            earlier = torch.cat([problem.observe() for _ in range(4)])
            alg.student.update_normalization(earlier)
            alg.teacher.update_normalization(earlier)
        student = copy_of(alg.student, problem)
        before = [x.clone() for x in tensors_of(student)]
        loss = DistillationLoss(student, alg_loss(options))
        stepper = DistillationStepper(
            student,
            learning_rate=options.get("learning_rate", 1e-3),
            max_grad_norm=options.get("max_grad_norm"),
        )
        epochs = options.get("num_learning_epochs", 1)
        sampler = TimeStepSampler(epochs, length=length)
        states = [] if problem.student == "mlp" else ["actor_state"]
        buffer = RolloutBuffer(problem.num_steps, problem.num_envs, sampler=sampler, state_keys=states)
        differences, losses = [], []
        for _ in range(updates):
            buffer.empty()
            buffer.extend(rsl_rl_rollout(alg, problem), time_dim=0)
            theirs = alg.update()["behavior"]
            ours = torch.stack([stepper.update(loss, batch) for batch in buffer]).sum()
            student.update_normalizer(buffer.window)
            losses.append((float(ours) / (epochs * problem.num_steps), theirs))
            differences.append(
                max(
                    float((a - b.view_as(a)).abs().max())
                    for a, b in zip(tensors_of(student), tensors_of(alg.student), strict=True)
                )
            )
        moved = max(float((a - b).abs().max()) for a, b in zip(before, tensors_of(student), strict=True))
        return differences, moved, losses


def alg_loss(options: dict[str, Any]) -> Any:
    return options.get("loss_type", "mse")


@pytest.mark.parametrize("problem", PROBLEMS.values(), ids=PROBLEMS.keys())
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
@pytest.mark.parametrize("seed", range(2))
def test_two_updates_end_in_rsl_rls_parameters(problem, dtype, seed):
    differences, moved, losses = largest_differences(problem, seed, dtype)
    assert max(differences) < TOLERANCE[dtype]
    assert moved > 1e-3, "an update that changes nothing proves nothing"
    for ours, theirs in losses:
        assert ours == pytest.approx(theirs, rel=1e-5)


@pytest.mark.parametrize("student", ["mlp", "gru", "lstm"])
@pytest.mark.parametrize(
    "options",
    [
        {"loss_type": "huber"},
        {"max_grad_norm": 0.1},
        {"num_learning_epochs": 3, "learning_rate": 3e-3},
        {"length": 1},
        {"length": 12},
        {"length": 6, "loss_type": "huber", "max_grad_norm": 0.5, "num_learning_epochs": 2},
    ],
    ids=str,
)
def test_every_switch_of_rsl_rls_has_its_counterpart(student, options):
    differences, moved, losses = largest_differences(Problem(student), 5, torch.float64, **options)
    assert max(differences) < TOLERANCE[torch.float64] and moved > 1e-3
    for ours, theirs in losses:
        assert ours == pytest.approx(theirs, rel=1e-9)


# -- planted faults ----------------------------------------------------------------------------------


def _never_reset(patch):
    original = DistillationLoss._memory
    patch.setattr(DistillationLoss, "_memory", lambda self, td: original(self, td)._replace(resets=()))


def _reset_a_row_late(patch):
    original = DistillationLoss._memory

    def late(self, td):
        memory = original(self, td)
        return memory._replace(starts=memory.starts.roll(1, 0))

    patch.setattr(DistillationLoss, "_memory", late)


def _forget_between_stretches(patch):
    original = DistillationLoss._memory

    def fresh(self, td):
        memory = original(self, td)
        return memory._replace(states=[torch.zeros_like(state) for state in memory.states])

    patch.setattr(DistillationLoss, "_memory", fresh)


def _go_on_from_pass_to_pass(patch):
    original = TimeStepSampler.mini_batch

    def without_states(self, storage, position):
        batch = original(self, storage, position)
        return batch if position == 0 else batch.exclude("actor_state")

    patch.setattr(TimeStepSampler, "mini_batch", without_states)


def _mean_over_rows(patch):
    original = DistillationLoss._error

    def error(self, td, target, memory):
        mean, states = original(self, td, target, memory)
        return mean / len(target), states

    patch.setattr(DistillationLoss, "_error", error)


def _rows_backwards(patch):
    original = TimeStepSampler.mini_batch

    def backwards(self, storage, position):
        return original(self, storage, self.num_batches - 1 - position)

    patch.setattr(TimeStepSampler, "mini_batch", backwards)


@pytest.mark.parametrize(
    "plant",
    [
        _never_reset,
        _reset_a_row_late,
        _forget_between_stretches,
        _go_on_from_pass_to_pass,
        _mean_over_rows,
    ],
)
def test_parity_notices_a_planted_fault(plant, monkeypatch):
    plant(monkeypatch)
    options = {"num_learning_epochs": 2, "max_grad_norm": 1.0}
    differences, _, _ = largest_differences(Problem("gru"), 0, torch.float64, **options)
    assert max(differences) > 1e-5


def test_parity_notices_rows_out_of_order(monkeypatch):
    _rows_backwards(monkeypatch)
    differences, _, _ = largest_differences(Problem("mlp"), 0, torch.float64)
    assert max(differences) > 1e-5
