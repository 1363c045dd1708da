"""Reading the entries of a mini-batch, and refusing those whose shapes would broadcast."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from tensordict import TensorDictBase
from tensordict.utils import NestedKey
from torch import Tensor
from torch.distributions import Distribution

from torchrl_rslstorage.data.leaves import show, show_all


class Targets(NamedTuple):
    """What the networks' results for the cells of a mini-batch are compared with, each ``[B]``."""

    advantage: Tensor
    value_target: Tensor
    log_prob: Tensor
    """Of the action, by the policy that acted."""
    value: Tensor | None
    """Of the critic at that time; None if the value loss is not clipped."""

    def repeated(self, count: int) -> Targets:
        """Those of ``count`` copies of the mini-batch, one behind the other."""
        if count == 1:
            return self
        return Targets(*(None if x is None else x.repeat(count) for x in self))  # pyright: ignore[reportArgumentType] - only `value` is None


class Part(NamedTuple):
    """What the networks make of some cells, and the clipped losses of them."""

    dist: Distribution
    log_ratio: Tensor
    """New over old log-probability, ``[B]``."""
    clipped: Tensor
    """Whether the ratio was clipped, ``[B]`` bool."""
    value: Tensor
    """``[B]``."""
    loss_objective: Tensor
    loss_critic: Tensor


def readable(td: TensorDictBase, module: Any) -> TensorDictBase:
    """A copy, of containers only, of what ``module`` reads, since modules write into what they are given.

    A composite actor even writes the parameters of its heads into a group that it claims to read.
    """
    return td.select(*module.in_keys, strict=False).copy()


def as_list(key: Any) -> list[NestedKey]:
    """Several keys as they are, one key as a list of it."""
    return list(key) if isinstance(key, list) else [key]


def check_action(dist: Distribution, action: Any, key: NestedKey) -> None:
    """Refuses an action vector of another shape than the distribution's: densities would broadcast."""
    shape = (*dist.batch_shape, *dist.event_shape)
    # Without an event shape, what an action looks like is the distribution's own affair (one-hot, index).
    if dist.event_shape and tuple(action.shape) != shape:
        raise ValueError(
            f"{show(key)} has shape {tuple(action.shape)} but the actor's distribution has {shape}: it "
            "would broadcast. Actions are stored as the policy gave them."
        )


def flat(value: Tensor, key: Any, shape: torch.Size) -> Tensor:
    """``value`` as ``[B]``; refuses every shape but ``[B]`` and ``[B, 1]``."""
    if value.shape == shape:
        return value
    if value.shape == (*shape, 1):
        return value.squeeze(-1)
    name = show_all(as_list(key))
    raise ValueError(
        f"{name} has shape {tuple(value.shape)} in a mini-batch of batch size {tuple(shape)}, expected "
        f"{tuple(shape)} or {(*shape, 1)}: it would broadcast. A distribution over action vectors must "
        "sum over them (torch.distributions.Independent, or TorchRL's IndependentNormal)."
    )
