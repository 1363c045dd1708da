"""What a run with adversarial motion priors is built of, and what it reports of the motion in the end."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from tensordict import TensorDictBase
from tensordict.utils import NestedKey
from torch import Tensor
from torchrl.envs import EnvBase

from torchrl_rslstorage.collectors import RolloutCollector
from torchrl_rslstorage.data.leaves import canonical, leaves
from torchrl_rslstorage.envs import circle_motion
from torchrl_rslstorage.modules import AMPDiscriminator
from torchrl_rslstorage.modules.observations import observation_width
from torchrl_rslstorage.motions import MotionDataset
from torchrl_rslstorage.trainers.amp_trainer import AMPTrainer
from torchrl_rslstorage.trainers.building import actor_of, environment_of, seed_everything
from torchrl_rslstorage.trainers.motion_report import align_motion, draw_motions, record_motion
from torchrl_rslstorage.trainers.options import TrainOptions
from torchrl_rslstorage.trainers.run_folder import RunFolder

_MOST_STEPS = 200
"""Steps of a motion that are laid beside the clip: enough for a gait's cycles, and soon compared."""
_REPORT_ENVS = 32


def build_amp(
    options: TrainOptions, env: EnvBase, collector: Any, actor: Any, critic: Any, **ppo_options: Any
) -> AMPTrainer:
    """The trainer of a run with ``--amp``.

    Raises:
        ValueError: the task does not say what of a motion its states are made of, or the motion does not fit.
        FileNotFoundError: there is no such motion.
    """
    motions, (key, fields, dt) = motions_of(options), style_of(options.task, env)
    width = observation_width(env, [key])
    discriminator = AMPDiscriminator(
        [key],
        width,
        hidden_dims=options.style.discriminator_hidden_dims,
        normalize_observations=options.style.amp_normalization,
    ).to(options.device)

    def demonstrations(num: int, generator: torch.Generator | None = None) -> TensorDictBase:
        return motions.pairs(num, dt, fields, out_key=key, generator=generator)

    one = demonstrations(1, torch.Generator(motions.device))
    found = one.get(key).shape[-1]
    if found != width:
        raise ValueError(
            f"The fields {', '.join(fields)} of {options.amp} have {found} numbers, but a state of "
            f"{options.task} has {width}: the motion is one of another body."
        )
    return AMPTrainer(
        collector, actor, critic, discriminator, demonstrations, dt=dt, amp=options.style, **ppo_options
    )


def motions_of(options: TrainOptions) -> MotionDataset:
    """The demonstrations that ``--amp`` names: files, or the embedded "circle"."""
    assert options.amp is not None
    motions = circle_motion() if options.amp == "circle" else options.amp
    return MotionDataset(motions, device=options.device, dtype=torch.get_default_dtype())


def style_of(task: str, env: EnvBase) -> tuple[NestedKey, tuple[str, ...], float]:
    """The entry that holds a state, the fields of a motion that it is made of, and the seconds of a step.

    Raises:
        ValueError: the task does not say.
    """
    fields, dt = getattr(env, "motion_fields", None), getattr(env, "dt", None)
    if fields is None or dt is None:
        raise ValueError(
            f"{task!r} does not say which fields of a motion make up its states (motion_fields) and how long "
            "a step is (dt): train it with AMPTrainer in Python, or choose 'point-mass'."
        )
    return getattr(env, "motion_key", "observation"), tuple(fields), float(dt)


def report_motion(folder: RunFolder, options: TrainOptions, trainer: AMPTrainer) -> dict[str, float]:
    """Draws ``motions.png`` and returns the motion's error, and that of the policy before its training.

    Both policies play from the task's own starts, without exploring, and find to their motion in as many
    steps as are then recorded. Errors are those of `align_motion`, beside the clip that fits best.
    """
    assert isinstance(trainer.collector, RolloutCollector)
    env = trainer.collector.env
    key, fields, dt = style_of(options.task, env)
    clips = motions_of(options).resample(dt).clips
    references = [_states_of(leaves(clip.frames), fields) for clip in clips]
    num_steps = min(_MOST_STEPS, *(max(1, len(reference) // 2) for reference in references))
    test = dataclasses.replace(options, num_envs=_REPORT_ENVS, seed=options.seed + 1)

    def motion(actor: Any) -> Tensor:
        training = actor.training
        actor.eval()
        with environment_of(test, train=False) as test_env:
            states = record_motion(test_env, actor, [key], num_steps=num_steps, settle_steps=num_steps)
        actor.train(training)
        return states

    def nearest(states: Tensor) -> tuple[float, Tensor]:
        errors = [float(align_motion(states, reference).error.mean()) for reference in references]
        best = min(range(len(errors)), key=errors.__getitem__)
        return errors[best], references[best]

    states = motion(trainer.actor)
    error, reference = nearest(states)
    title = f"{options.task}, {options.amp}, seed {options.seed}"
    draw_motions(folder.path / "motions.png", states, reference, dt, title)
    seed_everything(options)
    before, _ = nearest(motion(actor_of(options, env)))
    return {"motion_error": error, "motion_error_untrained": before}


def _states_of(frames: Any, fields: tuple[str, ...]) -> Tensor:
    return torch.cat([frames[canonical(field)].flatten(1) for field in fields], -1)
