"""The attributes of rsl-rl-lib's storage as columns of a RolloutBuffer.

rsl-rl-lib's name             in ``storage.buffer.window``
observations[group]           ("observation", group)        [T, N, *]    dtype of the group
actions                       action                        [T, N, *]    the default float dtype, as
privileged_actions            teacher_action                [T, N, *]    all of rsl-rl-lib's columns
values, returns, advantages   state_value, value_target, advantage       [T, N, 1]
actions_log_prob              action_log_prob               [T, N, 1]
rewards, dones                ("next", "reward" | "done")   [T, N, 1]    dones: the bool as uint8
distribution_params[i]        ("distribution", i)           [T, N, *]    from the first step that has them
saved_hidden_state_a[i], _c   ("hidden", "a" | "c", i)      [T, N, layers, H]; here [T, layers, N, H]
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NoReturn, cast

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from torchrl_rslstorage.data import RolloutBuffer
from torchrl_rslstorage.data.leaves import Key

RL, DISTILLATION = "rl", "distillation"
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


class RolloutColumns:
    """The memory of one window under rsl-rl-lib's names; assigning to one of them copies into it.

    Args:
        training_type: which columns there are.
        num_envs: N.
        num_transitions_per_env: T.
        obs: observation groups ``[N, *]``, of which names, shapes and dtypes are read.
        actions_shape: of one environment's action.
        device: where the window lives.
    """

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
        held = self.__dict__
        window = cast("TensorDictBase", self.buffer.storage.columns)
        groups = {key: window.get(("observation", key)) for key in obs.keys()}
        held["observations"] = TensorDict(groups, window.batch_size, device=device)
        held.update((name, window.get(key)) for name, key in _NAMES.items() if key in window.keys(True))
        held["dones"] = held["dones"].view(torch.uint8)
        self._done, self._terminated = (window.get(("next", key)) for key in ("done", "terminated"))
        held.update(dict.fromkeys(_GROUPS[1:]))
        if training_type == RL:
            held["distribution_params"] = None
            for name in ("returns", "advantages"):
                held[name] = self._new_column(_NAMES[name], torch.Size([1]))
        self._forget_rows()

    def _make_buffer(self, obs: TensorDictBase, device: str) -> RolloutBuffer:
        one, num_envs = torch.zeros(()), self.num_envs  # of the default float dtype, as rsl-rl-lib's columns
        action, scalar = one.expand(num_envs, *self.actions_shape), one.expand(num_envs, 1)
        row: dict[str, Any] = {"observation": dict(obs.items()), "action": action}
        if self.training_type == DISTILLATION:
            row["teacher_action"] = action
        if self.training_type == RL:
            row["state_value"], row["action_log_prob"] = scalar, scalar
        row["next"] = {"reward": scalar, "done": scalar.bool()}
        example = TensorDict(row, [num_envs])
        return RolloutBuffer(self.num_transitions_per_env, num_envs, device=device, example=example)

    @property
    def step(self) -> int:
        """Rows written into the present window; may be set, as rsl-rl-lib's counter may."""
        return self.buffer.num_rows

    @step.setter
    def step(self, value: int) -> None:
        if not 0 <= value <= self.num_transitions_per_env:
            raise ValueError(f"`step` must lie in [0, {self.num_transitions_per_env}], got {value}.")
        self._set_step(value, self.buffer.write_count)

    def _set_step(self, step: int, write_count: int) -> None:
        self.buffer.writer.load_state_dict({"cursor": step, "write_count": write_count})
        self.buffer.storage.set_num_rows(step)

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
            if name == "dones":
                self._terminated.copy_(self.dones)

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
        self._forget_rows()

    def _new_column(self, key: Key, features: torch.Size) -> Tensor:
        self._derived[key] = (features, torch.get_default_dtype())
        column = self.buffer.storage.derived(key, features=features, dtype=torch.get_default_dtype())
        return column.zero_()

    def _written(self) -> dict[str, Tensor]:
        """The columns that each step is copied into."""
        columns: dict[str, Tensor] = {f"observations[{name!r}]": x for name, x in self.observations.items()}
        columns |= {"actions": self.actions, "rewards": self.rewards}
        columns |= {"dones": self._done, "terminated": self._terminated}
        names = {RL: ("values", "actions_log_prob"), DISTILLATION: ("privileged_actions",)}
        columns |= {name: self.__dict__[name] for name in names.get(self.training_type, ())}
        params = self.__dict__.get("distribution_params") or ()
        return columns | {f"distribution_params[{i}]": x for i, x in enumerate(params)}

    def _forget_rows(self) -> None:
        """Looks at the columns that are written anew: one more has been made."""
        columns = self._written()
        self._group_names = dict.fromkeys(cast("Iterable[str]", self.observations.keys()))
        self._shapes = [column.shape[1:] for column in columns.values()]
        self._rows: list[list[Tensor] | None] = [None] * self.num_transitions_per_env

    def _row(self, t: int) -> list[Tensor]:
        """Row ``t`` of the columns that are written, as views that are made once."""
        row = self._rows[t]
        if row is None:
            row = self._rows[t] = [column[t] for column in self._written().values()]
        return row

    def _refuse(self, row: Sequence[Tensor]) -> NoReturn:
        came = {name: tuple(x.shape) for name, x in zip(self._written(), row, strict=False)}
        wrong = [
            f"`{name}` of shape {came[name]}, expected {tuple(column.shape[1:])}"
            for name, column in self._written().items()
            if name in came and came[name] != column.shape[1:]
        ]
        raise ValueError(
            f"A step brings {', '.join(wrong) or f'{len(row)} tensors'}: the storage holds {self.num_envs} "
            f"environments, and {len(self._shapes)} tensors of each step."
        )
