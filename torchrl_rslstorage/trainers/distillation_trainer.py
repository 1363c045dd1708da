"""DistillationTrainer: a student learns from its teacher, on TorchRL's Trainer."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDictBase
from torchrl.record.loggers.common import Logger

from torchrl_rslstorage.collectors import RolloutCollector
from torchrl_rslstorage.data import TimeStepSampler
from torchrl_rslstorage.modules import StudentTeacher
from torchrl_rslstorage.objectives import DistillationLoss
from torchrl_rslstorage.trainers.distillation_config import DistillationConfig
from torchrl_rslstorage.trainers.distillation_stepper import DistillationStepper
from torchrl_rslstorage.trainers.distributed import Ranks
from torchrl_rslstorage.trainers.window_trainer import WindowTrainer, buffer_of, require_the_same_policy


class DistillationTrainer(WindowTrainer):
    """Trains a student to act as its teacher would, as RSL-RL's distillation does.

    In each iteration `StudentTeacher` collects a window; every ``gradient_length`` rows of it are one
    optimisation step, the shorter rest at the end as well (RSL-RL drops that). The student's normaliser takes
    in the window after the update; the teacher's never changes.

    A recurrent student enters a window with the states with which it acted in its first row, in every epoch;
    within the window they are computed anew, by the weights as they become.

    Args:
        collector: fills a `RolloutBuffer` with ``policy``.
        policy: student and teacher.
        total_frames: transitions to collect in all.
        config: hyper-parameters.
        logger: one or several TorchRL loggers; scalars are named as RSL-RL's (``Loss/behavior``, …).
        checkpoint_dir: where checkpoints go; none are written without it. The student is called "actor" in
            them, as in those of `RSLPPOTrainer`.
        save_interval: iterations between checkpoints.
        keep_last: checkpoints kept.
        progress_bar: show TorchRL's progress bar.
        ranks: processes that learn together (`Ranks`), each with a collector and a trainer of its own;
            ``total_frames`` are those of one of them.

    Raises:
        ValueError: the collector has no `RolloutBuffer` or acts with another student, or a number is out of
            its range; in training, the student's loss is not finite.
        TypeError: the policy is no `StudentTeacher`.

    Examples:
        >>> from torchrl_rslstorage import DistillationTrainer, MLPActor, PendulumEnv, RNNActor
        >>> from torchrl_rslstorage import RolloutBuffer, RolloutCollector, StudentTeacher
        >>> env = PendulumEnv(num_envs=16, hide_velocity=True, show_teacher=True, seed=0)
        >>> student = RNNActor.for_env(env, rnn_hidden_dim=8)
        >>> teacher = MLPActor(["observation"], in_features=3, action_dim=1)  # a trained one, better
        >>> policy = StudentTeacher.for_env(env, student, teacher)
        >>> collector = RolloutCollector(env, policy, replay_buffer=RolloutBuffer(num_steps=8, num_envs=16))
        >>> trainer = DistillationTrainer(collector, policy, total_frames=256, progress_bar=False)
        >>> trainer.train()
        >>> trainer.num_iterations, trainer.metrics["Loss/behavior"] > 0
        (2, True)
    """

    def __init__(
        self,
        collector: Any,
        policy: StudentTeacher,
        *,
        total_frames: int,
        config: DistillationConfig | None = None,
        logger: Logger | Sequence[Logger] | None = None,
        checkpoint_dir: str | Path | None = None,
        save_interval: int = 50,
        keep_last: int = 3,
        progress_bar: bool = True,
        ranks: Ranks | None = None,
    ) -> None:
        config = DistillationConfig() if config is None else config
        buffer = buffer_of(collector)
        config.check()
        if not isinstance(policy, StudentTeacher):
            raise TypeError(
                f"Distillation collects with StudentTeacher(student, teacher), got a {type(policy).__name__}."
            )
        if isinstance(collector, RolloutCollector):
            require_the_same_policy(
                collector.policy, policy.student, "student", "StudentTeacher(student, teacher)"
            )
        self.config = config
        self.policy = policy
        loss = DistillationLoss(policy.student, config.loss_type)
        stepper = DistillationStepper(
            policy.student,
            learning_rate=config.learning_rate,
            max_grad_norm=config.max_grad_norm,
            ranks=ranks,
        )
        if buffer.storage.columns is None:
            buffer.storage.keep_only_starts(policy.state_keys)
        sampler = TimeStepSampler(
            config.num_learning_epochs, length=config.gradient_length, state_keys=loss.state_keys
        )
        buffer.set_sampler(sampler)
        per_epoch = -(-buffer.num_steps // config.gradient_length)
        self._num_optim_steps = config.num_learning_epochs * per_epoch
        super().__init__(
            collector,
            loss,
            stepper,
            num_optim_steps=self._num_optim_steps,
            total_frames=total_frames,
            logger=logger,
            checkpoint_dir=checkpoint_dir,
            save_interval=save_interval,
            keep_last=keep_last,
            progress_bar=progress_bar,
            ranks=ranks,
        )
        self.register_op("setup", self._share_actions)
        self.register_op("post_steps", self._share_actions)

    def _share_actions(self) -> None:
        """Says how often the teacher acts in the window that is collected next."""
        self.policy.teacher_share = self.config.teacher_share(self.collected_frames / self.total_frames)

    def _networks(self) -> dict[str, Any]:
        return {"actor": self.policy.student, "teacher": self.policy.teacher}

    def _learning(self) -> Iterable[Any]:
        return (self.policy.student,)

    def _fetch_metrics(self, window: TensorDictBase) -> dict[str, float]:
        assert self._averages is not None
        # Steps of an iteration may be of different length: their sums are averaged over all rows.
        rows = self.config.num_learning_epochs * len(window)
        values = [self._averages[0] * (self._num_optim_steps / rows), window["next", "reward"].mean()]
        std = getattr(self.policy.student, "std", None)
        if isinstance(std, torch.Tensor):
            values.append(std.mean())
        behavior, reward, *rest = torch.stack([x.double() for x in values]).tolist()
        if not math.isfinite(behavior):
            raise ValueError(
                f"The student's loss is {behavior} in iteration {self.num_iterations}, and its weights are "
                "not to be trusted any more. Check the observations, the teacher's weights and the learning "
                "rate, and go on from the last checkpoint."
            )
        metrics = {
            "Loss/behavior": behavior,
            "Loss/learning_rate": self.config.learning_rate,
            "Train/mean_step_reward": reward,
        }
        if self.config.acting == "dagger":
            metrics["Policy/teacher_share"] = self.policy.teacher_share
        return metrics | ({"Policy/mean_std": rest[0]} if rest else {})
