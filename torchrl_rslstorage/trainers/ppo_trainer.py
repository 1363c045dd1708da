"""RSLPPOTrainer: the PPO loop on TorchRL's Trainer.

One iteration, and the hook that each part stands on:

    collector fills the window                      Trainer's loop
    intrinsic rewards, if it is to be curious       pre_optim_steps
    RolloutGAE, one fresh update begins             pre_optim_steps
    epochs x mini-batches: loss, step               process_optim_batch, optimization_stepper
    normalisers take in the window                  post_steps
    metrics are fetched (once) and logged           post_steps
    the window is emptied                           post_steps
    a checkpoint is written, now and then           save_trainer
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import nn
from torchrl.checkpoint import CheckpointRotation, GlobalRNGState
from torchrl.record.loggers.common import Logger

from torchrl_rslstorage._compat import TrainerBase
from torchrl_rslstorage.collectors import RolloutCollector
from torchrl_rslstorage.data import MiniBatchSampler, RolloutBuffer, RolloutSampler, TrajectorySampler
from torchrl_rslstorage.data.leaves import show
from torchrl_rslstorage.modules import RandomNetworkDistillation, RNNActor, RNNCritic
from torchrl_rslstorage.objectives import RolloutGAE, RSLPPOLoss, Symmetry
from torchrl_rslstorage.trainers.checkpoints import checkpoint_of, latest_checkpoint, load_checkpoint
from torchrl_rslstorage.trainers.config import PPOConfig
from torchrl_rslstorage.trainers.curiosity import Curiosity
from torchrl_rslstorage.trainers.stepper import KLAdaptiveStepper


class RSLPPOTrainer(TrainerBase):
    """Trains an actor and a critic with PPO as RSL-RL does, on TorchRL's ``Trainer``.

    It gives the collector's buffer the sampler that ``config`` asks for, computes advantages once per
    window, steps through ``epochs x mini-batches``, updates observation normalisers after the update, and
    empties the window. Hooks of TorchRL's ``Trainer`` can be registered beside its own.

    Args:
        collector: fills a `RolloutBuffer`: `RolloutCollector`, or TorchRL's ``Collector`` with
            ``replay_buffer=``, ``frames_per_batch`` one window.
        actor: the policy that collects; `MLPActor` or TorchRL's ``ProbabilisticActor``.
        critic: `MLPCritic` or TorchRL's ``ValueOperator``.
        total_frames: transitions to collect in all.
        config: hyper-parameters.
        logger: one or several TorchRL loggers; scalars are named as RSL-RL's (``Loss/value``,
            ``Train/mean_reward``, …).
        checkpoint_dir: where checkpoints go; none are written without it.
        save_interval: iterations between checkpoints.
        keep_last: checkpoints kept.
        progress_bar: show TorchRL's progress bar.
        compile: compile the optimisation step (`KLAdaptiveStepper`).
        symmetry: learn from mirrored copies, or by a mirror loss (`RSLPPOLoss`); logged as ``Loss/symmetry``.
        rnd: add intrinsic rewards, and train the network that they come from; logged as ``Loss/rnd`` and
            ``Rnd/…``. ``Train/mean_reward`` is the sum of both rewards then, as RSL-RL's is.

    Raises:
        ValueError: the collector has no `RolloutBuffer`, a number is out of its range, or there are more
            mini-batches than transitions in a window.

    Examples:
        >>> from torchrl_rslstorage import ActorCritic, MLPActor, MLPCritic, PendulumEnv
        >>> from torchrl_rslstorage import RolloutBuffer, RolloutCollector, RSLPPOTrainer
        >>> env = PendulumEnv(num_envs=16, seed=0)
        >>> actor, critic = MLPActor.for_env(env), MLPCritic.for_env(env)
        >>> buffer = RolloutBuffer(num_steps=8, num_envs=16)
        >>> collector = RolloutCollector(env, ActorCritic(actor, critic), replay_buffer=buffer)
        >>> trainer = RSLPPOTrainer(collector, actor, critic, total_frames=256, progress_bar=False)
        >>> trainer.train()
        >>> trainer.collected_frames, trainer.num_iterations
        (256, 2)
    """

    def __init__(
        self,
        collector: Any,
        actor: TensorDictModuleBase,
        critic: TensorDictModuleBase,
        *,
        total_frames: int,
        config: PPOConfig | None = None,
        logger: Logger | Sequence[Logger] | None = None,
        checkpoint_dir: str | Path | None = None,
        save_interval: int = 50,
        keep_last: int = 3,
        progress_bar: bool = True,
        compile: bool = False,
        symmetry: Symmetry | None = None,
        rnd: RandomNetworkDistillation | None = None,
    ) -> None:
        config = PPOConfig() if config is None else config
        buffer = getattr(collector, "replay_buffer", None)
        if not isinstance(buffer, RolloutBuffer):
            raise ValueError(
                f"The collector must fill a RolloutBuffer, but its replay_buffer is {type(buffer).__name__}: "
                "pass replay_buffer=RolloutBuffer(num_steps, num_envs) to it."
            )
        config.check()
        for name, number in (("save_interval", save_interval), ("total_frames", total_frames)):
            if number < 1:
                raise ValueError(f"`{name}` must be at least 1, got {number}.")
        if isinstance(collector, RolloutCollector):
            _require_the_same_policy(collector.policy, actor)
            _require_states_of(critic, collector.policy)
        loggers = [] if logger is None else [logger] if isinstance(logger, Logger) else list(logger)
        self.loggers = loggers
        self.config = config
        self.actor = actor
        self.critic = critic
        loss = RSLPPOLoss(
            actor,
            critic,
            clip_epsilon=config.clip_param,
            clip_value=config.use_clipped_value_loss,
            critic_coeff=config.value_loss_coef,
            entropy_coeff=config.entropy_coef,
            normalize_advantage=config.normalize_advantage_per_mini_batch,
            symmetry=symmetry,
        )
        stepper = KLAdaptiveStepper(
            actor,
            critic,
            learning_rate=config.learning_rate,
            max_grad_norm=config.max_grad_norm,
            schedule=config.schedule,
            desired_kl=config.desired_kl,
            compile=compile and not loss.is_recurrent,
        )
        if compile and loss.is_recurrent:
            warnings.warn(
                "torch.compile cannot follow recurrent policies, whose mini-batches have another shape in "
                "every window: training goes on without it.",
                UserWarning,
                stacklevel=2,
            )
        self.advantages = RolloutGAE(
            config.gamma,
            config.lam,
            critic,
            time_out=config.time_out,
            normalize=not config.normalize_advantage_per_mini_batch,
            check_observations=True,
        )
        for network in (actor, critic):
            # Ours say which of their entries are states; without that they are columns like any other.
            if isinstance(network, RNNActor | RNNCritic) and buffer.storage.columns is None:
                buffer.storage.keep_only_starts(network.state_keys)
        self.curiosity = None if rnd is None else Curiosity.beside(collector, rnd, buffer.num_envs)
        buffer.set_sampler(_sampler(config, buffer, loss, rnd))
        buffer.set_rng(buffer.generator)
        super().__init__(
            collector=collector,
            total_frames=total_frames,
            frame_skip=1,
            optim_steps_per_batch=config.num_learning_epochs * config.num_mini_batches,
            loss_module=loss,
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
        self._averages: torch.Tensor | None = None
        self._clock = time.perf_counter()
        self._collect_seconds = 0.0
        self.register_op("setup", self._resume_progress)
        self.register_op("pre_optim_steps", self._begin_update)
        self.register_op("process_optim_batch", self._next_mini_batch)
        self.register_op("post_optim_complete_log", self._keep_averages)
        self.register_op("post_steps", self._end_iteration)

    # -- one iteration ---------------------------------------------------------------------------

    def train(self) -> None:
        """Runs until ``total_frames`` are collected; returns at once if they are already."""
        if self.collected_frames >= self.total_frames:
            return
        self._clock = time.perf_counter()
        super().train()

    def _begin_update(self) -> None:
        self._collect_seconds = self._lap()
        if self.curiosity is not None:
            self.curiosity.reward(self.buffer)
        self.advantages(self.buffer)
        self._batches = iter(self.buffer)

    def _next_mini_batch(self, batch: Any) -> TensorDictBase | None:
        mini_batch = next(self._batches, None)
        if self.curiosity is not None and mini_batch is not None:
            self.curiosity.update(mini_batch)
        return mini_batch

    def _keep_averages(self, optim_steps: int, average_losses: TensorDictBase) -> None:
        self._averages = average_losses["metrics"]

    @torch.no_grad()
    def _end_iteration(self) -> None:
        window = self.buffer.window
        for network in (self.actor, self.critic, self.curiosity and self.curiosity.rnd):
            update = getattr(network, "update_normalizer", None)
            if update is not None:
                update(window)
        self.num_iterations += 1
        self.metrics = self._fetch_metrics(window)
        for logger in self.loggers:
            for name, value in self.metrics.items():
                logger.log_scalar(name, value, step=self.collected_frames)
        shown = "Train/mean_reward" if "Train/mean_reward" in self.metrics else "Train/mean_step_reward"
        self._show_progress(**{shown.removeprefix("Train/"): self.metrics[shown]})
        self.buffer.empty(empty_write_count=False)
        self._clock = time.perf_counter()

    def _fetch_metrics(self, window: TensorDictBase) -> dict[str, float]:
        """Everything logged in one iteration, fetched from the device at once."""
        assert self._averages is not None
        extra = [self.stepper.learning_rate, window["next", "reward"].mean()]
        scale = window.get("scale", None)
        if scale is not None:
            extra.append(scale.mean())
        values = torch.cat([self._averages.double(), torch.stack([x.double() for x in extra])]).tolist()
        names = [*self.stepper.metric_names, "learning_rate", "step_reward", "mean_std"]
        fetched = dict(zip(names, values, strict=False))
        config = self.config
        metrics = {
            "Loss/surrogate": fetched["loss_objective"],
            "Loss/value": fetched["loss_critic"] / (config.value_loss_coef or 1.0),
            "Loss/entropy": fetched["entropy"],
            "Loss/learning_rate": fetched["learning_rate"],
            "Loss/kl": fetched["kl"],
            "Loss/clip_fraction": fetched["clip_fraction"],
            "Loss/explained_variance": fetched["explained_variance"],
            "Train/mean_step_reward": fetched["step_reward"],
        }
        if "symmetry" in fetched:
            metrics["Loss/symmetry"] = fetched["symmetry"]
        if "mean_std" in fetched:
            metrics["Policy/mean_std"] = fetched["mean_std"]
        statistics = getattr(self.collector, "statistics", None)
        if statistics is not None:
            summary = statistics.summary()
            metrics["Train/mean_reward"] = summary.mean_return
            metrics["Train/mean_episode_length"] = summary.mean_length
        if self.curiosity is not None:
            metrics.update(self.curiosity.metrics(metrics.get("Train/mean_reward")))
        learn_seconds = self._lap()
        seconds = self._collect_seconds + learn_seconds
        self.seconds += seconds
        metrics["Perf/collection_time"] = self._collect_seconds
        metrics["Perf/learning_time"] = learn_seconds
        metrics["Perf/total_fps"] = window.numel() / seconds
        return metrics

    def _lap(self) -> float:
        now = time.perf_counter()
        seconds, self._clock = now - self._clock, now
        return seconds

    # -- checkpoints -----------------------------------------------------------------------------

    def checkpoint_components(self) -> dict[str, Any]:
        """What a checkpoint holds: everything that the next number depends on."""
        collector = self.collector
        extra = {} if self.curiosity is None else {"curiosity": self.curiosity}
        return {
            "actor": self.actor,
            "critic": self.critic,
            "stepper": self.stepper,
            "collector": collector if isinstance(collector, RolloutCollector) else _StockCollector(collector),
            "replay_buffer": self.buffer,
            "trainer": _Counters(self),
            "rng": GlobalRNGState(),
            **extra,
        }

    def save_trainer(self, force_save: bool = False) -> None:
        """Writes a checkpoint every ``save_interval`` iterations, or now; whole or not at all."""
        if self._checkpoint_rotation is None:
            return
        if force_save or self.num_iterations % self.save_interval == 0:
            checkpoint = checkpoint_of(self.checkpoint_components())
            self._checkpoint_rotation.save(checkpoint, step=self.collected_frames)

    def load_checkpoint(self, path: str | Path) -> None:
        """Restores a checkpoint that `save_trainer` wrote; tensors only, no code is run.

        Raises:
            CheckpointError: it is broken, or comes from other networks or another kind of run; the message
                says which part did not fit.
        """
        load_checkpoint(path, self.checkpoint_components())

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


def _sampler(
    config: PPOConfig, buffer: RolloutBuffer, loss: RSLPPOLoss, rnd: RandomNetworkDistillation | None
) -> RolloutSampler:
    """Shuffled transitions, or trajectories where actor or critic is recurrent."""
    keys = [*(loss.in_keys or ()), *(() if rnd is None else rnd.observation_keys)]
    most, what = buffer.num_steps * buffer.num_envs, "transitions"
    if loss.is_recurrent:
        most, what = buffer.num_envs, "environments, taken whole by a recurrent policy"
    if config.num_mini_batches > most:
        raise ValueError(
            f"`num_mini_batches` is {config.num_mini_batches}, but a window holds {most} {what} "
            f"({buffer.num_steps} steps x {buffer.num_envs} environments): each mini-batch needs at least "
            "one."
        )
    if not loss.is_recurrent:
        return MiniBatchSampler(
            config.num_mini_batches,
            config.num_learning_epochs,
            reshuffle=config.reshuffle,
            drop_remainder=config.drop_remainder,
            keys=keys,
        )
    if config.drop_remainder:
        raise ValueError(
            "`drop_remainder` leaves out transitions, but a recurrent policy learns from whole environments: "
            "switch it off."
        )
    return TrajectorySampler(
        config.num_mini_batches,
        config.num_learning_epochs,
        reshuffle=config.reshuffle,
        keys=keys,
    )


def _require_states_of(critic: Any, policy: Any) -> None:
    """Refuses a recurrent critic that does not run while rows are collected: it would have no states."""
    written = getattr(policy, "out_keys", ())
    missing = [key for key in getattr(critic, "state_keys", ()) if key not in written]
    if missing:
        raise ValueError(
            f"The collector's policy does not write {show(missing[0])}, the state of the recurrent critic: "
            "collect with ActorCritic(actor, critic)."
        )


def _require_the_same_policy(policy: Any, actor: nn.Module) -> None:
    """Raises if ``actor`` is not (part of) the policy that collects: it would never see its own actions."""
    acting = {id(parameter) for parameter in policy.parameters()} if isinstance(policy, nn.Module) else None
    if acting is not None and not all(id(parameter) in acting for parameter in actor.parameters()):
        raise ValueError(
            "The actor is not the one that collects: give the collector a policy made of it, such as "
            "ActorCritic(actor, critic)."
        )


class _Counters:
    """The trainer's own numbers, as a checkpoint component."""

    def __init__(self, trainer: RSLPPOTrainer) -> None:
        self._trainer = trainer

    def state_dict(self) -> dict[str, float]:
        trainer = self._trainer
        return {
            "seconds": trainer.seconds,
            "collected_frames": trainer.collected_frames,
            "num_iterations": trainer.num_iterations,
            "optim_count": trainer.optim_count,
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        trainer = self._trainer
        trainer.seconds = state_dict["seconds"]
        trainer.collected_frames = state_dict["collected_frames"]
        trainer.num_iterations = state_dict["num_iterations"]
        trainer.optim_count = state_dict["optim_count"]
