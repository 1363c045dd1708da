"""Whole runs: start one in a folder of its own, resume it, evaluate what it learned."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

import torch
from torchrl.envs import EnvBase
from torchrl.record.loggers import CSVLogger
from torchrl.record.loggers.common import Logger

from torchrl_rslstorage._extras import require_extra
from torchrl_rslstorage.collectors import RolloutCollector
from torchrl_rslstorage.data import RolloutBuffer
from torchrl_rslstorage.modules import ActorCritic, GaussianActor, ValueCritic
from torchrl_rslstorage.trainers.amp_run import build_amp, report_motion
from torchrl_rslstorage.trainers.amp_trainer import AMPTrainer
from torchrl_rslstorage.trainers.building import (
    actor_of,
    critic_of,
    environment_of,
    find_checkpoint,
    seed_everything,
)
from torchrl_rslstorage.trainers.checkpoints import load_checkpoint, remove_leftovers
from torchrl_rslstorage.trainers.distill_options import TEACHER_CONFIG, DistillOptions, options_of
from torchrl_rslstorage.trainers.distill_run import build_distillation
from torchrl_rslstorage.trainers.distributed import Ranks
from torchrl_rslstorage.trainers.options import Options, RunOptions, TrainOptions, check_seed
from torchrl_rslstorage.trainers.playing import play
from torchrl_rslstorage.trainers.ppo_trainer import RSLPPOTrainer
from torchrl_rslstorage.trainers.run_folder import RunFolder, versions
from torchrl_rslstorage.trainers.stepper import KLAdaptiveStepper
from torchrl_rslstorage.trainers.window_trainer import WindowTrainer

Report = Callable[[str], None]


def start_run(options: TrainOptions | DistillOptions, report: Report = print) -> dict[str, Any]:
    """Trains in a new run folder; returns its summary, on other ranks than the first nothing.

    Under ``torchrun`` every process trains with ``num_envs`` environments of its own (`Ranks`).

    Raises:
        RunFolderError: the folder cannot be used.
        ImportError: an extra is missing.
        ValueError: an option or the task does not fit.
    """
    options = options.resolved()
    if options.run_dir is None:
        name = f"{options.task.replace('/', '-')}-{datetime.now():%Y%m%d-%H%M%S-%f}"
        options = dataclasses.replace(options, run_dir=Path("runs") / name)
    assert options.run_dir is not None
    folder = RunFolder(options.run_dir)
    _require_extras(options)
    config = options.as_config()
    if isinstance(options, DistillOptions):
        config[TEACHER_CONFIG] = find_checkpoint(options.teacher)[0].config
    with Ranks.join(options.device) as ranks, environment_of(options := _own(options, ranks)) as env:
        # Before the folder: what cannot be trained leaves none behind.
        trainer = _build(folder, options, env, config, ranks)
        if ranks.is_first:
            folder = RunFolder.create(folder.path, config)
        return _train(folder, options, trainer, report)


def resume_run(path: Path, max_iterations: int | None = None, report: Report = print) -> dict[str, Any]:
    """Goes on from a run's newest checkpoint, or from its start if it has none; returns the summary.

    A run of several ranks goes on with as many.

    Args:
        path: the run's folder.
        max_iterations: train up to this many iterations in all instead of what the run was started with.
        report: where progress is told.

    Raises:
        RunFolderError: there is no run, or it cannot be read.
        CheckpointError: its checkpoint is broken.
    """
    folder = RunFolder.open(path)
    options = options_of(folder.config, path)
    if max_iterations is not None:
        options = dataclasses.replace(options, max_iterations=max_iterations).resolved()
    _require_extras(options)
    with Ranks.join(options.device) as ranks, environment_of(options := _own(options, ranks)) as env:
        trainer = _build(folder, options, env, folder.config, ranks)
        latest = trainer.latest_checkpoint
        if latest is not None:
            trainer.load_checkpoint(latest)
        elif ranks.is_first:
            report(f"{folder.path} has no checkpoint yet: starting over.")
        if ranks.is_first:
            remove_leftovers(folder.checkpoints)
        return _train(folder, options, trainer, report)


def evaluate_run(
    path: Path,
    *,
    num_episodes: int = 100,
    num_envs: int | None = None,
    stochastic: bool = False,
    seed: int = 0,
) -> dict[str, Any]:
    """Plays whole episodes with a run's newest policy, or with that of one checkpoint.

    Args:
        path: a run's folder, or one of its checkpoints.
        num_episodes: how many episodes count; each environment plays the same number, so that short
            episodes are not preferred.
        num_envs: environments played side by side.
        stochastic: sample actions instead of taking the mean.
        seed: of the environments and the samples.

    Raises:
        RunFolderError: there is no run or no checkpoint at ``path``.
        CheckpointError: the checkpoint is broken.
        ValueError: a number is out of its range.
    """
    for name, number in (("num_episodes", num_episodes), ("num_envs", num_envs)):
        if number is not None and number < 1:
            raise ValueError(f"`{name}` must be at least 1, got {number}.")
    check_seed(seed)
    folder, checkpoint = find_checkpoint(path)
    options = options_of(folder.config, folder.path)
    width = min(num_episodes, num_envs or options.num_envs or num_episodes)
    options = dataclasses.replace(options, num_envs=width, seed=seed)
    torch.set_num_threads(options.num_threads)
    torch.manual_seed(seed)
    with environment_of(options, train=False) as env:
        actor = actor_of(options, env)
        load_checkpoint(checkpoint, {"actor": actor})
        actor.eval()
        returns = _play(env, actor, -(-num_episodes // width), stochastic)
    lengths = returns[1]
    return {
        "checkpoint": str(checkpoint),
        "mean_return": float(returns[0].mean()),
        "std_return": float(returns[0].std(correction=0)),
        "mean_length": float(lengths.mean()),
        "num_episodes": returns.shape[1],
    }


@dataclasses.dataclass
class LearnedRun:
    """What a run has learned up to a checkpoint, on the CPU; of a distillation, the student alone."""

    checkpoint: Path
    actor: GaussianActor
    critic: ValueCritic | None
    stepper: KLAdaptiveStepper | None
    iterations: int = 0

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Takes the trainer's counters from a checkpoint."""
        self.iterations = state_dict["num_iterations"]


def load_run(path: Path) -> LearnedRun:
    """The networks of a run's newest checkpoint, or of the one named, and the stepper that trained them.

    Raises:
        RunFolderError: there is no run or no checkpoint at ``path``.
        CheckpointError: the checkpoint is broken.
    """
    folder, checkpoint = find_checkpoint(path)
    options = dataclasses.replace(options_of(folder.config, folder.path), num_envs=1, device="cpu")
    with environment_of(options, train=False) as env:
        actor = actor_of(options, env)
        critic = critic_of(options, env) if isinstance(options, TrainOptions) else None
    stepper = None if critic is None else KLAdaptiveStepper(actor, critic)
    run = LearnedRun(checkpoint, actor, critic, stepper)
    parts = {"actor": actor, "critic": critic, "stepper": stepper, "trainer": run}
    load_checkpoint(checkpoint, {name: part for name, part in parts.items() if part is not None})
    return run


def _play(env: EnvBase, actor: GaussianActor, each: int, stochastic: bool) -> torch.Tensor:
    """Returns and lengths ``[2, N·each]`` of every environment's first ``each`` episodes."""
    num_envs = env.batch_size[0]
    sums = torch.zeros(2, num_envs, dtype=torch.float64)
    ended: list[torch.Tensor] = []
    left = torch.full((num_envs,), each)
    for step in play(env, actor, stochastic=stochastic):
        sums[0] += step["next", "reward"].view(-1).cpu()
        sums[1] += 1
        done = step["next", "done"].view(-1).cpu()
        if bool(done.any()):
            ended.append(sums[:, done & (left > 0)])
            left -= done.long()
            sums.masked_fill_(done, 0)
        if not bool((left > 0).any()):
            break
    return torch.cat(ended, 1)


def _own(options: Options, ranks: Ranks) -> Options:
    """The options as one rank has them: its own seed and device."""
    return dataclasses.replace(options, seed=ranks.seed(options.seed), device=ranks.device)


def _require_extras(options: RunOptions) -> None:
    """Everything that is needed at the end of a run, asked for before it begins."""
    require_extra("matplotlib.figure", "cli", feature="the learning curve")
    if options.logger == "tensorboard":
        require_extra("tensorboard", "log", feature="the TensorBoard logger")


def _train(folder: RunFolder, options: RunOptions, trainer: WindowTrainer, report: Report) -> dict[str, Any]:
    if not trainer.ranks.is_first:
        trainer.train()
        _summary(trainer, options)
        return {}
    frames = trainer.frames
    begin = f"Resuming at {frames:,} frames:" if frames else "Training"
    report(f"{begin} {options.task} in {folder.path}.")
    folder.truncate_logs(frames)
    trainer.loggers = _loggers(folder, options)
    if not trainer.progress_bar:
        trainer.register_op("post_steps", _Progress(trainer, report))
    try:
        trainer.train()
    finally:
        for logger in trainer.loggers:
            _close(logger)
    summary = _summary(trainer, options)
    if isinstance(options, TrainOptions) and isinstance(trainer, AMPTrainer):
        summary |= report_motion(folder, options, trainer)
    folder.write_summary(summary)
    folder.plot_learning_curve(f"{options.task}, seed {options.seed}")
    return {"run": str(folder.path), **summary}


def _build(
    folder: RunFolder,
    options: TrainOptions | DistillOptions,
    env: EnvBase,
    config: Mapping[str, Any],
    ranks: Ranks,
) -> WindowTrainer:
    assert options.num_envs and options.num_steps_per_env and options.max_iterations
    if isinstance(options, DistillOptions):
        return build_distillation(folder, options, env, config, ranks)
    seed_everything(options)
    actor, critic = actor_of(options, env), critic_of(options, env)
    buffer = RolloutBuffer(options.num_steps_per_env, options.num_envs, device=options.device)
    collector = RolloutCollector(env, ActorCritic(actor, critic), replay_buffer=buffer)
    frames = options.num_envs * options.num_steps_per_env
    trainer_options: dict[str, Any] = {
        "total_frames": frames * options.max_iterations,
        "config": options.ppo,
        "checkpoint_dir": folder.checkpoints,
        "save_interval": options.save_interval,
        "progress_bar": options.progress_bar and sys.stderr.isatty(),
        "compile": options.compile,
        "ranks": ranks,
    }
    if options.amp is not None:
        return build_amp(options, env, collector, actor, critic, **trainer_options)
    return RSLPPOTrainer(collector, actor, critic, **trainer_options)


class _Progress:
    """One line every tenth of a run, for terminals that cannot show a bar, and for log files."""

    def __init__(self, trainer: WindowTrainer, report: Report) -> None:
        self._trainer = trainer
        self._report = report
        self._tenth = self._now()

    def _now(self) -> int:
        return 10 * self._trainer.collected_frames // self._trainer.total_frames

    def __call__(self) -> None:
        if self._now() == self._tenth:
            return
        self._tenth = self._now()
        frames, metrics = self._trainer.frames, self._trainer.metrics
        mean, fps = metrics["Train/mean_reward"], metrics["Perf/total_fps"]
        self._report(f"{frames:>12,} frames   mean reward {mean:>10.1f}   {fps:>9,.0f} frames/s")


def _loggers(folder: RunFolder, options: RunOptions) -> list[Logger]:
    loggers: list[Logger] = [CSVLogger(folder.logs.name, log_dir=str(folder.path))]
    if options.logger == "tensorboard":
        from torchrl.record.loggers.tensorboard import TensorboardLogger

        loggers.append(TensorboardLogger("tensorboard", log_dir=str(folder.path)))
    return loggers


def _close(logger: Logger) -> None:
    """Lets a logger's files go, with all that was logged in them."""
    experiment: Any = logger.experiment
    for handle in (*getattr(experiment, "files", {}).values(), experiment):
        if hasattr(handle, "close"):
            handle.close()


def _summary(trainer: WindowTrainer, options: RunOptions) -> dict[str, Any]:
    """What ``summary.json`` says of a run; its ranks make it together."""
    collector = trainer.collector
    assert isinstance(collector, RolloutCollector)
    episodes = trainer.ranks.mean_of(collector.statistics.summary()._asdict())
    return {
        "task": options.task,
        "mean_return": episodes["mean_return"],
        "mean_length": episodes["mean_length"],
        "num_episodes": round(episodes["num_episodes"] * trainer.ranks.size),
        "frames": trainer.frames,
        "iterations": trainer.num_iterations,
        "wall_seconds": trainer.seconds,
        "seed": options.seed,
        "versions": versions(),
    }
