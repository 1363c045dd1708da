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
        self._flat = nn.Parameter(torch.cat([p.detach().reshape(-1) for p in order]))
        self._gradient = torch.zeros_like(self._flat)
        self._flat.grad = self._gradient
        self._spans = {p: slice(start, stop) for p, start, stop in zip(order, edges, edges[1:], strict=False)}
        self._gradients: list[tuple[nn.Parameter, Tensor]] = []
        for p, span in self._spans.items():
            p.data = self._flat.detach()[span].view(p.shape)
            self._gradients.append((p, self._gradient[span].view(p.shape)))
        self._norms = [
            self._gradient[min(self._spans[p].start for p in network) : max(self._spans[p].stop for p in network)]
            for network in learned
            if network
        ]
        self._adam = torch.optim.Adam([self._flat], lr=lr, fused=True)

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
        self._gradient.zero_()
        for p, gradient in self._gradients:
            if p.grad is not gradient:
                p.grad = gradient
        first = self._gradients[0][0]
        if first.data_ptr() != self._flat.data_ptr():
            raise RuntimeError(
                "A network's parameters were replaced after its optimiser was made (by .to(), .double(), …): "
                "move networks first, then build the stepper or trainer."
            )

    def clip_grad_norm_(self, max_norm: float) -> None:
        """Scales each network's gradients so that their norm is at most ``max_norm``.

        The same as ``nn.utils.clip_grad_norm_`` on each, its 1e-6 included.
        """
        for gradient in self._norms:
            norm = torch.linalg.vector_norm(gradient)
            gradient.mul_((max_norm / (norm + 1e-6)).clamp_(max=1.0))

    def step(self) -> None:
        """Takes one step."""
        self._adam.step()

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The options of the one parameter group."""
        return self._adam.param_groups

    def state_dict(self) -> dict[str, Any]:
        """What ``torch.optim.Adam`` over the same parameters would give."""
        group = {name: value for name, value in self.param_groups[0].items() if name != "params"}
        group["params"] = list(range(len(self.parameters)))
        flat = self._adam.state.get(self._flat, {})
        state = {
            number: {
                name: value.clone() if value.ndim == 0 else value[self._spans[p]].view(p.shape).clone()
                for name, value in flat.items()
            }
            for number, p in enumerate(self.parameters)
        }
        return {"state": state if flat else {}, "param_groups": [group]}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Takes back what `state_dict`, or an Adam over the same parameters, gave.

        Raises:
            ValueError: it belongs to other parameters.
        """
        state = state_dict["state"]
        shapes = [tuple(state[number]["exp_avg"].shape) for number in sorted(state)]
        if shapes and shapes != [tuple(p.shape) for p in self.parameters]:
            raise ValueError(f"The saved optimiser has parameters of other shapes: {shapes}.")
        lr = self.param_groups[0]["lr"]
        saved = {**state_dict["param_groups"][0], "params": [0]}
        flat: dict[str, Tensor] = {}
        for number, p in enumerate(self.parameters):
            for name, value in state.get(number, {}).items():
                if value.ndim == 0:
                    flat[name] = value
                else:
                    flat.setdefault(name, torch.empty_like(self._flat))[self._spans[p]] = value.reshape(-1)
        self._adam.load_state_dict({"state": {0: flat} if flat else {}, "param_groups": [saved]})
        # Loading puts a copy of the saved learning rate into the group.
        self.param_groups[0]["lr"] = lr.copy_(torch.as_tensor(saved["lr"]))
