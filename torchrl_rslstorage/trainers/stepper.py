"""The optimisation step: KL-adaptive learning rate, separate clipping of actor and critic, fused Adam."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any, Literal, get_args

import torch
from tensordict import TensorDictBase
from torch import Tensor, nn
from torchrl.trainers import OptimizationStepper

from torchrl_rslstorage._compat import unchecked
from torchrl_rslstorage.trainers.compiled_step import CompiledStep, loss_terms, total_loss
from torchrl_rslstorage.trainers.distributed import Ranks, alone_or
from torchrl_rslstorage.trainers.flat_adam import FlatAdam
from torchrl_rslstorage.trainers.learning_rate import adapted_learning_rate

Schedule = Literal["adaptive", "fixed"]


class KLAdaptiveStepper(OptimizationStepper):
    """One optimisation step as RSL-RL makes it, free of host synchronisation.

    The learning rate is a tensor, adapted from the mini-batch's KL *before* the step; gradients of actor
    and critic are clipped by their own norms (rsl_rl 5.5.1, algorithms/ppo.py, ``PPO.update``). TorchRL's
    own ``KLAdaptiveLR`` follows the same schedule on the host. Parameters and gradients are kept in one
    flat buffer (`FlatAdam`): build the stepper after the networks were moved to their device.

    Args:
        actor, critic: the networks whose parameters are optimised.
        learning_rate: at the start.
        max_grad_norm: bound of either network's gradient norm.
        schedule: "adaptive", or "fixed" for a constant learning rate.
        desired_kl: target of the adaptive schedule.
        compile: evaluate the loss and its gradient through ``torch.compile``. The first step takes long,
            and numbers differ by rounding. Where it is not possible a warning says so, once, and training
            goes on without it.
        ranks: processes that learn together; gradients and the KL are their means, and they take equal
            steps. They cannot be compiled.

    Raises:
        ValueError: an unknown schedule, a number that is not positive, or nothing to optimise.

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
        compile: bool = False,
        ranks: Ranks | None = None,
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
        networks = [list(network.parameters()) for network in (actor, critic)]
        device = next((p.device for network in networks for p in network), None)
        self.learning_rate = torch.tensor(learning_rate, dtype=torch.float64, device=device)
        self.optimizer = FlatAdam(networks, lr=self.learning_rate)
        self.ranks = alone_or(ranks)
        self._compile = compile and self.ranks.size == 1
        if compile and not self._compile:
            warnings.warn(
                "torch.compile makes one graph of a step, in which ranks cannot meet: training goes on "
                "without it.",
                UserWarning,
                stacklevel=2,
            )
        self._compiled: CompiledStep | None = None

    def update(self, loss_module: Any, mini_batch: TensorDictBase) -> Tensor:
        """Evaluates the loss on one mini-batch and takes one step.

        Args:
            loss_module: `RSLPPOLoss`, or any TorchRL loss that also returns ``kl``.
            mini_batch: what it reads.

        Returns:
            Every entry that the loss returned, ``[len(metric_names)]``, without gradient.

        Raises:
            RuntimeError: the networks' parameters were replaced since the stepper was made.
        """
        if self._compile:
            self.optimizer.check_in_place()
            metrics = self._compiled_update(loss_module, mini_batch)
            if metrics is not None:
                return metrics
        self.optimizer.zero_grad()
        terms = self._terms(loss_module, mini_batch)
        total_loss(terms).backward()
        kl = terms["kl"].detach() if self.schedule == "adaptive" else None
        kl = self.optimizer.average_gradients(self.ranks, kl)
        if kl is not None:
            self.learning_rate.copy_(adapted_learning_rate(self.learning_rate, kl, self.desired_kl))
        self.optimizer.clip_grad_norm_(self.max_grad_norm)
        self.optimizer.step()
        with torch.no_grad():
            return torch.stack(list(terms.values()))

    def step(self, trainer: Any, sub_batch: TensorDictBase) -> TensorDictBase:
        """TorchRL's protocol: the metrics come as one vector, to be fetched from the device at once."""
        return unchecked({"metrics": self.update(trainer.loss_module, sub_batch)})

    def _terms(self, loss_module: Any, mini_batch: TensorDictBase) -> Mapping[str, Tensor]:
        terms = loss_terms(loss_module, mini_batch)
        self.metric_names = [str(name) for name in terms.keys()]
        return terms

    def _compiled_update(self, loss_module: Any, mini_batch: TensorDictBase) -> Tensor | None:
        if self._compiled is None or self._compiled.loss_module is not loss_module:
            with torch.no_grad():  # names the metrics, and raises what is wrong with the mini-batch
                self._terms(loss_module, mini_batch)
            desired_kl = self.desired_kl if self.schedule == "adaptive" else None
            self._compiled = CompiledStep(
                loss_module, self.optimizer, max_grad_norm=self.max_grad_norm, desired_kl=desired_kl
            )
        try:
            return self._compiled(mini_batch)
        except Exception as error:
            self._compile, self._compiled = False, None
            # The compiler's own error stands behind "backend=... raised:".
            reason = " ".join((str(error).strip() or type(error).__name__).splitlines()[:2])
            warnings.warn(
                f"torch.compile is not possible here, training goes on without it: {reason}",
                UserWarning,
                stacklevel=3,
            )
            return None

    # -- saving ----------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Moments, step counts and the learning rate."""
        return {"optimizer": self.optimizer.state_dict(), "learning_rate": self.learning_rate.clone()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes back what `state_dict` gave."""
        self.optimizer.load_state_dict(state_dict["optimizer"])
        self.learning_rate.copy_(state_dict["learning_rate"])
