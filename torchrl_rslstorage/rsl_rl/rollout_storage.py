"""rsl-rl-lib's RolloutStorage over a RolloutBuffer: the same numbers, bit for bit, and faster mini-batches.

    rsl-rl-lib's name             in ``storage.buffer.window``
    observations[group]           ("observation", group)        [T, N, *]    dtype of the group
    actions                       action                        [T, N, *]    the default float dtype, as
    privileged_actions            teacher_action                [T, N, *]    all of rsl-rl-lib's columns
    values, returns, advantages   state_value, value_target, advantage       [T, N, 1]
    actions_log_prob              action_log_prob               [T, N, 1]
    rewards, dones                ("next", "reward" | "done")   [T, N, 1]    dones: the bool as uint8
    distribution_params[i]        ("distribution", i)           [T, N, *]    from the first step that has them
    saved_hidden_state_a[i], _c   ("hidden", "a" | "c", i)      [T, N, layers, H]; here [T, layers, N, H]

Kept to the letter, since rsl-rl-lib's numbers are what this class is for: of ``T·N`` cells that
``num_mini_batches`` does not divide the last ones are never seen, and of as many environments the last ones;
a window may be read before it is full; states that were not given for a row are those of an earlier window.
`MiniBatchSampler`, `TrajectorySampler` and `RolloutBuffer` have none of these faults.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, cast

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from torchrl_rslstorage._compat import foreach_copy_
from torchrl_rslstorage.data import RolloutBuffer
from torchrl_rslstorage.data.leaves import Key
from torchrl_rslstorage.rsl_rl.mini_batches import (
    PaddedTrajectories,
    ShuffledCopies,
    as_hidden_state,
    starting_states,
)
from torchrl_rslstorage.rsl_rl.records import Batch, HiddenState, Transition

_RL, _DISTILLATION = "rl", "distillation"
_NAMES: dict[str, Key] = {
    "actions": "action",
    "privileged_actions": "teacher_action",
    "values": "state_value",
    "actions_log_prob": "action_log_prob",
    "returns": "value_target",
    "advantages": "advantage",
    "rewards": ("next", "reward"),
    "dones": ("next", "done"),
}
"""rsl-rl-lib's attributes that are one column, and how the buffer calls them."""

_GROUPS = ("distribution_params", "saved_hidden_state_a", "saved_hidden_state_c")
"""Those that are several columns, or None before the first step that has them."""


class RolloutStorage:
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

    observations: TensorDictBase
    """Observation groups ``[T, N]``."""
    actions: Tensor
    rewards: Tensor
    dones: Tensor
    """``[T, N, 1]`` uint8."""
    values: Tensor
    """Like all that follow, of storages for ``"rl"`` alone."""
    actions_log_prob: Tensor
    returns: Tensor
    advantages: Tensor
    distribution_params: tuple[Tensor, ...] | None
    privileged_actions: Tensor
    """Of storages for ``"distillation"`` alone."""
    saved_hidden_state_a: list[Tensor] | None
    """The actor's states before each step, ``[T, layers, N, H]``; None before there was one."""
    saved_hidden_state_c: list[Tensor] | None
    """The critic's."""

    def __init__(
        self,
        training_type: str,
        num_envs: int,
        num_transitions_per_env: int,
        obs: TensorDictBase,
        actions_shape: tuple[int, ...] | list[int],
        device: str = "cpu",
    ) -> None:
        self.training_type = training_type
        self.device = device
        self.num_transitions_per_env = num_transitions_per_env
        self.num_envs = num_envs
        self.actions_shape = actions_shape
        self.buffer = self._make_buffer(obs, device)
        """The window, as a TorchRL replay buffer."""
        self._derived: dict[Key, tuple[torch.Size, torch.dtype]] = {}
        self._shuffled: ShuffledCopies | None = ShuffledCopies()
        self._padded: PaddedTrajectories | None = PaddedTrajectories()
        held = self.__dict__
        window = cast("TensorDictBase", self.buffer.storage.columns)
        groups = {key: window.get(("observation", key)) for key in obs.keys()}
        held["observations"] = TensorDict(groups, window.batch_size, device=device)
        held.update((name, window.get(key)) for name, key in _NAMES.items() if key in window.keys(True))
        held["dones"] = held["dones"].view(torch.uint8)
        held.update(dict.fromkeys(_GROUPS[1:]))
        if training_type == _RL:
            held["distribution_params"] = None
            for name in ("returns", "advantages"):
                held[name] = self._new_column(_NAMES[name], torch.Size([1]))
        self._root = {key: window.get(key) for key in self._root_keys(obs)}
        self._never = torch.zeros(num_envs, 1, dtype=torch.bool, device=device)

    def _make_buffer(self, obs: TensorDictBase, device: str) -> RolloutBuffer:
        one, num_envs = torch.zeros(()), self.num_envs  # of the default float dtype, as rsl-rl-lib's columns
        action, scalar = one.expand(num_envs, *self.actions_shape), one.expand(num_envs, 1)
        row: dict[str, Any] = {"observation": dict(obs.items()), "action": action}
        if self.training_type == _DISTILLATION:
            row["teacher_action"] = action
        if self.training_type == _RL:
            row["state_value"], row["action_log_prob"] = scalar, scalar
        row["next"] = {"reward": scalar, "done": scalar.bool()}
        example = TensorDict(row, [num_envs])
        return RolloutBuffer(self.num_transitions_per_env, num_envs, device=device, example=example)

    def _root_keys(self, obs: TensorDictBase) -> list[Key]:
        extra = {_RL: ["state_value", "action_log_prob"], _DISTILLATION: ["teacher_action"]}
        return [*(("observation", key) for key in obs.keys()), "action", *extra.get(self.training_type, [])]

    # -- attributes ------------------------------------------------------------------------------

    @property
    def step(self) -> int:
        """Rows written into the present window; may be set, as rsl-rl-lib's counter may."""
        return self.buffer.num_rows

    @step.setter
    def step(self, value: int) -> None:
        if not 0 <= value <= self.num_transitions_per_env:
            raise ValueError(f"`step` must lie in [0, {self.num_transitions_per_env}], got {value}.")
        writer = self.buffer.writer
        writer.load_state_dict({"cursor": value, "write_count": writer.write_count})
        self.buffer.storage.set_num_rows(value)

    def __setattr__(self, name: str, value: Any) -> None:
        """Copies what is assigned to a column into its memory, which the buffer shares."""
        held = self.__dict__
        if name == "observations" and name in held:
            groups = list(self.observations.keys())
            self._assign(name, [self.observations[key] for key in groups], [value[key] for key in groups])
        elif name in _NAMES and name in held:
            self._assign(name, [held[name]], [value])
        elif name in _GROUPS and name in held:
            self._assign_group(name, value)
        else:
            super().__setattr__(name, value)

    def _assign(self, name: str, columns: Sequence[Tensor], values: Sequence[Tensor]) -> None:
        for column, value in zip(columns, values, strict=True):
            if value.shape != column.shape:
                raise ValueError(
                    f"`{name}` was assigned a tensor of shape {tuple(value.shape)}, but its column is "
                    f"{tuple(column.shape)}: assigning copies into the column, so both must be the same."
                )
        with torch.no_grad():
            for column, value in zip(columns, values, strict=True):
                column.copy_(value != 0 if name == "dones" else value)

    def _assign_group(self, name: str, values: Sequence[Tensor] | None) -> None:
        if values is None:
            self.__dict__[name] = None
            return
        if self.__dict__[name] is None:
            self._make_group(name, [value[0] for value in values])
        self._assign(name, self.__dict__[name], values)

    def _make_group(self, name: str, row: Sequence[Tensor]) -> None:
        """Makes the columns of a group that first appears with ``row``."""
        made: list[Tensor] = []
        for i, value in enumerate(row):
            if name == "distribution_params":
                made.append(self._new_column(("distribution", str(i)), value.shape[1:]))
            else:
                layers, _, *features = value.shape
                column = self._new_column(("hidden", name[-1], str(i)), torch.Size([layers, *features]))
                made.append(column.transpose(1, 2))
        self.__dict__[name] = tuple(made) if name == "distribution_params" else made

    def _new_column(self, key: Key, features: torch.Size) -> Tensor:
        self._derived[key] = (features, torch.get_default_dtype())
        return self.buffer.storage.derived(key, features=features, dtype=torch.get_default_dtype())

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
        reward, done = (x.view(-1, 1) for x in (transition.rewards, transition.dones))
        if not len(reward) == len(done) == self.num_envs:
            raise ValueError(
                f"A step brings one reward and one done flag for each of {self.num_envs} environments, got "
                f"{tuple(transition.rewards.shape)} and {tuple(transition.dones.shape)}."
            )
        row: dict[Key, Tensor] = {("observation", key): x for key, x in transition.observations.items()}
        row["action"] = transition.actions
        if self.training_type == _DISTILLATION:
            row["teacher_action"] = transition.privileged_actions
        if self.training_type == _RL:
            row["state_value"] = transition.values
            row["action_log_prob"] = transition.actions_log_prob.view(-1, 1)
            self._copy_group(t, "distribution_params", transition.distribution_params)
        for suffix, states in zip("ac", transition.hidden_states, strict=True):
            if states is not None:
                self._copy_group(t, f"saved_hidden_state_{suffix}", _as_tuple(states))
        for key, column in self._root.items():
            if key in row and row[key].dtype is not column.dtype:
                row[key] = row[key].to(column.dtype)
        done = done if done.dtype is torch.bool else done != 0
        writer = self.buffer.writer
        writer.write_root_leaves(row)
        # RSL-RL's time-outs are in the rewards by now: every end is one that nothing is bootstrapped from.
        after: dict[Key, Tensor] = {"reward": reward.to(self.rewards.dtype), "done": done}
        writer.write_next_leaves({**after, "terminated": done, "truncated": self._never})

    def _copy_group(self, t: int, name: str, row: tuple[Tensor, ...]) -> None:
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
        self._require(_DISTILLATION, "generator")
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
        self._require(_RL, "mini_batch_generator")
        size = self._size(self.num_envs * self.num_transitions_per_env, num_mini_batches, "transitions")
        cells = torch.randperm(num_mini_batches * size, device=self.device)
        # Lent to one generator at a time: another one that runs beside it gets memory of its own.
        copies, self._shuffled = self._shuffled or ShuffledCopies(), None
        try:
            copied = copies.shuffle(self._columns(), cells)
            batches = [
                self._cut({key: column[i * size : (i + 1) * size] for key, column in copied.items()}, size)
                for i in range(num_mini_batches)
            ]
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
        self._require(_RL, "recurrent_mini_batch_generator")
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
