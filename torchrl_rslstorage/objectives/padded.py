"""Reading a padded mini-batch ``[L, B]``: the valid cells, and what recurrent networks make of them.

Padding never reaches a number. What no recurrent network reads is taken cell by cell before anything is
computed. The package's own recurrent networks step through the rows that the mini-batch was made of;
TorchRL's get it as ``[B, L]``, time last, with zeros for padding, and their results are taken cell by cell.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.utils import NestedKey
from torch import Tensor, nn
from torch.distributions import Distribution
from torchrl.modules import GRUModule, LSTMModule, set_recurrent_mode

from torchrl_rslstorage.data.leaves import canonical, leaves, nest, show, show_all
from torchrl_rslstorage.data.trajectory_layouts import Layout, layout_of
from torchrl_rslstorage.modules import RNNActor, RNNCritic


class Padded(NamedTuple):
    """A padded mini-batch and how its cells are read."""

    td: TensorDictBase
    """Batch size ``[L, B]``."""
    layout: Layout
    """Where its valid cells stand."""


def is_recurrent(network: nn.Module) -> bool:
    """Whether ``network`` carries states from step to step: this package's networks, TorchRL's modules.

    An RNN that reads a stacked history within one observation is a feed-forward network here.

    Raises:
        TypeError: a recurrent network of this package stands inside of another module.
    """
    for module in network.modules():
        if isinstance(module, RNNActor | RNNCritic) and module is not network:
            raise TypeError(
                f"{type(module).__name__} stands inside of a {type(network).__name__}: pass it to the loss "
                "itself, not in a sequence."
            )
    return any(isinstance(m, RNNActor | RNNCritic | GRUModule | LSTMModule) for m in network.modules())


def read_padded(td: TensorDictBase) -> Padded:
    """``td`` with the layout of its ``mask``.

    Args:
        td: batch size ``[L, B]``, with ``mask [L, B]`` bool.

    Raises:
        ValueError: the batch is not ``[L, B]``, has no mask, or nothing but padding.
    """
    mask = td.get("mask", None)
    shape = tuple(td.batch_size)
    if mask is None:
        raise ValueError(
            f"A recurrent policy learns from trajectories, [L, B] with their `mask`, but this mini-batch has "
            f"batch size {shape} and no mask: give the buffer a TrajectorySampler."
        )
    if len(shape) != 2 or tuple(mask.shape) != shape or mask.dtype is not torch.bool:
        raise ValueError(
            f"`mask` must be bool [L, B] in a mini-batch of batch size [L, B], got {mask.dtype} "
            f"{tuple(mask.shape)} in one of {shape}."
        )
    layout = layout_of(mask)
    if not layout.num_cells:
        raise ValueError("The mini-batch holds nothing but padding: its mask is false everywhere.")
    return Padded(td, layout)


def valid_cells(padded: Padded, keys: Sequence[NestedKey]) -> TensorDict:
    """What stands under ``keys`` in the valid cells, ``[V]``; what is missing stays missing.

    Args:
        padded: the mini-batch.
        keys: entries, or groups of them.
    """
    taken: dict[Any, Tensor] = {}
    for key in keys:
        value = padded.td.get(key, None)
        if isinstance(value, TensorDictBase):
            prefix = canonical(key)
            path = (prefix,) if isinstance(prefix, str) else prefix
            for name, leaf in leaves(value, prefix=path).items():
                taken[name] = padded.layout.take(leaf)
        elif value is not None:
            taken[canonical(key)] = padded.layout.take(value)
    return TensorDict(nest(taken), [padded.layout.num_cells])


def dist_of_padded(actor: Any, padded: Padded, parameter_keys: Sequence[NestedKey]) -> Distribution:
    """The action distribution ``[V]`` of the valid cells, by a recurrent actor.

    Args:
        actor: `RNNActor`, or a TorchRL actor on ``LSTMModule`` or ``GRUModule``.
        padded: the mini-batch.
        parameter_keys: where the distribution's parameters are written.

    Raises:
        TypeError: an actor that does not give its distribution's parameters apart.
    """
    if isinstance(actor, RNNActor):
        return actor.valid_dist(padded.td)
    if not hasattr(actor, "get_dist_params") or not parameter_keys:
        raise TypeError(
            f"{type(actor).__name__} is recurrent but gives no parameters of its distribution "
            "(get_dist_params): use RNNActor or TorchRL's ProbabilisticActor."
        )
    with set_recurrent_mode(True):
        made = actor.get_dist_params(_time_last(padded, actor))
    return actor.build_dist_from_params(_cells(padded, made, parameter_keys))


def values_of_padded(critic: Any, padded: Padded, value_key: NestedKey) -> Tensor | None:
    """The values ``[V, 1]`` of the valid cells, by a recurrent critic; None if it writes none.

    Args:
        critic: `RNNCritic`, or a TorchRL network on ``LSTMModule`` or ``GRUModule``.
        padded: the mini-batch.
        value_key: where it writes.
    """
    if isinstance(critic, RNNCritic):
        return critic.valid_values(padded.td)
    with set_recurrent_mode(True):
        made = critic(_time_last(padded, critic))
    if made.get(value_key, None) is None:
        return None
    return _cells(padded, made, [value_key]).get(value_key)


def _time_last(padded: Padded, network: Any) -> TensorDictBase:
    """What ``network`` reads, as ``[B, L]``, with zeros for padding."""
    mask = padded.td.get("mask")
    read: dict[Any, Tensor] = {}
    for key in network.in_keys:
        value = padded.td.get(key, None)
        if value is None:
            raise KeyError(
                f"{type(network).__name__} reads {show(key)}, which is not there. The mini-batch holds "
                f"{show_all(leaves(padded.td))}."
            )
        zero_behind = torch.where(mask.view(*mask.shape, *[1] * (value.ndim - 2)), value, 0)
        read[canonical(key)] = zero_behind.to(value.dtype).transpose(0, 1)
    return TensorDict(nest(read), mask.t().shape)


def _cells(padded: Padded, made: TensorDictBase, keys: Sequence[NestedKey]) -> TensorDict:
    taken = {canonical(key): padded.layout.take(made.get(key).transpose(0, 1)) for key in keys}
    return TensorDict(nest(taken), [padded.layout.num_cells])
