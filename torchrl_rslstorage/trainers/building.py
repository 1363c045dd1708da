"""What runs are built of: the task, the networks, the checkpoint that a path means."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torchrl.envs import EnvBase

from torchrl_rslstorage.envs import BatchedEnv, make_env
from torchrl_rslstorage.modules import GaussianActor, MLPActor, MLPCritic, RNNActor, RNNCritic, ValueCritic
from torchrl_rslstorage.modules.student_teacher import is_for_teachers
from torchrl_rslstorage.trainers.checkpoints import latest_checkpoint
from torchrl_rslstorage.trainers.distill_options import DistillOptions
from torchrl_rslstorage.trainers.options import RunOptions
from torchrl_rslstorage.trainers.run_folder import RunFolder, RunFolderError


def seed_everything(options: RunOptions) -> None:
    """Sets torch's threads, and seeds every global generator."""
    torch.set_num_threads(options.num_threads)
    for seed in (torch.manual_seed, np.random.seed, random.seed):
        seed(options.seed)


def actor_of(options: RunOptions, env: EnvBase) -> GaussianActor:
    """A new policy for ``env``."""
    kind = MLPActor if options.policy == "mlp" else RNNActor
    shape = {**_shape(options), "init_std": options.init_std, "std_type": options.std_type}
    return kind.for_env(env, _groups(options, env), **shape).to(options.device)


def critic_of(options: RunOptions, env: EnvBase) -> ValueCritic:
    """A new critic for ``env``."""
    kind = MLPCritic if options.policy == "mlp" else RNNCritic
    return kind.for_env(env, _groups(options, env), **_shape(options)).to(options.device)


def _shape(options: RunOptions) -> dict[str, Any]:
    shape: dict[str, Any] = {
        "hidden_dims": options.hidden_dims,
        "activation": options.activation,
        "normalize_observations": options.obs_normalization,
    }
    if options.policy != "mlp":
        shape["rnn_type"] = options.policy
        shape["rnn_hidden_dim"] = options.rnn_hidden_dim
        shape["rnn_num_layers"] = options.rnn_num_layers
    return shape


def _groups(options: RunOptions, env: EnvBase) -> list[Any]:
    """Every observation of the environment, in its own order; of a student's, without its teacher's."""
    groups = list(env.observation_spec.keys(include_nested=True, leaves_only=True))
    if isinstance(options, DistillOptions):
        return [key for key in groups if not is_for_teachers(key)]
    return groups


@contextlib.contextmanager
def environment_of(options: RunOptions, *, train: bool = True) -> Iterator[BatchedEnv]:
    """The task of ``options``, closed in the end whatever happens."""
    assert options.num_envs
    try:
        device = torch.device(options.device)
        torch.zeros((), device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"There is no device {options.device!r} here: {reason}") from error
    env = make_env(
        options.task,
        options.num_envs,
        device=device,
        seed=options.seed,
        train=train,
        clip_actions=options.clip_actions,
        show_teacher=train and isinstance(options, DistillOptions),
    )
    try:
        yield env
    finally:
        if not env.is_closed:
            env.close()


def find_checkpoint(path: Path) -> tuple[RunFolder, Path]:
    """The run that ``path`` belongs to, and the checkpoint that it means."""
    path = Path(path)
    if (path / "config.json").is_file():
        folder = RunFolder.open(path)
        latest = latest_checkpoint(folder.checkpoints)
        if latest is None:
            raise RunFolderError(f"{path} has no checkpoint yet: let it train on (rslstorage resume {path}).")
        return folder, latest
    if not path.exists():
        raise RunFolderError(f"{path} does not exist: name a run folder or one of its checkpoints.")
    if not (path.resolve().parent.parent / "config.json").is_file():
        raise RunFolderError(
            f"{path} is neither a run folder nor a checkpoint inside one: there is no config.json beside it."
        )
    return RunFolder.open(path.resolve().parent.parent), path
