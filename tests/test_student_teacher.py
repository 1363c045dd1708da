"""Collecting for distillation: the student acts, the teacher is asked, and neither disturbs the other."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from test_distillation_loss import torchrl_student
from tiny import equal, parameters
from torch import nn
from torchrl.collectors import Collector
from torchrl.envs import Compose, ExplorationType, InitTracker, TransformedEnv, set_exploration_type

from torchrl_rslstorage import (
    MLPActor,
    PendulumEnv,
    RNNActor,
    RolloutBuffer,
    RolloutCollector,
    StudentTeacher,
)

NUM_STEPS, NUM_ENVS = 9, 4


def env_of(**options: Any) -> PendulumEnv:
    return PendulumEnv(
        NUM_ENVS, seed=0, max_episode_steps=5, hide_velocity=True, show_teacher=True, **options
    )


def actor_of(kind: str, width: int, seed: int = 0, **options: Any) -> MLPActor | RNNActor:
    torch.manual_seed(seed)
    if kind == "mlp":
        return MLPActor(["observation"], width, 1, hidden_dims=(8,), **options)
    shape = {"rnn_type": kind, "rnn_hidden_dim": 6, "hidden_dims": (8,), **options}
    return RNNActor(["observation"], width, 1, **shape)


def policy_of(student: str = "lstm", teacher: str = "mlp", **options: Any) -> StudentTeacher:
    made = actor_of(student, 2, normalize_observations=True), actor_of(teacher, 3, seed=1, **options)
    return StudentTeacher.for_env(env_of(), *made)


def collected(policy: StudentTeacher, windows: int = 1, env: PendulumEnv | None = None) -> RolloutBuffer:
    buffer = RolloutBuffer(NUM_STEPS, NUM_ENVS)
    collector = RolloutCollector(env or env_of(), policy, replay_buffer=buffer)
    torch.manual_seed(5)
    for _ in range(windows):
        buffer.empty()
        collector.rollout()
    return buffer


def replayed(actor: Any, observation: torch.Tensor, is_init: torch.Tensor) -> torch.Tensor:
    """What an actor does by its mean, row by row, with states of its own from the first row on."""
    states: dict[Any, torch.Tensor] = {}
    out = []
    for t in range(len(observation)):
        row = TensorDict({"observation": observation[t], "is_init": is_init[t]}, [NUM_ENVS])
        row.update(TensorDict(states, [NUM_ENVS]))
        with torch.no_grad(), set_exploration_type(ExplorationType.DETERMINISTIC):
            actor(row)
        out.append(row["action"])
        after = row.get("next", None)
        states = {} if after is None else {"actor_state": after["actor_state"].clone()}
    return torch.stack(out)


@pytest.mark.parametrize("teacher", ["mlp", "gru", "lstm"])
@pytest.mark.parametrize("student", ["mlp", "gru", "lstm"])
def test_the_window_holds_what_both_did_on_their_own_observations_and_states(student, teacher):
    policy = policy_of(student, teacher)
    window = collected(policy).window
    assert window["next", "done"][:-1].any(), "resets in the middle of the window are the point"
    assert window["is_init"][0].all()
    wanted = replayed(policy.teacher, window["teacher_observation"], window["is_init"])
    assert torch.equal(window["teacher_action"], wanted)
    meant = replayed(policy.student, window["observation"], window["is_init"])
    noise = window["action"] - meant
    assert 0.5 < noise.std() < 1.5, "the student acts by sampling, with a standard deviation of 1"
    assert window["observation"].shape[-1] == 2


@pytest.mark.parametrize("teacher", ["gru", "lstm"])
def test_the_teachers_states_go_on_from_window_to_window(teacher):
    """RSL-RL's recurrent teacher starts every window from zeros: its states are set back after an update."""
    policy = policy_of("gru", teacher)
    env = env_of()
    buffer = RolloutBuffer(NUM_STEPS, NUM_ENVS)
    collector = RolloutCollector(env, policy, replay_buffer=buffer)
    shown, flags, wanted = [], [], []
    for _ in range(3):
        collector.rollout()
        window = buffer.window
        shown.append(window["teacher_observation"].clone())
        flags.append(window["is_init"].clone())
        wanted.append(window["teacher_action"].clone())
        buffer.empty()
    alone = replayed(policy.teacher, torch.cat(shown), torch.cat(flags))
    assert torch.equal(torch.cat(wanted), alone)


def test_states_are_kept_where_trajectories_start():
    policy = policy_of("lstm", "gru")
    assert policy.state_keys == [
        ("actor_state", "h"), ("actor_state", "c"), ("teacher_state", "actor_state", "h"),
    ]  # fmt: skip
    buffer = RolloutBuffer(NUM_STEPS, NUM_ENVS, state_keys=policy.state_keys)
    RolloutCollector(env_of(), policy, replay_buffer=buffer).rollout()
    assert set(buffer.storage.state_keys) == set(policy.state_keys)
    assert "actor_state" not in buffer.window.keys()


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_the_teacher_acts_as_often_as_it_is_told_to(share):
    policy = policy_of("mlp", "mlp")
    policy.teacher_share = share
    shares = []
    for _ in range(20):
        window = collected(policy).window
        shares.append((window["action"] == window["teacher_action"]).float().mean())
        policy.student.std_param.data.mul_(1.01)  # other numbers each time
    if share in (0.0, 1.0):
        assert {float(x) for x in shares} == {share}
    policy.teacher_share = 0.3
    acts = torch.cat([collected_in_one_step(policy) for _ in range(40)])
    assert 0.2 < acts.float().mean() < 0.4
    assert acts.any() and not acts.all()


def collected_in_one_step(policy: StudentTeacher) -> torch.Tensor:
    td = TensorDict({"observation": torch.randn(50, 2), "teacher_observation": torch.randn(50, 3)}, [50])
    policy(td)
    return td["action"] == td["teacher_action"]


def test_the_teacher_is_frozen_whatever_the_policys_mode_and_its_statistics_stay():
    policy = policy_of("mlp", "mlp", normalize_observations=True)
    assert not any(p.requires_grad for p in policy.teacher.parameters())
    assert any(p.requires_grad for p in policy.student.parameters())
    policy.eval()
    policy.train()
    assert policy.student.training and not policy.teacher.training
    before = parameters(policy.teacher)
    policy.teacher.update_normalizer(TensorDict({"observation": torch.randn(8, 3)}, [8]))
    assert equal(parameters(policy.teacher), before)


def test_two_lstms_of_torchrls_carry_their_states():
    student, teacher = (torchrl_student("lstm").float() for _ in range(2))
    policy = StudentTeacher(student, teacher, teacher_keys={"observation": "seen"})
    assert policy.state_keys == ["h", "c", ("teacher_state", "h"), ("teacher_state", "c")]
    td = TensorDict({"observation": torch.randn(4, 3), "is_init": torch.ones(4, 1, dtype=torch.bool)}, [4])
    td["seen"] = td["observation"].clone()
    policy(td)
    assert td["next", "h"].shape == (4, 1, 6) and td["next", "h"].abs().min() > 0
    assert torch.equal(td["next", "h"], td["next", "teacher_state", "h"])  # the same weights
    assert torch.equal(td["next", "c"], td["next", "teacher_state", "c"])


def test_torchrls_collector_collects_with_it_too():
    policy = policy_of("mlp", "mlp")
    buffer = RolloutBuffer(NUM_STEPS, NUM_ENVS)
    env = TransformedEnv(env_of(), Compose(InitTracker()))
    frames = NUM_STEPS * NUM_ENVS
    for _ in Collector(env, policy, replay_buffer=buffer, frames_per_batch=frames, total_frames=frames,
                       auto_register_policy_transforms=False):  # fmt: skip
        pass
    window = buffer.window
    wanted = replayed(policy.teacher, window["teacher_observation"], window["is_init"])
    assert torch.equal(window["teacher_action"], wanted)


# -- groups ------------------------------------------------------------------------------------------


def test_a_teacher_reads_what_it_was_trained_on_wherever_the_environment_shows_it():
    hidden, whole = env_of(), PendulumEnv(NUM_ENVS)
    names = {"observation": "teacher_observation"}
    student = actor_of("mlp", 2)
    assert student_keys(hidden, student, actor_of("mlp", 3)) == names
    assert student_keys(hidden, student, actor_of("gru", 2)) == {"observation": "observation"}
    assert student_keys(whole, student, actor_of("mlp", 3)) == {"observation": "observation"}


def student_keys(env: PendulumEnv, student: Any, teacher: Any) -> dict[Any, Any]:
    policy = StudentTeacher.for_env(env, student, teacher)
    return {own: key for own, key in policy._teacher.names.items() if own == "observation"}


@pytest.mark.parametrize(
    ("env", "teacher", "message"),
    [
        (
            PendulumEnv(NUM_ENVS, hide_velocity=True),
            actor_of("mlp", 3),
            r"The teacher reads 'observation', 3 numbers in all, but this environment shows 'observation' of "
            r"\(2,\): it must show the teacher",
        ),
        (
            env_of(),
            actor_of("lstm", 5),
            r"5 numbers in all, .* 'observation' of \(2,\), 'teacher_observation' of \(3,\)",
        ),
        (
            env_of(),
            MLPActor(["policy", "privileged"], 4, 1),
            "The teacher reads 'policy', 'privileged', 4 numbers in all, but",
        ),
        (
            env_of(),
            TensorDictModule(nn.Linear(3, 1), ["camera"], ["action"]),
            "The teacher reads 'camera', but this environment shows",
        ),
    ],
)
def test_groups_that_do_not_fit_are_named_in_one_sentence(env, teacher, message):
    with pytest.raises(ValueError, match=message):
        StudentTeacher.for_env(env, actor_of("mlp", 2), teacher)


def test_a_teacher_without_weights_is_refused():
    lazy = TensorDictModule(nn.LazyLinear(1), ["observation"], ["action"])
    with torch.device("meta"):
        meta = MLPActor(["observation"], 3, 1)
    for teacher in (lazy, meta):
        with pytest.raises(ValueError, match=r"has no weights yet: load them before it teaches"):
            StudentTeacher(actor_of("mlp", 2), teacher)


def test_what_is_missing_in_a_step_is_named_with_who_reads_it():
    policy = policy_of("mlp", "mlp")
    with pytest.raises(KeyError, match="The teacher reads 'teacher_observation', which is not there"):
        policy(TensorDict({"observation": torch.zeros(2, 2)}, [2]))
    with pytest.raises(KeyError, match="The student reads 'observation', which is not there"):
        policy(TensorDict({"teacher_observation": torch.zeros(2, 3)}, [2]))


def test_they_must_act_in_the_same_space():
    student, teacher = MLPActor(["observation"], 2, 1), MLPActor(["observation"], 2, 2)
    with pytest.raises(ValueError, match="The student acts with 1 numbers, the teacher with 2"):
        StudentTeacher(student, teacher)
    policy = StudentTeacher(student, TensorDictModule(nn.Linear(2, 2), ["observation"], ["action"]))
    with pytest.raises(ValueError, match=r"student's actions have shape \(3, 1\), the teacher's \(3, 2\)"):
        policy(TensorDict({"observation": torch.zeros(3, 2)}, [3]))
