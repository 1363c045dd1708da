"""The loss of distillation: every row is learned from, and no gradient crosses the end of an episode."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles_objectives import in_buffer
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModule, TensorDictSequential
from tensordict.nn.distributions import NormalParamExtractor
from torch import Tensor, nn
from torchrl.envs import ExplorationType, set_exploration_type
from torchrl.modules import GRUModule, IndependentNormal, LSTMModule, ProbabilisticActor, TanhNormal

from torchrl_rslstorage import (
    DistillationLoss,
    DistillationStepper,
    MLPActor,
    RNNActor,
    RolloutBuffer,
    TimeStepSampler,
)
from torchrl_rslstorage.objectives import unroll

OURS = ["mlp", "gru", "lstm"]
TORCHRL = ["torchrl mlp", "torchrl lstm", "torchrl gru", "torchrl tanh"]


def torchrl_student(kind: str) -> Any:
    """TorchRL's own actor, with its recurrent modules in front of it or not."""
    torch.manual_seed(0)
    distribution = TanhNormal if kind == "tanh" else IndependentNormal
    key, before = "observation", []
    if kind in ("lstm", "gru"):
        states = ["h", "c"] if kind == "lstm" else ["h"]
        made = LSTMModule if kind == "lstm" else GRUModule
        key = "features"
        before = [
            made(
                input_size=3, hidden_size=6, in_keys=["observation", *states],
                out_keys=[key, *(("next", s) for s in states)],
            )
        ]  # fmt: skip
    head = nn.Sequential(nn.Linear(6 if before else 3, 4), NormalParamExtractor())
    actor = TensorDictSequential(*before, TensorDictModule(head, [key], ["loc", "scale"]))
    return ProbabilisticActor(
        actor, ["loc", "scale"], distribution_class=distribution, return_log_prob=True
    ).double()


def student_of(kind: str, layers: int = 1) -> Any:
    torch.manual_seed(0)
    if kind.startswith("torchrl"):
        return torchrl_student(kind.removeprefix("torchrl "))
    if kind == "mlp":
        return MLPActor(["observation"], 3, 2, hidden_dims=(8,)).double()
    return RNNActor(
        ["observation"], 3, 2, rnn_type=kind, rnn_hidden_dim=6, rnn_num_layers=layers, hidden_dims=(8,)
    ).double()


def state_keys(student: Any) -> list[Any]:
    return DistillationLoss(student).state_keys


def window(
    student: Any, num_steps: int = 4, num_envs: int = 3, ends: tuple[tuple[int, int], ...] = (), seed: int = 0
) -> TensorDict:
    """A rollout ``[T, N]`` with random states at its start, as a collector leaves it."""
    rng = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=rng, dtype=torch.float64)

    done = torch.zeros(num_steps, num_envs, 1, dtype=torch.bool)
    for t, n in ends:
        done[t, n] = True
    td = TensorDict(
        {"observation": normal(num_steps, num_envs, 3), "teacher_action": normal(num_steps, num_envs, 2)},
        [num_steps, num_envs],
    )
    layers = getattr(getattr(student, "core", None), "_shape", (1, 6))[0]
    for key in state_keys(student):
        td[key] = 0.5 * normal(num_steps, num_envs, layers, 6)
    td["is_init"] = torch.cat([torch.zeros_like(done[:1]), done[:-1]])
    td["next", "reward"], td["next", "done"] = torch.zeros(num_steps, num_envs, 1), done
    return td


def buffer_of(student: Any, rollout: TensorDict, **sampler: Any) -> RolloutBuffer:
    made = TimeStepSampler(state_keys=state_keys(student), **sampler)
    return in_buffer(rollout, sampler=made)


# -- one step at a time, by hand ---------------------------------------------------------------------


def means_by_hand(student: Any, rollout: TensorDictBase) -> list[Tensor]:
    """Mean actions ``[N, A]`` of each row: the student acts row by row, as it does in an environment."""
    keys, states, out = state_keys(student), {}, []
    for t in range(len(rollout)):
        row = TensorDict({"observation": rollout["observation"][t], "is_init": rollout["is_init"][t]}, [3])
        for key in keys:
            state = rollout[key][0] if t == 0 else states[key]
            if t:
                state = torch.where(rollout["next", "done"][t - 1].unsqueeze(-1), 0.0, state)
            row[key] = state
        with set_exploration_type(ExplorationType.DETERMINISTIC):
            student(row)
        path = {key: (key,) if isinstance(key, str) else key for key in keys}
        states = {key: row[("next", *path[key])] for key in keys}
        out.append(row["action"])
    return out


ENDS = ((0, 1), (2, 0), (2, 2))


@pytest.mark.parametrize("kind", OURS + TORCHRL)
@pytest.mark.parametrize("length", [None, 1, 2, 3, 5, 9])
@pytest.mark.parametrize("loss_type", ["mse", "huber"])
def test_the_loss_is_that_of_a_student_that_acts_row_by_row(kind, length, loss_type):
    student = student_of(kind)
    rollout = window(student, num_steps=5, ends=ENDS)
    error = {"mse": nn.functional.mse_loss, "huber": nn.functional.huber_loss}[loss_type]
    by_row = [
        error(mean, target)
        for mean, target in zip(means_by_hand(student, rollout), rollout["teacher_action"], strict=True)
    ]
    loss, seen = DistillationLoss(student, loss_type), 0
    for batch in buffer_of(student, rollout, length=length):
        terms = loss(batch)
        count = 1 if batch.ndim == 1 else len(batch)
        expected = torch.stack(by_row[seen : seen + count])
        assert torch.allclose(terms["loss_behavior"], expected.sum(), atol=1e-12)
        assert torch.allclose(terms["behavior"], expected.mean(), atol=1e-12)
        assert not terms["behavior"].requires_grad
        seen += count
    assert seen == 5


@pytest.mark.parametrize("kind", [*OURS, *TORCHRL])
def test_rows_and_stretches_have_the_same_gradient(kind):
    student = student_of(kind)
    rollout = window(student, num_steps=5, ends=ENDS)
    loss = DistillationLoss(student)

    def gradients(length: int | None) -> list[Tensor]:
        student.zero_grad()
        sum(loss(batch)["loss_behavior"] for batch in buffer_of(student, rollout, length=length)).backward()
        loss.cut()
        return [p.grad.clone() for p in student.parameters() if p.grad is not None]

    whole = gradients(5)
    assert max(float(g.abs().max()) for g in whole) > 1e-3
    for length in (None, 1, 2, 4):
        for a, b in zip(whole, gradients(length), strict=True):
            assert torch.allclose(a, b, atol=1e-12)


# -- every row is learned from -----------------------------------------------------------------------


@pytest.mark.parametrize("kind", OURS)
@pytest.mark.parametrize(("length", "num_steps"), [(3, 2), (15, 1), (4, 1), (1, 4), (2, 2)])
def test_what_is_left_of_a_window_is_a_step_too_and_every_row_moves_the_student(kind, length, num_steps):
    rollout = window(student_of(kind), num_steps=4, ends=((1, 0),))

    def learned(td: TensorDict) -> tuple[list[Tensor], int]:
        student = student_of(kind)
        loss, stepper = DistillationLoss(student), DistillationStepper(student, learning_rate=1e-2)
        count = sum(1 for batch in buffer_of(student, td, length=length) if stepper.update(loss, batch) > 0)
        return [p.detach().clone() for p in student.parameters()], count

    plain, count = learned(rollout)
    assert count == num_steps
    for t, n in itertools.product(range(4), range(3)):
        other = rollout.clone()
        other["teacher_action"][t, n] += 1.0
        moved, _ = learned(other)
        assert any(not torch.equal(a, b) for a, b in zip(plain, moved, strict=True)), (
            f"step {t} of environment {n} reaches no gradient"
        )


# -- where the gradient ends -------------------------------------------------------------------------


def reach(student: Any, rollout: TensorDict, length: int) -> Tensor:
    """Whether the loss of row t has a gradient for what row s showed, by environment: ``[T, T, N]``."""
    num_steps, num_envs = rollout.shape
    out = torch.zeros(num_steps, num_steps, num_envs, dtype=torch.bool)
    # A squared error of zero has no gradient: in all rows but one the teacher wants what the student does.
    rollout["teacher_action"] = torch.stack(means_by_hand(student, rollout)).detach()
    for t in range(num_steps):
        td = rollout.clone()
        td["teacher_action"][t] += 1.0
        td["observation"].requires_grad_()
        loss = DistillationLoss(student)
        for start in range(0, num_steps, length):
            stretch = td[start : start + length]
            error = loss(stretch.exclude(*state_keys(student)) if start else stretch)["loss_behavior"]
            if start <= t < start + length:
                (grad,) = torch.autograd.grad(error, td["observation"])
                out[t] = grad.abs().sum(-1) > 1e-9
            loss.cut()
    return out


@pytest.mark.parametrize("kind", ["gru", "lstm", "torchrl gru", "torchrl lstm"])
def test_no_gradient_crosses_the_end_of_an_episode_or_of_a_stretch(kind):
    student = student_of(kind)
    ends = ((0, 1), (2, 0), (3, 2))
    reached = reach(student, window(student, num_steps=5, ends=ends), length=3)
    for t, s, n in itertools.product(range(5), range(5), range(3)):
        same_stretch = s // 3 == t // 3
        crossed = any(env == n and s <= end < t for end, env in ends)
        assert bool(reached[t, s, n]) == (s <= t and same_stretch and not crossed), (t, s, n)


def test_a_student_without_memory_sees_only_the_row_itself():
    student = student_of("mlp")
    reached = reach(student, window(student, num_steps=4), length=2)
    expected = torch.eye(4, dtype=torch.bool).unsqueeze(-1).expand(4, 4, 3)
    assert torch.equal(reached, expected)


@pytest.mark.parametrize("kind", ["gru", "lstm"])
def test_a_gradient_reaches_back_over_rows_until_it_is_cut(kind):
    student = student_of(kind)
    rollout = window(student, num_steps=2)
    loss = DistillationLoss(student)
    first, second = rollout[0], rollout[1].exclude(*state_keys(student))
    first["observation"].requires_grad_()
    loss(first)
    assert torch.autograd.grad(loss(second)["loss_behavior"], first["observation"])[0].abs().sum() > 0
    loss(first)
    loss.cut()
    with pytest.raises(RuntimeError, match="appears to not have been used in the graph"):
        torch.autograd.grad(loss(second)["loss_behavior"], first["observation"])


@pytest.mark.parametrize("kind", ["gru", "lstm"])
def test_every_epoch_begins_with_the_states_of_the_windows_first_row(kind):
    student = student_of(kind)
    buffer = buffer_of(student, window(student, num_steps=5, ends=ENDS), length=2, num_epochs=3)
    loss = DistillationLoss(student)
    values = [float(loss(batch)["behavior"]) for batch in buffer]
    assert values[:3] == values[3:6] == values[6:]


@settings(max_examples=15)
@given(
    kind=st.sampled_from(["gru", "lstm"]),
    num_steps=st.integers(1, 6),
    length=st.integers(1, 7),
    seed=st.integers(0, 99),
    data=st.data(),
)
def test_whatever_ends_where_it_is_the_row_by_row_loss(kind, num_steps, length, seed, data):
    cells = st.tuples(st.integers(0, num_steps - 1), st.integers(0, 2))
    student = student_of(kind, layers=2)
    rollout = window(student, num_steps, ends=tuple(data.draw(st.sets(cells))), seed=seed)
    expected = sum(
        (mean - target).square().mean()
        for mean, target in zip(means_by_hand(student, rollout), rollout["teacher_action"], strict=True)
    )
    loss = DistillationLoss(student)
    total = sum(loss(batch)["loss_behavior"] for batch in buffer_of(student, rollout, length=length))
    assert torch.allclose(total, expected, atol=1e-12)


@pytest.mark.parametrize("kind", OURS + TORCHRL)
@pytest.mark.parametrize("cells", [1, 2, 6, 7, 9, 15, 16])
def test_few_rows_at_once_and_many_are_the_same_step(kind, cells, monkeypatch):
    rollout = window(student_of(kind), num_steps=5, ends=ENDS)

    def stepped(at_once: int) -> tuple[Tensor, list[Tensor]]:
        monkeypatch.setattr(unroll, "_CELLS_AT_ONCE", at_once)
        monkeypatch.setattr(unroll, "_ENVS_AT_ONCE", at_once)
        student = student_of(kind)
        objective, stepper = DistillationLoss(student), DistillationStepper(student, max_grad_norm=0.1)
        loss = stepper.update(objective, rollout[:3])
        loss = loss + stepper.update(objective, rollout[3:].exclude(*state_keys(student)))
        return loss, [p.detach().clone() for p in student.parameters()]

    (loss, moved), (whole, expected) = stepped(cells), stepped(10_000)
    assert torch.allclose(loss, whole, atol=1e-12)
    for a, b in zip(moved, expected, strict=True):
        assert torch.allclose(a, b, atol=1e-9)


def test_it_writes_nothing_into_what_it_reads():
    for kind in OURS + TORCHRL:
        student = student_of(kind)
        rollout = window(student, ends=ENDS)
        before = rollout.clone()
        DistillationLoss(student)(rollout)
        assert set(rollout.keys(True, True)) == set(before.keys(True, True))
        assert (rollout == before).all()


def test_keys_have_other_names_where_they_are_set():
    student = student_of("lstm")
    rollout = window(student, ends=ENDS)
    expected = DistillationLoss(student)(rollout)["loss_behavior"]
    rollout["expert"] = rollout.pop("teacher_action")
    rollout["next", "end"] = rollout["next"].pop("done")
    loss = DistillationLoss(student)
    loss.set_keys(teacher_action="expert", done="end")
    assert {"expert", ("next", "end"), "observation"} <= set(loss.in_keys)
    assert torch.equal(loss(rollout)["loss_behavior"], expected)


# -- what does not fit -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "change", "error", "message"),
    [
        ("mlp", lambda td: td.exclude("teacher_action"), KeyError, "collect with StudentTeacher"),
        ("mlp", lambda td: td.exclude("observation"), KeyError, "reads 'observation', which is not there"),
        ("torchrl lstm", lambda td: td.exclude("observation"), KeyError, "reads 'observation', which is not"),
        (
            "mlp",
            lambda td: td.set("teacher_action", td["teacher_action"][..., :1]),
            ValueError,
            r"'teacher_action' has shape \(4, 3, 1\) but the student's actions have \(4, 3, 2\)",
        ),
        (
            "mlp",
            lambda td: td.set("teacher_action", td["teacher_action"].clone().requires_grad_()),
            ValueError,
            "requires grad: collect under no_grad",
        ),
        ("mlp", lambda td: td[:0], ValueError, r"batch size \(0, 3\): give the buffer a TimeStepSampler"),
        ("mlp", lambda td: td.unsqueeze(0), ValueError, r"batch size \(1, 4, 3\)"),
        ("gru", lambda td: td.exclude(("next", "done")), KeyError, "TimeStepSampler hands it out"),
        (
            "lstm",
            lambda td: td.exclude("actor_state"),
            RuntimeError,
            r"no pass was begun: .* lacks \('actor_state', 'h'\), \('actor_state', 'c'\)",
        ),
        (
            "lstm",
            lambda td: td.exclude(("actor_state", "c")),
            RuntimeError,
            r"lacks \('actor_state', 'c'\)\.",
        ),
    ],
)
def test_mini_batches_that_lack_something_are_named(kind, change, error, message):
    student = student_of(kind)
    with pytest.raises(error, match=message):
        DistillationLoss(student)(change(window(student)))


def test_a_pass_cannot_go_on_with_other_environments():
    student = student_of("gru")
    loss = DistillationLoss(student)
    loss(window(student))
    with pytest.raises(RuntimeError, match="go on with 3 environments, but this mini-batch has 2"):
        loss(window(student, num_envs=2).exclude("actor_state"))


def test_an_unknown_loss_type_is_named():
    with pytest.raises(ValueError, match=r"`loss_type` must be one of \('mse', 'huber'\), got 'mae'"):
        DistillationLoss(student_of("mlp"), "mae")


def test_an_action_under_another_name_is_asked_for():
    student = torchrl_student("mlp")
    loss = DistillationLoss(student)
    loss.set_keys(action="torque")
    with pytest.raises(KeyError, match="writes no 'torque'"):
        loss(window(student))


@pytest.mark.parametrize("options", [{"learning_rate": 0.0}, {"max_grad_norm": -1.0}])
def test_a_step_that_cannot_be_taken_is_named(options):
    (name,) = options
    with pytest.raises(ValueError, match=f"`{name}` must be positive, got"):
        DistillationStepper(student_of("mlp"), **options)
