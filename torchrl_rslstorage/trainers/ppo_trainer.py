"""RSLPPOTrainer: the PPO loop on TorchRL's Trainer."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torchrl.record.loggers.common import Logger

from torchrl_rslstorage.collectors import RolloutCollector
from torchrl_rslstorage.data import MiniBatchSampler, RolloutBuffer, RolloutSampler, TrajectorySampler
from torchrl_rslstorage.data.leaves import show
from torchrl_rslstorage.modules import RandomNetworkDistillation, RNNActor, RNNCritic
from torchrl_rslstorage.objectives import RolloutGAE, RSLPPOLoss, Symmetry
from torchrl_rslstorage.trainers.config import PPOConfig
from torchrl_rslstorage.trainers.curiosity import Curiosity
from torchrl_rslstorage.trainers.distributed import Ranks, alone_or
from torchrl_rslstorage.trainers.stepper import KLAdaptiveStepper
from torchrl_rslstorage.trainers.window_trainer import WindowTrainer, buffer_of, require_the_same_policy


class RSLPPOTrainer(WindowTrainer):
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
        ranks: processes that learn together (`Ranks`), each with a collector and a trainer of its own;
            ``total_frames`` are those of one of them.

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
        ranks: Ranks | None = None,
    ) -> None:
        ranks = alone_or(ranks)
        config = PPOConfig() if config is None else config
        buffer = buffer_of(collector)
        config.check()
        if isinstance(collector, RolloutCollector):
            require_the_same_policy(collector.policy, actor, "actor", "ActorCritic(actor, critic)")
            _require_states_of(critic, collector.policy)
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
            pool=ranks.pool,
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
            ranks=ranks,
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
            pool=ranks.pool,
            check_observations=True,
        )
        for network in (actor, critic):
            # Ours say which of their entries are states; without that they are columns like any other.
            if isinstance(network, RNNActor | RNNCritic) and buffer.storage.columns is None:
                buffer.storage.keep_only_starts(network.state_keys)
        self.curiosity = None if rnd is None else Curiosity.beside(collector, rnd, buffer.num_envs, ranks)
        buffer.set_sampler(_sampler(config, buffer, loss, rnd))
        super().__init__(
            collector,
            loss,
            stepper,
            num_optim_steps=config.num_learning_epochs * config.num_mini_batches,
            total_frames=total_frames,
            logger=logger,
            checkpoint_dir=checkpoint_dir,
            save_interval=save_interval,
            keep_last=keep_last,
            progress_bar=progress_bar,
            ranks=ranks,
        )

    def _prepare(self) -> None:
        if self.curiosity is not None:
            self.curiosity.reward(self.buffer)
        self.advantages(self.buffer)

    def _mini_batches(self) -> Iterator[TensorDictBase]:
        for mini_batch in self._rollout_batches():
            if self.curiosity is not None:
                self.curiosity.update(mini_batch)
            yield mini_batch

    def _rollout_batches(self) -> Iterator[TensorDictBase]:
        """PPO's mini-batches of one update, before anything else learns from them."""
        return iter(self.buffer)

    def _networks(self) -> dict[str, Any]:
        return {"actor": self.actor, "critic": self.critic}

    def _learning(self) -> list[Any]:
        return [self.actor, self.critic, *([] if self.curiosity is None else [self.curiosity.rnd])]

    def _shared(self) -> list[Any]:
        return self._learning()

    def _apart(self) -> list[str]:
        return [*super()._apart(), "curiosity"]

    def _episode_metrics(self) -> dict[str, float]:
        metrics = super()._episode_metrics()
        if self.curiosity is not None:
            metrics.update(self.curiosity.metrics(metrics.get("Train/mean_reward")))
        return metrics

    def checkpoint_components(self) -> dict[str, Any]:
        """What a checkpoint holds: everything that the next number depends on."""
        components = super().checkpoint_components()
        return components if self.curiosity is None else {**components, "curiosity": self.curiosity}

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
        return metrics


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
