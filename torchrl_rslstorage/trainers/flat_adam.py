"""Adam on one flat buffer: parameters and gradients of several networks, their leaves views of it.

    flat       │ actor.weight │ actor.bias │ … │ critic.weight │ critic.bias │
    gradient   │      …       │     …      │   │       …       │      …      │
                ╰────────── one norm ──────╯    ╰───────── one norm ────────╯

Small networks have a dozen tensors of a few hundred numbers: clipping and stepping each of them costs more
in calls than in arithmetic. One buffer makes it one call each.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from torchrl_rslstorage._compat import fused_adam_
from torchrl_rslstorage.trainers.distributed import Ranks

_OPTIONS: dict[str, Any] = {
    "beta1": 0.9,
    "beta2": 0.999,
    "weight_decay": 0.0,
    "eps": 1e-8,
    "maximize": False,
}
"""``torch.optim.Adam``'s defaults, which are RSL-RL's."""


class FlatAdam:
    """``torch.optim.Adam`` (fused) over the parameters of two networks, kept in one flat buffer.

    The networks' parameters become views of the buffer; their ``state_dict``s stay what they were, and so
    does the optimiser's, which is that of ``torch.optim.Adam(chain(actor.parameters(), …))``. Parameters
    that both networks share belong to both norms.

    Args:
        networks: the parameters of each network, whose gradient norms are clipped separately.
        lr: 0-dim tensor, read at each step.

    Raises:
        ValueError: there is nothing to optimise, or parameters differ in dtype or device.

    Examples:
        >>> import torch
        >>> from torchrl_rslstorage.trainers.flat_adam import FlatAdam
        >>> net = torch.nn.Linear(2, 1)
        >>> optimizer = FlatAdam([list(net.parameters())], lr=torch.tensor(0.1))
        >>> optimizer.zero_grad()
        >>> net(torch.ones(1, 2)).sum().backward()
        >>> optimizer.clip_grad_norm_(1.0)
        >>> optimizer.step()
        >>> sorted(optimizer.state_dict()["state"])
        [0, 1]
    """

    def __init__(self, networks: Sequence[Sequence[nn.Parameter]], lr: Tensor) -> None:
        learned = [[p for p in network if p.requires_grad] for network in networks]
        self.parameters = list(dict.fromkeys(p for network in learned for p in network))
        if not self.parameters:
            raise ValueError("There is nothing to optimise: no parameter requires grad.")
        kinds = {(p.dtype, p.device) for p in self.parameters}
        if len(kinds) > 1:
            raise ValueError(f"All parameters must have one dtype and device, got {sorted(map(str, kinds))}.")
        order = self._contiguous(learned)
        sizes = [p.numel() for p in order]
        edges = [0, *torch.tensor(sizes).cumsum(0).tolist()]
        self._flat = torch.cat([p.detach().reshape(-1) for p in order])
        # One place more than there are gradients, for a number that travels with them.
        self._bucket = self._flat.new_zeros(len(self._flat) + 1)
        self._gradient = self._bucket[:-1]
        self._spans = {p: slice(start, stop) for p, start, stop in zip(order, edges, edges[1:], strict=False)}
        self._gradients: list[tuple[nn.Parameter, Tensor]] = []
        for p, span in self._spans.items():
            p.data = self._flat[span].view(p.shape)
            self._gradients.append((p, self._gradient[span].view(p.shape)))
        runs = [[self._spans[p] for p in network] for network in learned if network]
        self._runs = [slice(min(s.start for s in run), max(s.stop for s in run)) for run in runs]
        self._norms = [self._gradient[run] for run in self._runs]
        self.learning_rate = lr
        self._mean = torch.zeros_like(self._gradient)
        self._square = torch.zeros_like(self._gradient)
        self._steps = torch.zeros((), dtype=torch.float32, device=lr.device)

    @staticmethod
    def _contiguous(networks: Sequence[Sequence[nn.Parameter]]) -> list[nn.Parameter]:
        """An order in which each network is one run: what is shared stands between the two."""
        if len(networks) == 1:
            return list(dict.fromkeys(networks[0]))
        first, second = (dict.fromkeys(network) for network in networks)
        alone = [p for p in first if p not in second]
        shared = [p for p in first if p in second]
        return [*alone, *shared, *(p for p in second if p not in first)]

    def zero_grad(self) -> None:
        """Zeroes the gradients, and takes back those that somebody else replaced or dropped.

        Raises:
            RuntimeError: a network was moved or cast since, so that its parameters left the buffer.
        """
        self.check_in_place()
        self._gradient.zero_()
        for p, gradient in self._gradients:
            if p.grad is not gradient:
                p.grad = gradient

    def check_in_place(self) -> None:
        """Raises a RuntimeError if the networks' parameters are no longer views of the buffer."""
        if self._gradients[0][0].data_ptr() != self._flat.data_ptr():
            raise RuntimeError(
                "A network's parameters were replaced after its optimiser was made (by .to(), .double(), …): "
                "move networks first, then build the stepper or trainer."
            )

    def average_gradients(self, ranks: Ranks, number: Tensor | None = None) -> Tensor | None:
        """Makes the gradients their mean over ranks, in one call; returns the mean of ``number``, too.

        Args:
            ranks: who learns together.
            number: 0-dim, travels in the gradients' buffer.
        """
        if ranks.size == 1:
            return number
        if number is not None:
            self._bucket[-1].copy_(number)
        ranks.mean_(self._bucket)
        return None if number is None else self._bucket[-1]

    def clip_grad_norm_(self, max_norm: float) -> None:
        """Scales each network's gradients so that their norm is at most ``max_norm``.

        The same as ``nn.utils.clip_grad_norm_`` on each, its 1e-6 included.
        """
        for gradient in self._norms:
            norm = torch.linalg.vector_norm(gradient).add_(1e-6)
            gradient.mul_(norm.reciprocal_().mul_(max_norm).clamp_(max=1.0))

    @torch.no_grad()
    def step(self) -> None:
        """Takes one step."""
        fused_adam_(
            self._flat,
            self._gradient,
            self._mean,
            self._square,
            self._steps,
            lr=self.learning_rate,
            **_OPTIONS,
        )

    # -- the same as one traceable function ------------------------------------------------------

    @property
    def state(self) -> list[Tensor]:
        """Every tensor that a step changes."""
        return [self._flat, self._mean, self._square, self._steps, self.learning_rate]

    def views(self, flat: Tensor) -> dict[nn.Parameter, Tensor]:
        """Each parameter's part of ``flat``, in its shape."""
        parts = flat.split([span.stop - span.start for span in self._spans.values()])
        return {p: part.view(p.shape) for p, part in zip(self._spans, parts, strict=True)}

    def clip_and_step_(self, gradient: Tensor, max_norm: float, learning_rate: Tensor) -> None:
        """What `clip_grad_norm_` and `step` do, on a flat gradient; equal up to rounding.

            m ← β₁·m + (1 − β₁)·g,  v ← β₂·v + (1 − β₂)·g²
            p ← p − lr / (1 − β₁ᵗ) · m / (√v / √(1 − β₂ᵗ) + ε)

        Kingma & Ba 2015, arXiv:1412.6980, algorithm 1.
        """
        for run in self._runs:
            norm = torch.linalg.vector_norm(gradient[run])
            gradient[run] *= (max_norm / (norm + 1e-6)).clamp(max=1.0)
        beta1, beta2 = _OPTIONS["beta1"], _OPTIONS["beta2"]
        self._steps.add_(1)
        self._mean.lerp_(gradient, 1 - beta1)
        self._square.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        size = (learning_rate / (1 - beta1**self._steps)).to(gradient.dtype)
        root = self._square.sqrt() / (1 - beta2**self._steps).sqrt().to(gradient.dtype)
        self._flat.sub_(size * self._mean / (root + _OPTIONS["eps"]))

    # -- saving ----------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """What ``torch.optim.Adam`` over the same parameters would give."""
        moments = {"exp_avg": self._mean, "exp_avg_sq": self._square}
        state = {
            number: {
                "step": self._steps.clone(),
                **{name: flat[self._spans[p]].view(p.shape).clone() for name, flat in moments.items()},
            }
            for number, p in enumerate(self.parameters)
        }
        template = torch.optim.Adam(self.parameters, lr=self.learning_rate, fused=True).state_dict()
        return {"state": state, "param_groups": template["param_groups"]}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Takes back what `state_dict`, or an Adam over the same parameters, gave.

        Raises:
            ValueError: it belongs to other parameters.
        """
        state = state_dict["state"]
        shapes = [tuple(state[number]["exp_avg"].shape) for number in sorted(state)]
        mine = [tuple(p.shape) for p in self.parameters]
        if shapes and shapes != mine:
            raise ValueError(f"The saved optimiser has parameters of shapes {shapes}, these are {mine}.")
        for flat in (self._mean, self._square, self._steps):
            flat.zero_()
        for number, p in enumerate(self.parameters[: len(shapes)]):
            span, saved = self._spans[p], state[number]
            self._mean[span] = saved["exp_avg"].reshape(-1)
            self._square[span] = saved["exp_avg_sq"].reshape(-1)
            self._steps.copy_(saved["step"])
        lr = state_dict["param_groups"][0]["lr"]  # a Python number would become a tensor of half its digits
        self.learning_rate.copy_(torch.as_tensor(lr, dtype=self.learning_rate.dtype))
