"""The hyper-parameters of distillation, with RSL-RL's names and defaults."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from torchrl_rslstorage.objectives.distillation import LossType

Acting = Literal["student", "teacher", "dagger"]


@dataclass
class DistillationConfig:
    """Distillation's hyper-parameters (names and defaults: rsl_rl 5.5.1, algorithms/distillation.py).

    The last two are not RSL-RL's, whose student always acts. `DistillationTrainer` checks them.

    Examples:
        >>> from torchrl_rslstorage import DistillationConfig
        >>> config = DistillationConfig(acting="dagger", teacher_anneal=0.5)
        >>> [config.teacher_share(progress) for progress in (0.0, 0.25, 0.5, 0.75)]
        [1.0, 0.5, 0.0, 0.0]
    """

    num_learning_epochs: int = 1
    """Passes over each window."""
    gradient_length: int = 15
    """Steps that are back-propagated through together; what is left of a window is trained on as well."""
    learning_rate: float = 1e-3
    """Adam's learning rate."""
    max_grad_norm: float | None = None
    """Bound of the student's gradient norm; none by default."""
    loss_type: LossType = "mse"
    """Squared error, or Huber's, between the student's mean action and the teacher's."""
    acting: Acting = "student"
    """Who acts while rows are collected; "dagger" begins with the teacher and ends with the student."""
    teacher_anneal: float = 0.5
    """Part of a "dagger" training over which the teacher's share of the actions falls from 1 to 0."""

    def teacher_share(self, progress: float) -> float:
        """The probability that the teacher acts, after the part ``progress`` of the training.

        β of DAgger (Ross et al. 2011, arXiv:1011.0686), which leaves its decay open: here it is linear.
        """
        if self.acting != "dagger":
            return float(self.acting == "teacher")
        return max(0.0, 1.0 - progress / self.teacher_anneal)

    def check(self) -> None:
        """Refuses what cannot be trained with.

        Raises:
            ValueError: a value is outside its range; the message names it.
        """
        for name in ("num_learning_epochs", "gradient_length"):
            if getattr(self, name) < 1:
                raise ValueError(f"`{name}` must be at least 1, got {getattr(self, name)}.")
        for name in ("learning_rate", "max_grad_norm"):
            number = getattr(self, name)
            if number is not None and not number > 0:
                raise ValueError(f"`{name}` must be positive, got {number}.")
        for name, kind in (("loss_type", LossType), ("acting", Acting)):
            if getattr(self, name) not in get_args(kind):
                raise ValueError(f"`{name}` must be one of {get_args(kind)}, got {getattr(self, name)!r}.")
        if not 0 < self.teacher_anneal <= 1:
            raise ValueError(f"`teacher_anneal` must be above 0 and at most 1, got {self.teacher_anneal}.")
