"""The optimisation step of distillation: one truncated back-propagation through time, clipping, Adam."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor, nn
from torchrl.trainers import OptimizationStepper

from torchrl_rslstorage.trainers.distributed import Ranks, alone_or
from torchrl_rslstorage.trainers.flat_adam import FlatAdam


class DistillationStepper(OptimizationStepper):
    """One step on one stretch of rows, as RSL-RL makes it (rsl_rl 5.5.1, algorithms/distillation.py).

    Parameters and gradients are kept in one flat buffer (`FlatAdam`): build the stepper after the student
    was moved to its device.

    Args:
        student: the network whose parameters are optimised.
        learning_rate: Adam's.
        max_grad_norm: bound of the gradient's norm; ``None`` does not clip.
        ranks: processes that learn together, by the mean of their gradients.

    Raises:
        ValueError: a number that is not positive, or nothing to optimise.

    Examples:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from torchrl_rslstorage import DistillationLoss, DistillationStepper, MLPActor
        >>> student = MLPActor(["obs"], 3, 2)
        >>> loss, stepper = DistillationLoss(student), DistillationStepper(student)
        >>> rows = TensorDict({"obs": torch.randn(5, 8, 3), "teacher_action": torch.randn(5, 8, 2)}, [5, 8])
        >>> errors = [float(stepper.update(loss, rows)) for _ in range(20)]
        >>> errors[-1] < errors[0]
        True
    """

    def __init__(
        self,
        student: nn.Module,
        *,
        learning_rate: float = 1e-3,
        max_grad_norm: float | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        for name, number in (("learning_rate", learning_rate), ("max_grad_norm", max_grad_norm)):
            if number is not None and not number > 0:
                raise ValueError(f"`{name}` must be positive, got {number}.")
        self.ranks = alone_or(ranks)
        self.max_grad_norm = max_grad_norm
        parameters = list(student.parameters())
        device = parameters[0].device if parameters else None
        self.learning_rate = torch.tensor(learning_rate, dtype=torch.float64, device=device)
        self.optimizer = FlatAdam([parameters], lr=self.learning_rate)

    def update(self, loss_module: Any, mini_batch: TensorDictBase) -> Tensor:
        """Evaluates the loss on a stretch, takes one step, and cuts the back-propagation behind it.

        Args:
            loss_module: `DistillationLoss`.
            mini_batch: what it reads.

        Returns:
            ``loss_behavior``, 0-dim, without gradient.

        Raises:
            RuntimeError: the student's parameters were replaced since the stepper was made.
        """
        self.optimizer.check_in_place()
        self.optimizer.zero_grad()
        loss = loss_module.backward(mini_batch)
        self.optimizer.average_gradients(self.ranks)
        if self.max_grad_norm is not None:
            self.optimizer.clip_grad_norm_(self.max_grad_norm)
        self.optimizer.step()
        return loss

    def step(self, trainer: Any, sub_batch: TensorDictBase) -> TensorDictBase:
        """TorchRL's protocol: the metrics come as one vector, to be fetched from the device at once."""
        return TensorDict({"metrics": self.update(trainer.loss_module, sub_batch).view(1)})

    def state_dict(self) -> dict[str, Any]:
        """Moments, step counts and the learning rate."""
        return {"optimizer": self.optimizer.state_dict(), "learning_rate": self.learning_rate.clone()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes back what `state_dict` gave."""
        self.optimizer.load_state_dict(state_dict["optimizer"])
        self.learning_rate.copy_(state_dict["learning_rate"])
