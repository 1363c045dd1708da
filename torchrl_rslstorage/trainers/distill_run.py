"""What a distillation run is built of: the teacher out of its own run, the student, the trainer."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torchrl.checkpoint import CheckpointError
from torchrl.envs import EnvBase

from torchrl_rslstorage.collectors import RolloutCollector
from torchrl_rslstorage.data import RolloutBuffer
from torchrl_rslstorage.modules import GaussianActor, StudentTeacher
from torchrl_rslstorage.trainers.building import actor_of, environment_of, find_checkpoint, seed_everything
from torchrl_rslstorage.trainers.checkpoints import latest_checkpoint, load_checkpoint
from torchrl_rslstorage.trainers.distill_options import TEACHER_CONFIG, DistillOptions, options_of
from torchrl_rslstorage.trainers.distillation_trainer import DistillationTrainer
from torchrl_rslstorage.trainers.distributed import Ranks
from torchrl_rslstorage.trainers.run_folder import RunFolder


def load_teacher(path: str | Path, *, device: torch.device | str = "cpu") -> GaussianActor:
    """The policy that a run has learned, frozen, in eval mode, with its normaliser.

    Args:
        path: a run's folder (its newest checkpoint), or one of its checkpoints.
        device: where it shall teach.

    Raises:
        RunFolderError: there is no run or no checkpoint at ``path``.
        CheckpointError: the checkpoint is broken, or holds no actor.

    Examples:
        >>> import tempfile
        >>> from torchrl_rslstorage import load_teacher
        >>> load_teacher(tempfile.mkdtemp() + "/run")
        Traceback (most recent call last):
        torchrl_rslstorage.trainers.run_folder.RunFolderError: ...
    """
    folder, checkpoint = find_checkpoint(Path(path))
    teacher = _teacher_network(folder.config, folder.path, device)
    _load_weights(teacher, checkpoint)
    return teacher


def build_distillation(
    folder: RunFolder, options: DistillOptions, env: EnvBase, config: Mapping[str, Any], ranks: Ranks
) -> DistillationTrainer:
    """The trainer of a distillation run.

    The teacher's weights are read from its own run; where this run has checkpoints, they hold them, and the
    teacher's run may be gone.

    Args:
        folder: of this run.
        options: of this run.
        env: the student's.
        config: of this run, with that of the teacher's.
        ranks: processes that learn together.
    """
    assert options.num_envs and options.num_steps_per_env and options.max_iterations
    teacher = _teacher_network(config[TEACHER_CONFIG], options.teacher, options.device)
    if latest_checkpoint(folder.checkpoints) is None:
        _load_weights(teacher, find_checkpoint(options.teacher)[1])
    seed_everything(options)
    student = actor_of(options, env)
    policy = StudentTeacher.for_env(env, student, teacher)
    buffer = RolloutBuffer(options.num_steps_per_env, options.num_envs, device=options.device)
    return DistillationTrainer(
        RolloutCollector(env, policy, replay_buffer=buffer),
        policy,
        total_frames=options.num_envs * options.num_steps_per_env * options.max_iterations,
        config=options.distillation,
        checkpoint_dir=folder.checkpoints,
        save_interval=options.save_interval,
        progress_bar=options.progress_bar and sys.stderr.isatty(),
        ranks=ranks,
    )


def _teacher_network(config: Mapping[str, Any], run_dir: Path, device: torch.device | str) -> GaussianActor:
    """The network of a run's actor, its sizes read off the run's own task."""
    options = dataclasses.replace(options_of(config, run_dir), num_envs=1, device=str(device))
    with environment_of(options, train=False) as env:
        return actor_of(options, env).requires_grad_(False).eval()


def _load_weights(teacher: GaussianActor, checkpoint: Path) -> None:
    if not any(checkpoint.glob("components/*-actor")) and checkpoint.is_dir():
        raise CheckpointError(
            f"{checkpoint} holds no actor: a teacher comes from a checkpoint of rslstorage train or distill."
        )
    load_checkpoint(checkpoint, {"actor": teacher})
