"""RSL-RL's distillation on random worlds, and the same rollouts as this package stores them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from rsl_rl.algorithms import Distillation
from rsl_rl.models import MLPModel, RNNModel
from rsl_rl.storage import RolloutStorage
from tensordict import TensorDict
from torch import Tensor

from torchrl_rslstorage import MLPActor, RNNActor

WIDTHS = {"observation": 5, "privileged": 3}
ACTIONS, HIDDEN = 2, 12


@dataclass
class Problem:
    """What RSL-RL and this package are both given."""

    student: str = "mlp"
    num_steps: int = 12
    num_envs: int = 7
    num_layers: int = 1
    normalize: bool = False
    p_done: float = 0.2

    def observe(self) -> TensorDict:
        """Observations of one step, from torch's global generator."""
        shape = {name: (self.num_envs, width) for name, width in WIDTHS.items()}
        return TensorDict({name: 2 * torch.randn(size) + 1 for name, size in shape.items()}, [self.num_envs])


def rsl_rl_distillation(problem: Problem, **options: Any) -> Distillation:
    """RSL-RL's distillation on its own models, as its runner builds it; the teacher sees everything."""
    observations = problem.observe()
    groups = {"student": ["observation"], "teacher": list(WIDTHS)}
    gaussian = {"class_name": "GaussianDistribution", "init_std": 0.3, "std_type": "scalar"}
    network: dict[str, Any] = {"hidden_dims": [16], "obs_normalization": problem.normalize}
    teacher = MLPModel(observations, groups, "teacher", ACTIONS, distribution_cfg=dict(gaussian), **network)
    student_class = MLPModel
    if problem.student != "mlp":
        student_class = RNNModel
        network |= {
            "rnn_type": problem.student,
            "rnn_hidden_dim": HIDDEN,
            "rnn_num_layers": problem.num_layers,
        }
    student = student_class(observations, groups, "student", ACTIONS, distribution_cfg=gaussian, **network)
    storage = RolloutStorage(
        "distillation", problem.num_envs, problem.num_steps, observations, [ACTIONS], "cpu"
    )
    return Distillation(student, teacher, storage, **options)


def tensors_of(module: Any) -> list[Tensor]:
    """Parameters and statistics of a student of either side, in one order."""
    rnn = getattr(getattr(module, "core", None) or getattr(module, "rnn", None), "rnn", None)
    out = [*([] if rnn is None else rnn.parameters()), *module.mlp.parameters()]
    normalizer = getattr(module, "normalizer", None) or getattr(module, "obs_normalizer", None)
    out += [] if normalizer is None else list(normalizer.buffers())
    return [x.detach() for x in (*out, *(p for name, p in module.named_parameters() if "std_param" in name))]


def copy_of(student: Any, problem: Problem) -> MLPActor | RNNActor:
    """This package's student with RSL-RL's weights and normaliser."""
    options: dict[str, Any] = {"hidden_dims": (16,), "normalize_observations": problem.normalize}
    if problem.student == "mlp":
        made = MLPActor(["observation"], WIDTHS["observation"], ACTIONS, **options)
    else:
        shape = {"rnn_type": problem.student, "rnn_hidden_dim": HIDDEN, "rnn_num_layers": problem.num_layers}
        made = RNNActor(["observation"], WIDTHS["observation"], ACTIONS, **shape, **options)
    for to, source in zip(tensors_of(made), tensors_of(student), strict=True):
        to.copy_(source.view_as(to))
    return made


def _states(model: Any, problem: Problem) -> dict[str, Tensor]:
    state = model.get_hidden_state()
    count = {"mlp": 0, "gru": 1, "lstm": 2}[problem.student]
    if state is None:
        state = tuple(torch.zeros(problem.num_layers, problem.num_envs, HIDDEN) for _ in range(count))
    state = state if isinstance(state, tuple) else (state,)
    return {name: s.detach().transpose(0, 1).clone() for name, s in zip("hc", state, strict=False)}


@torch.no_grad()
def rsl_rl_rollout(alg: Distillation, problem: Problem) -> TensorDict:
    """One window that RSL-RL collects, and the same ``[T, N]`` with the student's states before each step."""
    observations, rows = problem.observe(), []
    for _ in range(problem.num_steps):
        row = observations.clone()
        if problem.student != "mlp":
            row["actor_state"] = _states(alg.student, problem)
        alg.act(observations)
        row["action"] = alg.transition.actions.clone()
        row["teacher_action"] = alg.transition.privileged_actions.clone()
        if problem.student != "mlp":
            row["next", "actor_state"] = _states(alg.student, problem)
        done = torch.rand(problem.num_envs) < problem.p_done
        observations = problem.observe()
        alg.process_env_step(observations, torch.randn(problem.num_envs), done, {})
        row["next", "reward"] = torch.zeros(problem.num_envs, 1)
        row["next", "done"] = done.unsqueeze(-1)
        rows.append(row)
    return torch.stack(rows)
