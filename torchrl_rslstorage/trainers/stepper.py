"""The optimisation step: KL-adaptive learning rate, separate clipping of actor and critic, fused Adam."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, get_args

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor, nn
from torchrl.trainers import OptimizationStepper

Schedule = Literal["adaptive", "fixed"]

LEARNING_RATE_RANGE = (1e-5, 1e-2)
LEARNING_RATE_FACTOR = 1.5
"""Bounds and factor of the adaptive learning rate (rsl_rl 5.5.1, algorithms/ppo.py, ``PPO.update``)."""


def adapted_learning_rate(learning_rate: Tensor, kl: Tensor, desired_kl: float) -> Tensor:
    """RSL-RL's rule, on the device: slower above twice the desired KL, faster below half of it.

        lr ← max(1e-5, lr / 1.5)   if KL > 2·desired
        lr ← min(1e-2, lr · 1.5)   if 0 < KL < desired / 2

    Args:
        learning_rate: 0-dim float64.
        kl: 0-dim, mean KL(old ‖ new) of the mini-batch.
        desired_kl: the target.
    """
    low, high = LEARNING_RATE_RANGE
    slower = (learning_rate / LEARNING_RATE_FACTOR).clamp(min=low)
    faster = (learning_rate * LEARNING_RATE_FACTOR).clamp(max=high)
    small = (kl < desired_kl / 2) & (kl > 0)
    return torch.where(kl > desired_kl * 2, slower, torch.where(small, faster, learning_rate))


class KLAdaptiveStepper(OptimizationStepper):
    """One optimisation step as RSL-RL makes it, free of host synchronisation.

    The learning rate is a tensor, adapted from the mini-batch's KL *before* the step; gradients of actor
    and critic are clipped by their own norms (rsl_rl 5.5.1, algorithms/ppo.py, ``PPO.update``). TorchRL's
    own ``KLAdaptiveLR`` follows the same schedule on the host.

    Args:
        actor, critic: the networks whose parameters are optimised.
        learning_rate: at the start.
        max_grad_norm: bound of either network's gradient norm.
        schedule: "adaptive", or "fixed" for a constant learning rate.
        desired_kl: target of the adaptive schedule.

    Raises:
        ValueError: an unknown schedule, or a number that is not positive.

    Examples:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from torchrl_rslstorage import KLAdaptiveStepper, MLPActor, MLPCritic, RSLPPOLoss
        >>> actor, critic = MLPActor(["obs"], 3, 2), MLPCritic(["obs"], 3)
        >>> batch = critic(actor(TensorDict({"obs": torch.randn(8, 3)}, [8]))).detach()
        >>> batch["advantage"], batch["value_target"] = torch.randn(8, 1), torch.randn(8, 1)
        >>> stepper = KLAdaptiveStepper(actor, critic)
        >>> losses = stepper.update(RSLPPOLoss(actor, critic), batch)
        >>> float(stepper.learning_rate)
        0.001
    """

    def __init__(
        self,
        actor: nn.Module,
        critic: nn.Module,
        *,
        learning_rate: float = 1e-3,
        max_grad_norm: float = 1.0,
        schedule: Schedule = "adaptive",
        desired_kl: float = 0.01,
    ) -> None:
        if schedule not in get_args(Schedule):
            raise ValueError(f"`schedule` must be one of {get_args(Schedule)}, got {schedule!r}.")
        positive = {
            "learning_rate": learning_rate,
            "max_grad_norm": max_grad_norm,
            "desired_kl": desired_kl,
        }
        for name, number in positive.items():
            if not number > 0:
                raise ValueError(f"`{name}` must be positive, got {number}.")
        self.max_grad_norm = max_grad_norm
        self.schedule: Schedule = schedule
        self.desired_kl = desired_kl
        self.metric_names: list[str] = []
        networks = [list(dict.fromkeys(network.parameters())) for network in (actor, critic)]
        self._networks = [parameters for parameters in networks if parameters]
        everything = list(dict.fromkeys([*networks[0], *networks[1]]))
        device = everything[0].device
        self.learning_rate = torch.tensor(learning_rate, dtype=torch.float64, device=device)
        self.optimizer = torch.optim.Adam(everything, lr=self.learning_rate, fused=True)

    def update(
        self, loss_module: Callable[[TensorDictBase], TensorDictBase], mini_batch: TensorDictBase
    ) -> TensorDictBase:
        """Evaluates the loss on one mini-batch and takes one step; returns the losses, detached."""
        losses = loss_module(mini_batch)
        if self.schedule == "adaptive":
            adapted = adapted_learning_rate(self.learning_rate, losses["kl"], self.desired_kl)
            self.learning_rate.copy_(adapted)
        total = sum(value for key, value in losses.items() if key.startswith("loss_"))
        self.optimizer.zero_grad()
        total.backward()
        for parameters in self._networks:
            nn.utils.clip_grad_norm_(parameters, self.max_grad_norm)
        self.optimizer.step()
        return losses.detach()

    def step(self, trainer: Any, sub_batch: TensorDictBase) -> TensorDictBase:
        """TorchRL's protocol. The metrics come stacked, ``[len(metric_names)]``, to be fetched at once."""
        losses = self.update(trainer.loss_module, sub_batch)
        self.metric_names = [str(name) for name in losses.keys()]
        return TensorDict({"metrics": torch.stack(list(losses.values()))})

    def state_dict(self) -> dict[str, Any]:
        """Moments, step counts and the learning rate."""
        return {"optimizer": self.optimizer.state_dict(), "learning_rate": self.learning_rate.clone()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes back what `state_dict` gave."""
        self.optimizer.load_state_dict(state_dict["optimizer"])
        self.learning_rate.copy_(state_dict["learning_rate"])
        # Loading puts a copy of the saved learning rate into the groups.
        for group in self.optimizer.param_groups:
            group["lr"] = self.learning_rate
