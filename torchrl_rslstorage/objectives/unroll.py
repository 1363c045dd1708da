"""What a student would do in consecutive rows: means of its actions, with the gradient through time.

Rows are read together, up to the next one in which some environment starts anew: an RNN over several rows
costs one call, and the head behind it sees all of them at once.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.utils import NestedKey
from torch import Tensor
from torchrl.envs import ExplorationType, set_exploration_type
from torchrl.modules import set_recurrent_mode

from torchrl_rslstorage.data.leaves import canonical, leaves, nest, show, show_all
from torchrl_rslstorage.data.rows import under_next
from torchrl_rslstorage.modules import GaussianActor, RNNActor
from torchrl_rslstorage.objectives.reading import readable


class Memory(NamedTuple):
    """What N environments remember when consecutive rows begin, and where they forget it."""

    states: list[Tensor]
    """As they stand before row 0, ``[N, *]`` in the order of `state_keys_of`."""
    starts: Tensor
    """Whether an environment starts anew with the row, ``[L, N]`` bool; row 0 is in ``states`` already."""
    resets: tuple[int, ...]
    """The rows that have such an environment, row 0 left out."""

    def goes_on(self, row: int) -> Tensor:
        """Which environments go on from the row before, ``[N]`` bool."""
        return self.starts[row].logical_not()


def state_keys_of(network: Any) -> list[NestedKey]:
    """The recurrent states of a network: what it reads at the root and writes under ``next``."""
    written = {canonical(key) for key in network.out_keys}
    return [key for key in network.in_keys if under_next(canonical(key)) in written]


def mean_actions(
    student: Any, td: TensorDictBase, memory: Memory | None, action_key: NestedKey
) -> tuple[Tensor, list[Tensor]]:
    """Mean actions ``[L, N, A]``, and the states ``[N, *]`` after the last row.

    Args:
        student: `MLPActor`, `RNNActor`, or an actor of TorchRL's, with ``LSTMModule`` or ``GRUModule`` too.
        td: the rows, batch size ``[L, N]``.
        memory: of a recurrent student.
        action_key: where the student writes its action.

    Raises:
        KeyError: it writes no such entry.
    """
    if memory is None:
        if isinstance(student, GaussianActor):
            return student.get_dist(td).loc, []
        flat = readable(td, student).reshape(-1)
        return _action(student, flat, action_key).unflatten(0, td.batch_size), []
    if isinstance(student, RNNActor):
        dist, after = student.unroll(td, memory.states, memory)
        return dist.loc, after
    # TorchRL's modules take time last, and find the state of an episode in its first row.
    keys = state_keys_of(student)
    read = {
        canonical(key): _get(td, key, student).transpose(0, 1)
        for key in student.in_keys
        if key not in [*keys, "is_init"]
    }
    read["is_init"] = memory.starts.t().unsqueeze(-1)
    for key, state in zip(keys, memory.states, strict=True):
        zeros = state.new_zeros(len(state), len(memory.starts) - 1, *state.shape[1:])
        read[canonical(key)] = torch.cat([state.unsqueeze(1), zeros], 1)
    made = TensorDict(nest(read), [td.shape[1], td.shape[0]])
    with set_recurrent_mode(True):
        action = _action(student, made, action_key)
    return action.transpose(0, 1), [made.get(under_next(canonical(key)))[:, -1] for key in keys]


def _action(student: Any, td: TensorDictBase, action_key: NestedKey) -> Tensor:
    with set_exploration_type(ExplorationType.DETERMINISTIC):
        student(td)
    action = td.get(action_key, None)
    if action is None:
        raise KeyError(
            f"{type(student).__name__} writes no {show(action_key)}: name its action by "
            "loss.set_keys(action=...)."
        )
    return action


def _get(td: TensorDictBase, key: NestedKey, network: Any) -> Tensor:
    value = td.get(key, None)
    if value is None:
        raise KeyError(
            f"{type(network).__name__} reads {show(key)}, which is not there. The mini-batch holds "
            f"{show_all(leaves(td))}."
        )
    return value
