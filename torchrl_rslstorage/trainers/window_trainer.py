"""WindowTrainer: what the trainers share, one window an iteration on TorchRL's Trainer.

The hook that each part of an iteration stands on:

    collector fills the window                      Trainer's loop
    what the update needs, one fresh update begins  pre_optim_steps
    every mini-batch: loss, step                    process_optim_batch, optimization_stepper
    normalisers take in the window                  post_steps
    metrics are fetched (once) and logged           post_steps
    the window is emptied                           post_steps
    a checkpoint is written, now and then           save_trainer
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor, nn
from torchrl.checkpoint import CheckpointRotation, GlobalRNGState
from torchrl.record.loggers.common import Logger

from torchrl_rslstorage._compat import TrainerBase
from torchrl_rslstorage.collectors import RolloutCollector
from torchrl_rslstorage.data import RolloutBuffer, keep_freed_memory
from torchrl_rslstorage.trainers.checkpoints import (
    SavedState,
    checkpoint_of,
    latest_checkpoint,
    load_checkpoint,
)
from torchrl_rslstorage.trainers.distributed import Ranks, alone_or, component_names


class WindowTrainer(TrainerBase):
    """Fills a window, learns from it, empties it; logs and writes checkpoints.

    Subclasses say what the update needs (`_prepare`), what learns (`_networks`) and what is logged
    (`_fetch_metrics`).

    Args:
        collector: fills a `RolloutBuffer`.
        loss_module, stepper: what each mini-batch goes through.
        num_optim_steps: mini-batches of one iteration.
        total_frames: transitions to collect in all.
        logger: one or several TorchRL loggers.
        checkpoint_dir: where checkpoints go; none are written without it.
        save_interval: iterations between checkpoints.
        keep_last: checkpoints kept.
        progress_bar: show TorchRL's progress bar.
        ranks: processes that learn together. Rank 0 logs (means over ranks) and writes checkpoints.

    Raises:
        ValueError: the collector has no `RolloutBuffer`, or a number is out of its range.
    """

    def __init__(
        self,
        collector: Any,
        loss_module: Any,
        stepper: Any,
        *,
        num_optim_steps: int,
        total_frames: int,
        logger: Logger | Sequence[Logger] | None,
        checkpoint_dir: str | Path | None,
        save_interval: int,
        keep_last: int,
        progress_bar: bool,
        ranks: Ranks | None = None,
    ) -> None:
        self.ranks = alone_or(ranks)
        buffer = buffer_of(collector)
        for name, number in (("save_interval", save_interval), ("total_frames", total_frames)):
            if number < 1:
                raise ValueError(f"`{name}` must be at least 1, got {number}.")
        loggers = [] if logger is None else [logger] if isinstance(logger, Logger) else list(logger)
        if not self.ranks.is_first:
            loggers, progress_bar = [], False
        self.loggers = loggers
        if buffer.storage.device.type == "cpu":
            keep_freed_memory()
        buffer.set_rng(buffer.generator)
        super().__init__(
            collector=collector,
            total_frames=total_frames,
            frame_skip=1,
            optim_steps_per_batch=num_optim_steps,
            loss_module=loss_module,
            optimization_stepper=stepper,
            replay_buffer=buffer,
            logger=loggers[0] if loggers else None,
            progress_bar=progress_bar,
            num_epochs=1,
            auto_log_optim_steps=False,
        )
        self.stepper = stepper
        self.buffer = buffer
        self.num_iterations = 0
        self.seconds = 0.0
        self.metrics: dict[str, float] = {}
        self.save_interval = save_interval
        self._checkpoint_rotation = (
            None if checkpoint_dir is None else CheckpointRotation(checkpoint_dir, keep_last=keep_last)
        )
        self._batches: Iterator[TensorDictBase] = iter(())
        self._averages: Tensor | None = None
        self._clock = time.perf_counter()
        self._collect_seconds = 0.0
        self.register_op("setup", self._resume_progress)
        self.register_op("pre_optim_steps", self._begin_update)
        self.register_op("process_optim_batch", self._next_mini_batch)
        self.register_op("post_optim_complete_log", self._keep_averages)
        self.register_op("post_steps", self._end_iteration)

    # -- what a subclass says --------------------------------------------------------------------

    def _prepare(self) -> None:
        """What is computed on a full window before its first mini-batch."""

    def _mini_batches(self) -> Iterator[TensorDictBase]:
        """One fresh, whole update of the buffer."""
        return iter(self.buffer)

    def _networks(self) -> dict[str, Any]:
        """What a checkpoint names first."""
        raise NotImplementedError

    def _learning(self) -> Iterable[Any]:
        """The networks whose normalisers take in the window after the update."""
        return self._networks().values()

    def _shared(self) -> list[Any]:
        """The modules that all ranks have the same of."""
        return list(self._networks().values())

    def _apart(self) -> list[str]:
        """The components of a checkpoint that every rank has its own of."""
        return ["collector", "replay_buffer", "rng"]

    def _fetch_metrics(self, window: TensorDictBase) -> dict[str, float]:
        """What is logged in one iteration beside episodes and times, fetched from the device at once."""
        raise NotImplementedError

    # -- one iteration ---------------------------------------------------------------------------

    def train(self) -> None:
        """Runs until ``total_frames`` are collected; returns at once if they are already."""
        if self.collected_frames >= self.total_frames:
            return
        self._meet()
        self._clock = time.perf_counter()
        super().train()

    @property
    def frames(self) -> int:
        """Transitions collected so far, by all ranks."""
        return self.collected_frames * self.ranks.size

    def _meet(self) -> None:
        """Makes sure that ranks take equal steps from equal parameters."""
        self.ranks.require_same(
            {
                "num_parameters": sum(p.numel() for module in self._shared() for p in module.parameters()),
                "num_steps": self.buffer.num_steps,
                "num_envs": self.buffer.num_envs,
                "total_frames": self.total_frames,
                "collected_frames": self.collected_frames,
                "optim_steps_per_batch": self.optim_steps_per_batch,
                "save_interval": self.save_interval,
                "checkpoint_dir": self._checkpoint_rotation and str(self._checkpoint_rotation.directory),
            }
        )
        for module in self._shared():
            self.ranks.share(module)

    def _begin_update(self) -> None:
        self._collect_seconds = self._lap()
        self._prepare()
        self._batches = self._mini_batches()

    def _next_mini_batch(self, batch: Any) -> TensorDictBase | None:
        return next(self._batches, None)

    def _keep_averages(self, optim_steps: int, average_losses: TensorDictBase) -> None:
        self._averages = average_losses["metrics"]

    @torch.no_grad()
    def _end_iteration(self) -> None:
        window = self.buffer.window
        for network in self._learning():
            update = getattr(network, "update_normalizer", None)
            if update is not None:
                update(window)
        self.num_iterations += 1
        metrics = {**self._fetch_metrics(window), **self._episode_metrics()}
        metrics |= self._times(window.numel() * self.ranks.size)
        self.metrics = self.ranks.mean_of(metrics)
        for logger in self.loggers:
            for name, value in self.metrics.items():
                logger.log_scalar(name, value, step=self.frames)
        shown = "Train/mean_reward" if "Train/mean_reward" in self.metrics else "Train/mean_step_reward"
        self._show_progress(**{shown.removeprefix("Train/"): self.metrics[shown]})
        self.buffer.empty(empty_write_count=False)
        self._clock = time.perf_counter()

    def _episode_metrics(self) -> dict[str, float]:
        statistics = getattr(self.collector, "statistics", None)
        if statistics is None:
            return {}
        summary = statistics.summary()
        return {
            "Train/mean_reward": summary.mean_return,
            "Train/mean_episode_length": summary.mean_length,
        }

    def _times(self, num_frames: int) -> dict[str, float]:
        learn_seconds = self._lap()
        seconds = self._collect_seconds + learn_seconds
        self.seconds += seconds
        return {
            "Perf/collection_time": self._collect_seconds,
            "Perf/learning_time": learn_seconds,
            "Perf/total_fps": num_frames / seconds,
        }

    def _lap(self) -> float:
        now = time.perf_counter()
        seconds, self._clock = now - self._clock, now
        return seconds

    # -- checkpoints -----------------------------------------------------------------------------

    def checkpoint_components(self) -> dict[str, Any]:
        """What a checkpoint holds: everything that the next number depends on."""
        collector = self.collector
        return {
            **self._networks(),
            "stepper": self.stepper,
            "collector": collector if isinstance(collector, RolloutCollector) else _StockCollector(collector),
            "replay_buffer": self.buffer,
            "trainer": _Counters(self),
            "rng": GlobalRNGState(),
        }

    def save_trainer(self, force_save: bool = False) -> None:
        """Writes a checkpoint every ``save_interval`` iterations, or now; whole or not at all."""
        if self._checkpoint_rotation is None:
            return
        if force_save or self.num_iterations % self.save_interval == 0:
            components = self.checkpoint_components()
            components |= self._of_other_ranks(components)
            if self.ranks.is_first:
                self._checkpoint_rotation.save(checkpoint_of(components), step=self.frames)
            self.ranks.wait()  # the checkpoint is there for all of them

    def _of_other_ranks(self, components: Mapping[str, Any]) -> dict[str, Any]:
        """On rank 0, what the others have of their own; nothing on the others, or alone."""
        if self.ranks.size == 1:
            return {}
        apart = [name for name in components if name in self._apart()]
        everybody = self.ranks.gather({name: components[name].state_dict() for name in apart})
        return {
            called: SavedState(everybody[rank][name])
            for rank in range(1, len(everybody))
            for name, called in component_names(apart, apart, rank).items()
        }

    def load_checkpoint(self, path: str | Path) -> None:
        """Restores a checkpoint that `save_trainer` wrote; tensors only, no code is run.

        Every rank takes the shared parts and what was its own; they need one folder to read from.

        Raises:
            CheckpointError: it is broken, or comes from other networks, another kind of run or another
                number of ranks; the message says which part did not fit.
        """
        components = self.checkpoint_components()
        if self.ranks.size > 1:  # before parts are missed that another number of ranks did not write
            load_checkpoint(path, {"trainer": components["trainer"]})
        called = component_names(components, self._apart(), self.ranks.rank)
        mine = {called[name]: component for name, component in components.items()}
        load_checkpoint(path, mine, of=list(components))

    @property
    def latest_checkpoint(self) -> Path | None:
        """The newest whole checkpoint in ``checkpoint_dir``; None if none was written yet.

        Raises:
            CheckpointError: there are checkpoints, but not one that is whole.
        """
        rotation = self._checkpoint_rotation
        return None if rotation is None else latest_checkpoint(rotation.directory)


class _StockCollector:
    """TorchRL's collector, which saves transforms and policy but no environment, as a component."""

    def __init__(self, collector: Any) -> None:
        self._collector = collector

    def state_dict(self) -> dict[str, Any]:
        return self._collector.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        # Strictly, an environment would miss the state that was never saved.
        self._collector.load_state_dict(state_dict, strict=False)
        warnings.warn(
            f"TorchRL's {type(self._collector).__name__} does not save its environment: episodes start anew "
            "here, so the numbers that follow differ from those of a run that was never interrupted. "
            "RolloutCollector saves environments that can be saved.",
            UserWarning,
            stacklevel=2,
        )


def buffer_of(collector: Any) -> RolloutBuffer:
    """The buffer that ``collector`` fills.

    Raises:
        ValueError: it is no `RolloutBuffer`.
    """
    buffer = getattr(collector, "replay_buffer", None)
    if not isinstance(buffer, RolloutBuffer):
        raise ValueError(
            f"The collector must fill a RolloutBuffer, but its replay_buffer is {type(buffer).__name__}: "
            "pass replay_buffer=RolloutBuffer(num_steps, num_envs) to it."
        )
    return buffer


def require_the_same_policy(policy: Any, actor: nn.Module, role: str, example: str) -> None:
    """Raises if ``actor`` is not (part of) the policy that collects: it would never see its own actions."""
    acting = {id(parameter) for parameter in policy.parameters()} if isinstance(policy, nn.Module) else None
    if acting is not None and not all(id(parameter) in acting for parameter in actor.parameters()):
        raise ValueError(
            f"The {role} is not the one that collects: give the collector a policy made of it, such as "
            f"{example}."
        )


class _Counters:
    """The trainer's own numbers, as a checkpoint component."""

    def __init__(self, trainer: WindowTrainer) -> None:
        self._trainer = trainer

    def state_dict(self) -> dict[str, float]:
        trainer = self._trainer
        return {
            "seconds": trainer.seconds,
            "collected_frames": trainer.collected_frames,
            "num_iterations": trainer.num_iterations,
            "optim_count": trainer.optim_count,
            "num_ranks": trainer.ranks.size,
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        trainer, num_ranks = self._trainer, state_dict.get("num_ranks", 1)
        if num_ranks != trainer.ranks.size:
            raise ValueError(
                f"it was written by {num_ranks} rank(s), each with environments of its own, and this run has "
                f"{trainer.ranks.size}: resume it with as many (torchrun --nproc-per-node {num_ranks})"
            )
        trainer.seconds = state_dict["seconds"]
        trainer.collected_frames = state_dict["collected_frames"]
        trainer.num_iterations = state_dict["num_iterations"]
        trainer.optim_count = state_dict["optim_count"]
