"""The preallocated ``[T, N]`` rollout: columns, the rows of them, the flat view and its shuffled copy.

Three kinds of memory live here, all allocated once:

    columns     [T, N, *]   what a step writes: root half (observations, action, …) and next half
    derived     [T, N, *]   what is computed from a full window: advantage, value_target
    workspace   [T·N, *]    one shuffled copy of the columns that a consumer reads

The derived columns are taken off the rollout when it is emptied, so that a window which nobody computed
advantages for raises a KeyError instead of showing the ones of the window before.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from multiprocessing.context import get_spawning_popen
from pathlib import Path
from typing import Any, Literal, cast, get_args

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.utils import NestedKey
from torch import Tensor

from torchrl_rslstorage._compat import Columns, foreach_copy_
from torchrl_rslstorage.data.columns import HalfColumns, Workspace, refuse_keys
from torchrl_rslstorage.data.final_observations import CellTable, FinalObservations
from torchrl_rslstorage.data.leaves import (
    Key,
    canonical,
    leaves,
    nbytes,
    nest,
    show,
    show_all,
)
from torchrl_rslstorage.data.row_plan import RowPlan
from torchrl_rslstorage.data.rows import SIGNALS, next_leaves, root_leaves, split_next, under_next
from torchrl_rslstorage.data.start_states import StartStates
from torchrl_rslstorage.data.trajectories import zeros_with_zero_row

KeptFlag = Literal["truncated", "done"]
"""Of which steps within the window the final observations are kept."""
_DERIVED_BEFORE_USE = 2
"""Float32 ``[T, N, 1]`` columns that every window gets: ``advantage`` and ``value_target``."""


class RolloutTensorStorage(Columns):
    """One rollout window as a TensorDict of batch size ``[T, N]``, allocated once and filled row by row.

    State: empty (0 rows), filling (1 to T - 1), full (T). ``buffer.empty()`` leads back to empty. Columns
    are made by the first row written, or at once from an example.

    Args:
        num_steps: T, rows of the window.
        num_envs: N, environments.
        device: where the window lives.
        state_keys: recurrent states, or groups of them, that are kept only where a trajectory starts.

    Raises:
        ValueError: a size below one.

    Examples:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from torchrl_rslstorage import RolloutTensorStorage
        >>> storage = RolloutTensorStorage(num_steps=2, num_envs=3)
        >>> storage.write_root(0, {"observation": torch.zeros(3, 4)})
        >>> storage.columns["observation"].shape
        torch.Size([2, 3, 4])
    """

    def __init__(
        self,
        num_steps: int,
        num_envs: int,
        *,
        device: torch.device | str = "cpu",
        state_keys: Sequence[NestedKey] = (),
    ) -> None:
        for name, value in (("num_steps", num_steps), ("num_envs", num_envs)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"`{name}` must be an integer of at least 1, got {value!r}.")
        super().__init__(num_steps * num_envs, device=device, ndim=2)
        self.num_steps = num_steps
        self.num_envs = num_envs
        self.num_rows = 0
        self._root: HalfColumns | None = None
        self._next: HalfColumns | None = None
        self._final_keys: dict[Key, None] = {}
        self._row_plan: RowPlan | None = None
        self._row_views: list[list[Tensor] | None] = []
        self._derived: dict[Key, Tensor] = {}
        self._written: frozenset[Key] = frozenset()
        self._workspace = Workspace()
        self._final = CellTable(num_envs, torch.device(self.device))
        self._starts = StartStates(num_envs, torch.device(self.device), state_keys)
        self._kept_flag: KeptFlag = "truncated"

    # -- allocation ------------------------------------------------------------------------------

    def allocate(self, example: TensorDictBase) -> None:
        """Makes every column now, from one row ``[N]`` with its ``next``; nothing is written.

        Raises:
            MemoryError: the window does not fit; the message says how many bytes it takes.
        """
        root, _, columns, finals = self._halves_of(example)
        self._starts.apart(0, root_leaves(example), first=True)
        total = self.window_nbytes(example)
        self._make_root(root, total)
        self._make_next(columns, finals, total)

    def window_nbytes(self, example: TensorDictBase | None = None) -> int:
        """Bytes of one window: columns, advantage, value target, the last row's observations, first states.

        Args:
            example: a row ``[N]`` with its ``next``; may be left out once columns exist.

        Raises:
            RuntimeError: no example was given and nothing is allocated yet.
        """
        if example is not None:
            root, states, columns, finals = self._halves_of(example)
            return self._total(nbytes(root) + nbytes(columns)) + self._kept(nbytes(finals) + nbytes(states))
        if self._root is None or self._next is None:
            raise RuntimeError(
                "The size of a window is not known before the first row. Pass an example row: "
                "buffer.nbytes(example), a TensorDict [N] with its `next`."
            )
        root, after = ({key: x[0] for key, x in half.columns.items()} for half in (self._root, self._next))
        finals = {key: root[key] for key in self._final_keys if key in root}
        states = self._starts.nbytes() + self._starts.nbytes([k for k in self._final_keys if k not in root])
        return self._total(nbytes(root) + nbytes(after)) + self._kept(nbytes(finals) + states)

    def _halves_of(self, example: TensorDictBase) -> tuple[Mapping[Key, Tensor], ...]:
        """A row's columns at the root, its states, its columns under ``next``, its final observations."""
        root, after = root_leaves(example), next_leaves(example)
        columns, finals = split_next(after, root)
        return *self._starts.split(root), columns, finals

    def _total(self, row_nbytes: int) -> int:
        """Bytes of all columns: T rows and one cell of zeros each."""
        cell = row_nbytes // self.num_envs + _DERIVED_BEFORE_USE * 4
        return cell * (self.max_size + 1)

    def _kept(self, row_nbytes: int) -> int:
        """Bytes of what is kept of whole rows, with the room beside them."""
        return row_nbytes // self.num_envs * self._final.num_places

    def _make_root(self, row: Mapping[Key, Tensor], total: int | None = None) -> None:
        if not row:
            raise KeyError(
                "A row needs entries of its own beside `next` (observations, action, …); it came with none."
            )
        self._root = HalfColumns("root", self._new_columns(row, total), row)
        self._attach()

    def _make_next(
        self, columns: Mapping[Key, Tensor], finals: Mapping[Key, Tensor], total: int | None = None
    ) -> None:
        missing = [name for name in ("reward", "done") if name not in columns]
        if missing:
            raise KeyError(
                f"A row's `next` needs reward and done, but {show_all(missing)} is missing. "
                f"It holds {show_all([*columns, *finals])}."
            )
        for name in SIGNALS:
            if name in columns and columns[name].shape != (self.num_envs, 1):
                raise ValueError(
                    f"('next', '{name}') has shape {tuple(columns[name].shape)}, expected "
                    f"{(self.num_envs, 1)}: one value an environment, with the trailing 1."
                )
        self._next = HalfColumns("next", self._new_columns(columns, total), columns)
        self._final_keys = dict.fromkeys(finals)
        self._attach()

    def _new_columns(self, row: Mapping[Key, Tensor], total: int | None = None) -> dict[Key, Tensor]:
        made: dict[Key, Tensor] = {}
        total = self._total(nbytes(row)) if total is None else total
        for key, value in row.items():
            if value.shape[:1] != (self.num_envs,):
                raise ValueError(
                    f"{show(key)} has shape {tuple(value.shape)}, expected [N = {self.num_envs}, ...]: "
                    "a row holds one entry an environment."
                )
            made[key] = self._zeros((self.num_steps, *value.shape), value.dtype, total)
        return made

    def _zeros(self, shape: Sequence[int], dtype: torch.dtype, total: int) -> Tensor:
        try:
            # A view made in inference mode could never again be written outside of it.
            with torch.inference_mode(False):
                return zeros_with_zero_row(shape, dtype=dtype, device=self.device)
        except (RuntimeError, MemoryError) as error:
            raise MemoryError(
                f"A window of {self.num_steps} steps x {self.num_envs} environments takes "
                f"{total:,} bytes ({total / 2**30:.1f} GiB), which {self.device} has not got. "
                "Use fewer steps or environments, or smaller observations."
            ) from error

    def _attach(self) -> None:
        flat: dict[Key, Tensor] = dict(self._root.columns) if self._root else {}
        if self._next is not None:
            for key, column in self._next.columns.items():
                flat[under_next(key)] = column
        names = cast("Any", ["time", None])  # tensordict types names without None, which is "no name"
        columns = TensorDict(nest(flat), [self.num_steps, self.num_envs], device=self.device, names=names)
        self._set_columns(columns)
        self._written = frozenset(flat)
        self._workspace.forget()
        self._row_plan = None
        self._row_views = [None] * self.num_steps

    # -- writing ---------------------------------------------------------------------------------

    def write_row(self, t: int, data: TensorDictBase) -> None:
        """Copies the whole row ``t`` from a TensorDict ``[N]`` with its ``next``."""
        plan = self._row_plan
        tensors = None if plan is None else plan.read(data)
        if tensors is None:
            self._write_leaves(t, data)
            return
        views = self._row_views[t]
        if views is None:
            assert self._root is not None and self._next is not None
            views = self._row_views[t] = [*self._root.row(t), *self._next.row(t)]
        num_columns = len(views)
        foreach_copy_(views, tensors[:num_columns])
        flags = None if t == self.num_steps - 1 else tensors[self._kept_at]
        final = self._final
        if flags is None or not final.is_passed_over(flags):
            final.record(t, flags, dict(zip(self._final_keys, tensors[num_columns:], strict=True)))

    def _write_leaves(self, t: int, data: TensorDictBase) -> None:
        """`write_row` by the names of the leaves, which says what is wrong with a row."""
        after, root = next_leaves(data), root_leaves(data)
        self.write_root(t, root)
        self.write_next(t, after)
        assert self._root is not None and self._next is not None
        stored = [*self._root.columns, *map(under_next, self._next.columns)]
        self._kept_at = stored.index(("next", self._kept_flag))
        brought = data.get("next")
        # Flags that have to be made of others are not read off the row.
        if all(name in brought.keys() for name in ("terminated", "truncated")) and not self.state_keys:
            self._row_plan = RowPlan(data, [*stored, *map(under_next, self._final_keys)])

    def write_root(self, t: int, row: Mapping[Key, Tensor]) -> None:
        """Copies the first half of row ``t``: what stood before ``env.step``, leaves ``[N, *]``."""
        first = self._root is None or (t == 0 and self._next is None)  # a refused first row leaves no layout
        row, states = self._starts.apart(t, row, first=first)
        if first:
            self._make_root(row)
        assert self._root is not None
        self._root.copy_row(t, row)
        if states:
            # The window before may have ended anywhere: every environment's first state is kept.
            ended = None if t == 0 or self._next is None else self._next.columns["done"][t - 1]
            is_init = row.get("is_init")
            if ended is not None and is_init is not None and is_init.shape == ended.shape:
                ended = ended | is_init.to(ended.device)  # an episode may be started from outside, too
            self._starts.open_row(t, ended, states)

    def write_next(self, t: int, after: Mapping[Key, Tensor]) -> None:
        """Copies the second half of row ``t``: signals into columns, final observations sparsely."""
        assert self._root is not None
        columns, observations = split_next(after, self._root.columns)
        for key in self._starts.layout:
            if key in columns:
                observations[key] = columns.pop(key)
        for key, value in observations.items():
            if key in self._starts.layout:
                self._starts.check(t, key, value)
            else:
                self._root.check(t, key, value, half="next")
        if self._next is None:
            self._make_next(columns, observations)
        assert self._next is not None
        if observations.keys() != self._final_keys.keys():
            refuse_keys("next", t, observations, self._final_keys)
        self._next.copy_row(t, columns)
        self._final.record(t, None if t == self.num_steps - 1 else columns[self._kept_flag], observations)
        self._starts.close_row()

    def keep_only_starts(self, keys: Sequence[NestedKey]) -> None:
        """Declares recurrent states that are kept only where a trajectory starts, like ``state_keys``.

        Raises:
            RuntimeError: rows were written already, with or without them.
        """
        self._starts.declare(keys, too_late=self._root is not None)

    def keep_final_observations(self, of: KeptFlag) -> None:
        """Keeps the final observations of truncated steps alone, as at first, or of all that are done.

        Advantages need none of a terminated step, whose value is zero; `transition_pairs` does.

        Raises:
            RuntimeError: rows were written already, some of them terminated perhaps.
            ValueError: ``of`` is neither "truncated" nor "done".
        """
        if of not in get_args(KeptFlag):
            raise ValueError(f"`of` must be one of {get_args(KeptFlag)}, got {of!r}.")
        if of != self._kept_flag and self._root is not None:
            raise RuntimeError(
                "Which final observations are kept cannot change any more: rows of this buffer have been "
                "written. Call keep_final_observations before the first one."
            )
        self._kept_flag = of

    @property
    def state_keys(self) -> list[Key]:
        """The recurrent states that are kept only where a trajectory starts, once a row is written."""
        return list(self._starts.layout)

    def start_states(self) -> FinalObservations:
        """The recurrent states in every cell in which a trajectory of the window starts, by (t, n)."""
        return self._starts.read()

    def set_num_rows(self, num_rows: int) -> None:
        """Records how many rows are filled."""
        self.num_rows = num_rows
        self._len = num_rows * self.num_envs
        # Only a full window is read by samplers that cache what they derive from it.
        if num_rows in (0, self.num_steps):
            self._changed()

    # -- derived columns -------------------------------------------------------------------------

    def derived(
        self, key: NestedKey, *, features: Sequence[int] = (1,), dtype: torch.dtype = torch.float32
    ) -> Tensor:
        """The column ``[T, N, *features]`` for a computed key, part of the rollout until it is emptied.

        Its memory is reused by later windows; what it holds on return is not defined.

        Raises:
            ValueError: the key is one that rows write.
            RuntimeError: nothing is stored yet.
        """
        name = canonical(key)
        if name in self._written:
            raise ValueError(
                f"{show(key)} cannot be computed into: the rows of this rollout write it. Choose another key."
            )
        shape = (self.num_steps, self.num_envs, *features)
        column = self._derived.get(name)
        if column is None or column.shape != shape or column.dtype != dtype:
            column = self._zeros(shape, dtype, self._total(0) if self._next is None else self.window_nbytes())
            self._derived[name] = column
        columns = self.columns
        if columns is None:
            raise RuntimeError("Nothing is stored yet: write a window before computing on it.")
        if columns.get(name, None) is not column:
            columns.set(name, column)
        return column

    def _computed(self) -> dict[Key, Tensor]:
        """The columns that no row writes: those of `derived`, and what users set in the window."""
        columns = leaves(self.columns) if self.columns is not None else {}
        return {key: column for key, column in columns.items() if key not in self._written}

    # -- reading ---------------------------------------------------------------------------------

    @property
    def is_full(self) -> bool:
        """Whether all T rows are written."""
        return self.num_rows == self.num_steps

    @property
    def final_observations(self) -> FinalObservations:
        """The observations of truncated steps (`keep_final_observations`) and of the window's last row."""
        return self._final.read()

    def window(self) -> TensorDictBase:
        """The full window, as views of the storage.

        Raises:
            RuntimeError: it is not full; both counts are named.
        """
        columns = self.columns
        if not self.is_full or columns is None:
            raise RuntimeError(
                f"The window holds {self.num_rows} of {self.num_steps} rows "
                f"({self.num_rows * self.num_envs} of {self.max_size} transitions): fill it first."
            )
        return columns

    def root_columns(self) -> dict[Key, Tensor]:
        """Every column outside ``next`` by name, derived ones included: what a mini-batch can hold."""
        return leaves(self.window(), skip=frozenset({"next"}))

    def shuffled(self, cells: Tensor, keys: Sequence[NestedKey] | None) -> dict[Key, Tensor]:
        """The flat cells ``cells`` of the window, copied once into a workspace that is reused.

        Args:
            cells: ``[M]`` int64, positions in ``[0, T·N)`` with cell = t·N + n.
            keys: what to copy; ``None`` takes every root column but ``is_init``.

        Returns:
            Leaves ``[M, *]`` by name: views of the workspace, good until the next call.

        Raises:
            RuntimeError: the window is not full.
            KeyError: a key is not there.
        """
        wanted = None if keys is None else tuple(canonical(key) for key in keys)
        return self._workspace.gather(self.root_columns(), wanted).run(cells)

    # -- emptying and saving ---------------------------------------------------------------------

    def _made_of(self) -> dict[str, Any]:
        sizes = {"num_steps": self.num_steps, "num_envs": self.num_envs}
        return {**sizes, "device": self.device, "state_keys": self._starts.declared}

    def __getstate__(self) -> dict[str, Any]:
        if get_spawning_popen() is not None:
            raise RuntimeError(
                "A rollout cannot be shared between processes: it would be a copy in each. Collect in the "
                "workers, and extend the buffer by what they hand over in the process that learns."
            )
        return {**super().__getstate__(), "kept_flag": self._kept_flag}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._kept_flag = state["kept_flag"]

    def _empty(self) -> None:
        self.set_num_rows(0)
        self._final.clear()
        self._starts.clear()
        columns = self.columns
        if columns is not None:
            for name in self._computed():
                columns.del_(name)

    def state_dict(self) -> dict[str, Any]:
        """The filled rows (cloned), the table of final observations, and what was computed on them."""
        derived = {key: column.clone() for key, column in self._computed().items()}
        return {
            "num_steps": self.num_steps,
            "num_envs": self.num_envs,
            "num_rows": self.num_rows,
            "root": self._root.filled(self.num_rows) if self._root else {},
            "next": self._next.filled(self.num_rows) if self._next else {},
            "final_keys": list(self._final_keys),
            "final": self._final.state(),
            "states": self._starts.state(),
            "derived": derived if self.is_full else {},
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes back what `state_dict` gave.

        Raises:
            ValueError: it comes from a window of another size.
        """
        theirs = (state_dict["num_steps"], state_dict["num_envs"])
        if theirs != (self.num_steps, self.num_envs):
            raise ValueError(
                f"The saved window is {theirs[0]} steps x {theirs[1]} environments, this one is "
                f"{self.num_steps} x {self.num_envs}."
            )
        self._empty()
        rows: int = state_dict["num_rows"]
        if rows:
            self._root = self._restored("root", state_dict["root"])
            self._next = self._restored("next", state_dict["next"])
            self._final_keys = dict.fromkeys(state_dict["final_keys"])
            self._attach()
            self._final.load_state(state_dict["final"])
            self._starts.require_same(list(next((cells for _, _, cells in state_dict["states"]), {})))
            self._starts.load_state(state_dict["states"])
        for key, value in state_dict["derived"].items():
            self.derived(key, features=value.shape[2:], dtype=value.dtype).copy_(value)
        self.set_num_rows(rows)

    def _restored(self, half: str, filled: Mapping[Key, Tensor]) -> HalfColumns:
        row = {key: value[0] for key, value in filled.items()}
        columns = self._new_columns(row)
        for key, value in filled.items():
            columns[key][: len(value)].copy_(value)
        return HalfColumns(half, columns, row)

    def dumps(self, path: str | Path) -> None:
        """Writes `state_dict` to one file in the folder ``path``."""
        Path(path).mkdir(parents=True, exist_ok=True)
        torch.save(self.state_dict(), Path(path) / "storage.pt")

    def loads(self, path: str | Path) -> None:
        """Reads what `dumps` wrote; tensors only, no code is run."""
        self.load_state_dict(torch.load(Path(path) / "storage.pt", weights_only=True, map_location="cpu"))
