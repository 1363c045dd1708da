"""Environments: a pendulum and a point mass that ship with the package, and any Gymnasium task."""

from __future__ import annotations

from torchrl_rslstorage.envs.base import BatchedEnv
from torchrl_rslstorage.envs.gym import GymnasiumEnv
from torchrl_rslstorage.envs.pendulum import PendulumEnv, PendulumState
from torchrl_rslstorage.envs.point_mass import PointMassEnv, PointMassState, circle_motion
from torchrl_rslstorage.envs.torchrl_vec_env import TorchRLVecEnv
from torchrl_rslstorage.envs.vec_env import VecEnvWrapper

__all__ = [
    "BatchedEnv",
    "GymnasiumEnv",
    "PendulumEnv",
    "PendulumState",
    "PointMassEnv",
    "PointMassState",
    "TorchRLVecEnv",
    "VecEnvWrapper",
    "circle_motion",
    "make_env",
]


import torch

PENDULUM_TASKS = ("pendulum", "pendulum-hidden-velocity")


def make_env(
    task: str,
    num_envs: int,
    *,
    device: torch.device | str = "cpu",
    seed: int | None = None,
    train: bool = True,
    clip_actions: bool = True,
    show_teacher: bool = False,
) -> BatchedEnv:
    """A batch of ``num_envs`` environments of ``task``.

    >>> make_env("pendulum", 8, seed=0).batch_size
    torch.Size([8])

    Args:
        task: ``"pendulum"`` for the embedded `PendulumEnv`, ``"pendulum-hidden-velocity"`` for one that
            takes memory to solve, "point-mass" for the embedded `PointMassEnv`, or any Gymnasium id.
        num_envs: N.
        device: where every tensor is handed out.
        seed: of the environments; None draws one.
        train: spread the embedded tasks' first episodes over all phases. False, for evaluation, starts
            every episode at step 0. Gymnasium tasks always do.
        clip_actions: clip actions to a Gymnasium task's bounds (the pendulum clips its own).
        show_teacher: add what a teacher sees, ``teacher_observation``, to the pendulum's observations.

    Raises:
        ImportError: gymnasium is missing, or what the task needs.
        ValueError: an unknown task, or ``num_envs`` below 1.
    """
    if task in PENDULUM_TASKS:
        return PendulumEnv(
            num_envs,
            init_at_random_ep_len=train,
            hide_velocity=task != "pendulum",
            show_teacher=show_teacher,
            device=device,
            seed=seed,
        )
    if task == "point-mass":
        return PointMassEnv(num_envs, init_at_random_ep_len=train, device=device, seed=seed)
    return GymnasiumEnv(task, num_envs, device=device, seed=seed, clip_actions=clip_actions)
