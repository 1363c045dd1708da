"""rsl-rl-lib's RolloutStorage over a RolloutBuffer: the same numbers, bit for bit, and faster mini-batches.

Kept to the letter, since rsl-rl-lib's numbers are what this class is for: of ``T·N`` cells that
``num_mini_batches`` does not divide the last ones are never seen, and of as many environments the last ones;
a window may be read before it is full; states that were not given for a row are those of an earlier window.
`MiniBatchSampler`, `TrajectorySampler` and `RolloutBuffer` have none of these faults.
"""

from __future__ import annotations

from collections.abc import Iterator
from operator import attrgetter
from typing import Any, cast

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from torchrl_rslstorage._compat import foreach_copy_
from torchrl_rslstorage.data.leaves import Key, show_all
from torchrl_rslstorage.rsl_rl.columns import DISTILLATION, RL, RolloutColumns
from torchrl_rslstorage.rsl_rl.mini_batches import (
    PaddedTrajectories,
    ShuffledCopies,
    as_hidden_state,
    starting_states,
)
from torchrl_rslstorage.rsl_rl.records import Batch, HiddenState, Transition

_shape = attrgetter("shape")


class RolloutStorage(RolloutColumns):
    """Drop-in for ``rsl_rl.storage.RolloutStorage`` of rsl-rl-lib 5.5.1, with a `RolloutBuffer` below it.

    rsl-rl-lib's ``PPO``, ``Distillation`` and runners work on it unchanged (`patch_rsl_rl`, or pass one to
    the algorithm's constructor) and end in the same parameters, bit for bit: it draws the same permutation
    in the same way, and hands out the same values in the same order and dtypes. One update gathers the
    window once, where rsl-rl-lib gathers it in every epoch; recurrent mini-batches are padded once.

    What differs: assigning to an attribute (``storage.returns = …``) copies into the memory that is there,
    so the shape must be the same; mini-batches are good until the next generator of the same storage is
    begun.

    State: filling (``step`` below T), full. ``clear()`` leads back to empty and forgets no values.

    Args:
        training_type: ``"rl"`` or ``"distillation"``, which decides what a step brings.
        num_envs: N.
        num_transitions_per_env: T, steps of the window.
        obs: observation groups ``[N, *]``, of which names, shapes and dtypes are read.
        actions_shape: of one environment's action.
        device: where the window lives.

    Raises:
        ValueError: a size below one, or a group that has not one entry an environment.
        MemoryError: the window does not fit; the message says what it takes.

    Examples:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from torchrl_rslstorage.rsl_rl import RolloutStorage
        >>> obs = TensorDict({"policy": torch.zeros(4, 3)}, [4])
        >>> storage = RolloutStorage("rl", 4, 2, obs, [1])
        >>> step = RolloutStorage.Transition(
        ...     obs, torch.zeros(4, 1), torch.ones(4), torch.zeros(4), torch.zeros(4, 1), torch.zeros(4)
        ... )
        >>> step.distribution_params = (torch.zeros(4, 1), torch.ones(4, 1))
        >>> for _ in range(2):
        ...     storage.add_transition(step)
        >>> [len(batch.observations) for batch in storage.mini_batch_generator(2, num_epochs=1)]
        [4, 4]
    """

    Batch = Batch
    Transition = Transition

    def __init__(
        self,
        training_type: str,
        num_envs: int,
        num_transitions_per_env: int,
        obs: TensorDictBase,
        actions_shape: tuple[int, ...] | list[int],
        device: str = "cpu",
    ) -> None:
        super().__init__(training_type, num_envs, num_transitions_per_env, obs, actions_shape, device)
        self._shuffled: ShuffledCopies | None = ShuffledCopies()
        self._padded: PaddedTrajectories | None = PaddedTrajectories()

    # -- writing ---------------------------------------------------------------------------------

    def add_transition(self, transition: Any) -> None:
        """Copies one step of all environments into the next row.

        Args:
            transition: a `Transition`, rsl-rl-lib's or ours.

        Raises:
            OverflowError: the window is full.
            KeyError, ValueError: observation groups or shapes are not those of the storage.
        """
        t = self.step
        if t >= self.num_transitions_per_env:
            raise OverflowError(
                f"The storage holds all of its {t} steps: call clear() before adding another transition."
            )
        groups = dict(transition.observations.items())
        if groups.keys() != self._group_names.keys():
            raise KeyError(
                f"A step brings the observation groups {show_all(groups)}, the storage holds "
                f"{show_all(self._group_names)}."
            )
        done = transition.dones.view(-1, 1)
        done = done if done.dtype is torch.bool else done != 0
        # In the order of `_written`. RSL-RL's time-outs are in the rewards by now: every end terminates.
        row = [groups[name] for name in self._group_names]
        row += (transition.actions, transition.rewards.view(-1, 1), done, done)
        if self.training_type == DISTILLATION:
            row.append(transition.privileged_actions)
        if self.training_type == RL:
            if self.distribution_params is None:
                self._make_group("distribution_params", transition.distribution_params)
            row += (transition.values, transition.actions_log_prob.view(-1, 1))
            row += transition.distribution_params
        if list(map(_shape, row)) != self._shapes:
            self._refuse(row)
        for suffix, states in zip("ac", transition.hidden_states, strict=True):
            if states is not None:
                self._copy_states(t, f"saved_hidden_state_{suffix}", _as_tuple(states))
        foreach_copy_(self._row(t), row)
        self._set_step(t + 1, self.buffer.write_count + self.num_envs)

    def _copy_states(self, t: int, name: str, row: tuple[Tensor, ...]) -> None:
        if self.__dict__[name] is None:
            self._make_group(name, row)
        foreach_copy_([column[t] for column in self.__dict__[name]], list(row))

    def clear(self) -> None:
        """Starts the next window; the values of the old one can still be read from the attributes."""
        self.buffer.empty()
        for key, (features, dtype) in self._derived.items():
            self.buffer.storage.derived(key, features=features, dtype=dtype)

    # -- reading ---------------------------------------------------------------------------------

    def generator(self) -> Iterator[Batch]:
        """The steps in the order of time, for distillation.

        Raises:
            ValueError: this is no storage for distillation.
        """
        self._require(DISTILLATION, "generator")
        for t in range(self.num_transitions_per_env):
            yield Batch(
                observations=self.observations[t],
                privileged_actions=self.privileged_actions[t],
                dones=self.dones[t],
            )

    def mini_batch_generator(self, num_mini_batches: int, num_epochs: int = 8) -> Iterator[Batch]:
        """Flat, shuffled mini-batches, the same ones in every epoch.

        Raises:
            ValueError: this is no storage for reinforcement learning, or more mini-batches were asked for
                than it can cut.
        """
        self._require(RL, "mini_batch_generator")
        size = self._size(self.num_envs * self.num_transitions_per_env, num_mini_batches, "transitions")
        cells = torch.randperm(num_mini_batches * size, device=self.device)
        # Lent to one generator at a time: another one that runs beside it gets memory of its own.
        copies, self._shuffled = self._shuffled or ShuffledCopies(), None
        try:
            parts = copies.shuffle(self._columns(), cells.split(size))
            batches = [self._cut(part, size) for part in parts]
            for epoch in range(num_epochs):
                if epoch:
                    copies.refresh()
                for observations, rest in batches:
                    # Of its own, since algorithms set fields in a batch.
                    yield Batch(observations.copy(), **rest)
        finally:
            self._shuffled = copies

    def recurrent_mini_batch_generator(self, num_mini_batches: int, num_epochs: int = 8) -> Iterator[Batch]:
        """Mini-batches of whole environments, their observations as padded trajectories.

        Raises:
            ValueError: this is no storage for reinforcement learning, or more mini-batches were asked for
                than it can cut.
        """
        self._require(RL, "recurrent_mini_batch_generator")
        size = self._size(self.num_envs, num_mini_batches, "environments")
        groups = cast("dict[str, Tensor]", dict(self.observations.items()))
        padded, self._padded = self._padded or PaddedTrajectories(), None
        try:
            plan = padded.pad(groups, self.dones != 0)
            # The trajectories that the mini-batches begin with, asked of the device once.
            bounds = torch.cat([plan.first, plan.first.new_full((1,), len(plan.start))])
            firsts = bounds[: num_mini_batches * size + 1 : size].tolist()
            states = [
                None if saved is None else starting_states([x.transpose(1, 2) for x in saved], plan.start)
                for saved in (self.saved_hidden_state_a, self.saved_hidden_state_c)
            ]
            columns = self._columns(observations=False)
            batches = []
            for i in range(num_mini_batches):
                first, last = firsts[i], firsts[i + 1]
                part = {key: column[:, i * size : (i + 1) * size] for key, column in columns.items()}
                _, rest = self._cut(part, size)
                hidden = tuple(None if s is None else as_hidden_state(s, first, last) for s in states)
                rest |= {"hidden_states": hidden, "masks": plan.mask[:, first:last]}
                batches.append((padded.trajectories(first, last, self.device), rest))
            for _ in range(num_epochs):
                for observations, rest in batches:
                    yield Batch(observations.copy(), **rest)
        finally:
            self._padded = padded

    def _columns(self, *, observations: bool = True) -> dict[Key, Tensor]:
        """What a mini-batch is made of, ``[T, N, *]``."""
        groups = self.observations.items() if observations else ()
        columns: dict[Key, Tensor] = {("observation", cast("str", key)): x for key, x in groups}
        names = ("actions", "values", "advantages", "returns", "actions_log_prob")
        columns.update({name: self.__dict__[name] for name in names})
        params = self.distribution_params
        if params is None:
            raise RuntimeError("The storage holds no step yet: add transitions before taking mini-batches.")
        columns.update({("distribution", str(i)): column for i, column in enumerate(params)})
        return columns

    def _cut(self, part: dict[Key, Tensor], size: int) -> tuple[TensorDict, dict[str, Any]]:
        """One mini-batch's part of `_columns` as its observations and its other fields."""
        groups = {key[1]: x for key, x in part.items() if key[0] == "observation"}
        params = tuple(x for key, x in part.items() if key[0] == "distribution")
        return TensorDict(groups, [size], device=self.device), {
            "actions": part["actions"],
            "values": part["values"],
            "advantages": part["advantages"],
            "returns": part["returns"],
            "old_actions_log_prob": part["actions_log_prob"],
            "old_distribution_params": params,
        }

    def _size(self, total: int, num_mini_batches: int, what: str) -> int:
        if not 1 <= num_mini_batches <= total:
            raise ValueError(f"{num_mini_batches} mini-batches cannot be cut from {total} {what}.")
        return total // num_mini_batches

    def _require(self, training_type: str, method: str) -> None:
        if self.training_type != training_type:
            raise ValueError(
                f"{method}() is of storages for {training_type!r}, but this one is for "
                f"{self.training_type!r}: build it with training_type={training_type!r}."
            )


def _as_tuple(states: HiddenState) -> tuple[Tensor, ...]:
    return states if isinstance(states, tuple) else (cast("Tensor", states),)
