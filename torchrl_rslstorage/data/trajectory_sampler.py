"""TrajectorySampler: padded mini-batches of whole trajectories, for recurrent policies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.utils import NestedKey
from torch import Tensor
from torchrl.data import Storage

from torchrl_rslstorage.data import memory
from torchrl_rslstorage.data.batch_views import balanced
from torchrl_rslstorage.data.final_observations import FinalObservations
from torchrl_rslstorage.data.gathering import gather_rows
from torchrl_rslstorage.data.leaves import Key, nest, select
from torchrl_rslstorage.data.samplers import RolloutSampler
from torchrl_rslstorage.data.storages import RolloutTensorStorage
from torchrl_rslstorage.data.trajectories import PlannedGroups, plan_groups
from torchrl_rslstorage.data.trajectory_layouts import attach_plan
from torchrl_rslstorage.data.updates import at_least_one, checked_keys


class TrajectorySampler(RolloutSampler):
    """Mini-batches ``[L, B]`` of whole trajectories, padded: every environment once per epoch.

        environments   0 1 2 │ 3 4          N = 5 in 2 mini-batches, balanced
        trajectories   each environment's T steps, cut after ``done``; B of them, L the longest

    It splits the *environments*, not the samples, as RSL-RL does (rsl_rl 5.5.1,
    storage/rollout_storage.py, ``recurrent_mini_batch_generator``), but drops none of them, pads to the
    longest trajectory instead of T, and cuts and pads once per window instead of once per update and epoch.

    A mini-batch is a locked TensorDict ``[L, B]``:

    | key | shape | |
    |---|---|---|
    | everything asked for | `[L, B, *]` | zeros behind a trajectory's end |
    | `mask` | `[L, B]` bool | which places hold a step |
    | `is_init` | `[L, B, 1]` bool | true only in row 0, where the trajectory starts an episode |
    | recurrent states | `[L, B, layers, H]` | in row 0 the state before it, which is all that is read |

    States that are kept only at starts (``state_keys`` of the buffer) show that one in every row, without a
    copy. Trajectories also end where ``is_init`` says that an episode starts without a ``done`` before it.
    A mini-batch is a view of memory that is used again: it is good until the next update begins, and with
    ``reshuffle`` until the next epoch does.

    TorchRL's recurrent modules read it as ``mini_batch.transpose(0, 1)`` under ``set_recurrent_mode(True)``.

    Args:
        num_mini_batches: groups of environments.
        num_epochs: passes over the window in one update.
        reshuffle: deal the environments out anew for each epoch, which pads anew. Otherwise groups are
            consecutive environments, as RSL-RL's.
        keys: what mini-batches hold beside ``mask`` and ``is_init``; ``None`` takes every root entry,
            ``advantage`` and ``value_target`` included.

    Raises:
        ValueError: a count below one; no keys; more mini-batches than environments, or an entry that is
            called "mask" (when an update begins).

    Examples:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from torchrl_rslstorage import RolloutBuffer, TrajectorySampler
        >>> buffer = RolloutBuffer(2, 5, sampler=TrajectorySampler(num_mini_batches=2))
        >>> flags = {"reward": torch.ones(5, 2, 1), "done": torch.zeros(5, 2, 1, dtype=torch.bool)}
        >>> steps = TensorDict({"observation": torch.zeros(5, 2, 4), "next": flags}, [5, 2])
        >>> _ = buffer.extend(steps)
        >>> [tuple(batch.batch_size) for batch in buffer]
        [(2, 3), (2, 2)]
    """

    def __init__(
        self,
        num_mini_batches: int = 1,
        num_epochs: int = 1,
        reshuffle: bool = False,
        keys: Sequence[NestedKey] | None = None,
    ) -> None:
        super().__init__(num_epochs)
        self.num_mini_batches = at_least_one("num_mini_batches", num_mini_batches)
        self.reshuffle = reshuffle
        self.keys = checked_keys(keys)
        self._batches: list[TensorDict] | None = None
        self._rooms: dict[Key, Tensor] = {}

    @property
    def num_batches(self) -> int:
        """Mini-batches of one update, ``num_epochs x num_mini_batches``."""
        return self.num_epochs * self.num_mini_batches

    def begin(self, storage: RolloutTensorStorage) -> None:
        """Deals out the environments of the first epoch."""
        if self.num_mini_batches > storage.num_envs:
            raise ValueError(
                f"{self.num_mini_batches} mini-batches cannot be cut from {storage.num_envs} environments: "
                "each takes whole environments. Lower num_mini_batches or use more environments."
            )
        self._deal(storage)

    def mini_batch(self, storage: RolloutTensorStorage, position: int) -> TensorDictBase:
        """The mini-batch number ``position``."""
        epoch, number = divmod(position, self.num_mini_batches)
        if self.reshuffle and number == 0 and epoch:
            self._deal(storage)
        if self._batches is None:
            self._batches = self._cut(storage)
        return self._batches[number]

    def sample(self, storage: Storage, batch_size: int | None = None) -> tuple[Any, dict[str, Any]]:
        """Not possible over a stock buffer, whose indices cannot pad.

        Raises:
            TypeError: always.
        """
        raise TypeError(
            "TrajectorySampler pads trajectories, which takes a RolloutBuffer, not a stock buffer."
        )

    def _deal(self, storage: RolloutTensorStorage) -> None:
        self._batches = None
        if not self.reshuffle:
            self._draw = torch.arange(storage.num_envs, device=storage.device)
            return
        generator = self.generator
        source = storage.device if generator is None else generator.device
        order = torch.randperm(storage.num_envs, generator=generator, device=source)
        self._draw = order.to(storage.device)

    def _cut(self, storage: RolloutTensorStorage) -> list[TensorDict]:
        assert self._draw is not None
        columns = storage.root_columns()
        states = storage.state_keys
        held = [*columns, *states]
        names = held if self.keys is None else select(held, [key for key in self.keys if key != "is_init"])
        if "mask" in names:
            raise ValueError(
                "This window has an entry 'mask', which is where a padded mini-batch keeps its own: rename "
                "it (torchrl.envs.RenameTransform), or leave it out of `keys`."
            )
        done = _ends(storage.window().get(("next", "done")), columns.get("is_init"))
        groups = plan_groups(done, self._draw, balanced(storage.num_envs, self.num_mini_batches))
        wanted = [name for name in names if name in states]
        first = self._first_states(storage.start_states(), storage.num_envs, wanted, groups) if wanted else {}
        gathered = {
            name: groups.pad(columns[name], out=self._room(name, len(groups.index), columns[name], skip=2))
            for name in names
            if name in columns and name != "is_init"
        }
        padded = {name: groups.split(places) for name, places in gathered.items()}
        padded |= first
        padded["mask"] = [plan.mask for plan in groups.plans]
        padded["is_init"] = _is_init(columns.get("is_init"), groups)
        batches: list[TensorDict] = []
        for number, plan in enumerate(groups.plans):
            entries = {name: parts[number] for name, parts in padded.items()}
            attach_plan(plan.mask, plan)
            batch = TensorDict(nest(entries), plan.mask.shape, device=plan.mask.device)
            batches.append(batch.lock_())
        return batches

    def _room(self, name: Key, places: int, like: Tensor, *, skip: int) -> Tensor:
        """``[places, *]`` in memory that later windows use again, and that grows with the longest."""
        room, features = self._rooms.get(name), like.shape[skip:]
        if room is None or len(room) < places or room.shape[1:] != features or room.dtype != like.dtype:
            room = memory.empty((places, *features), dtype=like.dtype, device=like.device)
            self._rooms[name] = room
        return room[:places]

    def _first_states(
        self, starts: FinalObservations, num_envs: int, names: Sequence[Key], groups: PlannedGroups
    ) -> dict[Key, list[Tensor]]:
        """The states ``[L, B, layers, H]`` of the planned trajectories, seen from every row of them."""
        # In order, since rows are written in order.
        places = torch.searchsorted(starts.t * num_envs + starts.n, groups.start)
        sizes = [len(plan.start) for plan in groups.plans]
        found: dict[Key, list[Tensor]] = {}
        for name in names:
            states = cast("Tensor", starts.observation.get(name))
            first = gather_rows(states, places, out=self._room(name, len(places), states, skip=1))
            found[name] = [
                part.unsqueeze(0).expand(len(plan.mask), *part.shape)
                for part, plan in zip(first.split(sizes), groups.plans, strict=True)
            ]
        return found

    def _forget(self) -> None:
        self._batches = None

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(num_mini_batches={self.num_mini_batches}, "
            f"num_epochs={self.num_epochs}, reshuffle={self.reshuffle})"
        )


def _ends(done: Tensor, is_init: Tensor | None) -> Tensor:
    """``[T, N, 1]``: done, or the last step before an episode that was started from outside."""
    if is_init is None or is_init.dtype is not torch.bool or is_init.shape != done.shape:
        return done
    ends = done.clone()
    ends[:-1] |= is_init[1:]
    return ends


def _is_init(column: Tensor | None, groups: PlannedGroups) -> list[Tensor]:
    """``[L, B, 1]`` each: no trajectory starts an episode but in its first row, which is where it was cut."""
    num_steps, num_envs = len(groups.plans[0].inverse), groups.plans[0].num_envs
    if column is not None and column.dtype is torch.bool and column.numel() == num_steps * num_envs:
        first = gather_rows(column.view(-1), groups.start)
    else:
        # Nobody wrote the flags: a trajectory that starts inside the window starts an episode.
        first = groups.start >= num_envs
    flags = groups.split(torch.zeros_like(groups.index, dtype=torch.bool).unsqueeze(-1))
    for part, starts in zip(flags, first.split([len(plan.start) for plan in groups.plans]), strict=True):
        part[0, :, 0] = starts
    return flags
