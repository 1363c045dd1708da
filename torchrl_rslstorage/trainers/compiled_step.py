"""One optimisation step as one compiled graph: loss, gradient, learning rate, clipping and Adam."""

from __future__ import annotations

from collections.abc import Mapping
from functools import reduce
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value

from torchrl_rslstorage.data.leaves import Key, leaves, nest
from torchrl_rslstorage.objectives import RSLPPOLoss
from torchrl_rslstorage.trainers.flat_adam import FlatAdam
from torchrl_rslstorage.trainers.learning_rate import adapted_learning_rate

_ROUNDED_KL = 1e-6
"""A fused KL of a policy with itself is not exactly zero; the first real one is about 1e-5."""


class CompiledStep:
    """A whole step through ``torch.compile``: no autograd engine, no call per layer, no call per parameter.

    The loss is a function of the flat parameter buffer; its gradient is taken inside of the graph
    (``torch.func``). On CUDA the graph is replayed as a CUDA graph (``mode="reduce-overhead"``).

    Args:
        loss_module: returns scalars by name, ``kl`` among them; `RSLPPOLoss`.
        optimizer: holds the parameters that ``loss_module`` evaluates.
        max_grad_norm: bound of each network's gradient norm.
        desired_kl: target of the adaptive learning rate; ``None`` keeps it fixed.
    """

    def __init__(
        self, loss_module: nn.Module, optimizer: FlatAdam, *, max_grad_norm: float, desired_kl: float | None
    ) -> None:
        self.loss_module = loss_module
        self._loss = _Terms(loss_module)
        self._optimizer = optimizer
        self._max_grad_norm = max_grad_norm
        self._desired_kl = desired_kl
        self._names = {p: name for name, p in self._loss.named_parameters()}
        flat = optimizer.state[0]
        on_cuda = flat.device.type == "cuda"
        if on_cuda:
            # Without this the graph of a step that changes its own inputs is not captured.
            for tensor in optimizer.state:
                torch._dynamo.mark_static_address(tensor)
        mode = "reduce-overhead" if on_cuda else None
        self._run = torch.compile(self._step, dynamic=False, fullgraph=True, mode=mode)

    def __call__(self, mini_batch: TensorDictBase) -> Tensor:
        """Takes one step; returns the loss terms, stacked."""
        flat = leaves(mini_batch)
        metrics, learning_rate = self._run(tuple(flat), list(flat.values()), mini_batch.batch_size)
        # Out here: torch 2.13 loses what a graph writes into a float64 scalar on the CPU.
        self._optimizer.learning_rate.copy_(learning_rate)
        # A CUDA graph writes its next results into the same memory.
        return metrics.clone()

    def _step(
        self, keys: tuple[Key, ...], tensors: list[Tensor], batch_size: torch.Size
    ) -> tuple[Tensor, Tensor]:
        mini_batch = TensorDict(nest(dict(zip(keys, tensors, strict=True))), batch_size)
        optimizer = self._optimizer
        gradient, (_, (metrics, kl)) = grad_and_value(self._objective, has_aux=True)(
            optimizer.state[0], mini_batch
        )
        learning_rate = optimizer.learning_rate
        if self._desired_kl is not None:
            learning_rate = adapted_learning_rate(learning_rate, kl, self._desired_kl, zero_kl=_ROUNDED_KL)
        optimizer.clip_and_step_(gradient, self._max_grad_norm, learning_rate)
        return metrics, learning_rate.clone()

    def _objective(self, flat: Tensor, mini_batch: TensorDictBase) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        parameters = {
            self._names[p]: view for p, view in self._optimizer.views(flat).items() if p in self._names
        }
        terms: dict[str, Tensor] = functional_call(self._loss, parameters, (mini_batch,))
        return total_loss(terms), (torch.stack(list(terms.values())).detach(), terms["kl"].detach())


def loss_terms(loss_module: Any, mini_batch: TensorDictBase) -> Mapping[str, Tensor]:
    """What ``loss_module`` returns; through `RSLPPOLoss.terms` unless a subclass has its own ``forward``."""
    if getattr(type(loss_module), "forward", None) is RSLPPOLoss.forward:
        return loss_module.terms(mini_batch)
    return loss_module(mini_batch)


def total_loss(terms: Mapping[str, Tensor]) -> Tensor:
    """The sum of all losses among ``terms``, by their names."""
    return reduce(torch.add, [value for name, value in terms.items() if name.startswith("loss_")])


class _Terms(nn.Module):
    """``loss_module.terms`` as the ``forward`` of a module, for ``functional_call``."""

    def __init__(self, loss_module: nn.Module) -> None:
        super().__init__()
        self.loss_module: Any = loss_module

    def forward(self, mini_batch: TensorDictBase) -> dict[str, Tensor]:
        return dict(loss_terms(self.loss_module, mini_batch).items())
