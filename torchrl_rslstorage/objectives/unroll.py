"""What a student would do in consecutive rows: means of its actions, with the gradient through time.

Rows are read together, up to the next one in which some environment starts anew: an RNN over several rows
costs one call, and the head behind it sees all of them at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.utils import NestedKey
from torch import Tensor
from torchrl.envs import ExplorationType, set_exploration_type
from torchrl.modules import set_recurrent_mode

from torchrl_rslstorage.data.leaves import canonical, leaves, nest, show, show_all
from torchrl_rslstorage.data.rows import under_next
from torchrl_rslstorage.data.samplers import balanced
from torchrl_rslstorage.modules import GaussianActor, RNNActor
from torchrl_rslstorage.modules.student_teacher import state_keys_of
from torchrl_rslstorage.objectives.reading import readable

_CELLS_AT_ONCE = 4096
"""On 12 times as many a 512-256-128 head took 15 % longer, on a twelfth a 64-64 head 55 % (AMD EPYC)."""

_ENVS_AT_ONCE = 1024
"""Back-propagating 12 rows of an LSTM of 256 took 36 % longer on four times as many (AMD EPYC)."""


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

    def of(self, envs: slice) -> Memory:
        """That of some environments, detached."""
        return Memory([s[envs].detach() for s in self.states], self.starts[:, envs], self.resets)


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
    if memory is not None and isinstance(student, RNNActor):
        latents, after = student.unroll(td, memory.states, memory)
        means = [student.mlp(latent) for latent in _at_once(latents)]
        return means[0] if len(means) == 1 else torch.cat(means), after
    if isinstance(student, GaussianActor):
        return student.get_dist(td).loc, []
    if memory is None:
        flat = readable(td, student).reshape(-1)
        return _action(student, flat, action_key).unflatten(0, td.batch_size), []
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


def parts_of(rows: Tensor, *, is_recurrent: bool) -> list[tuple[slice, slice]]:
    """Rows and environments of a stretch ``[L, N, *]`` that are best back-propagated through together."""
    num_rows, num_envs = rows.shape[:2]
    every = slice(None)
    if rows.device.type != "cpu":
        return [(every, every)]
    if is_recurrent:
        parts = -(-num_envs // _ENVS_AT_ONCE)
        return [(every, slice(start, stop)) for start, stop in balanced(num_envs, parts)]
    step = _rows_at_once(num_envs)
    return [(slice(start, start + step), every) for start in range(0, num_rows, step)]


def _rows_at_once(num_envs: int) -> int:
    return max(1, _CELLS_AT_ONCE // num_envs)


def _at_once(latents: list[Tensor]) -> Iterator[Tensor]:
    """The same rows ``[L, N, H]`` in other pieces: on a CPU as many as stay in its cache."""
    most = _rows_at_once(latents[0].shape[1]) if latents[0].device.type == "cpu" else sum(map(len, latents))
    gathered: list[Tensor] = []
    for part in (part for latent in latents for part in latent.split(most)):
        if sum(map(len, gathered)) + len(part) > most:
            yield _joined(gathered)
            gathered = []
        gathered.append(part)
    yield _joined(gathered)


def _joined(rows: list[Tensor]) -> Tensor:
    return rows[0] if len(rows) == 1 else torch.cat(rows)


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
