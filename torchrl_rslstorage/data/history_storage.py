"""The preallocated ``[max_len, N]`` ring of a history: its columns, and what is gathered out of them.

Two kinds of memory live here:

    columns    [max_len·N + 2, *]  the cells, one of zeros (an environment that holds nothing is read there)
                                   and one of rubbish (an environment that misses an append is written there)
    workspace  [M, *]              one draw of the sampler, used again for the next
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.utils import NestedKey
from torch import Tensor

from torchrl_rslstorage._compat import Columns, foreach_copy_
from torchrl_rslstorage.data import memory
from torchrl_rslstorage.data.columns import Gather, HalfColumns
from torchrl_rslstorage.data.leaves import Key, canonical, dtype_name, leaves, nest, select, show, show_all
from torchrl_rslstorage.data.ring import Ring
from torchrl_rslstorage.data.row_plan import RowPlan
from torchrl_rslstorage.data.updates import at_least_one


class HistoryStorage(Columns):
    """The newest ``max_len`` steps of each environment; the columns are made by the first step written.

    State: empty (no step since it was made or wholly reset), or not.

    Args:
        max_len: steps kept of each environment.
        num_envs: N, environments.
        device: where the history lives.

    Raises:
        ValueError: a size below one.

    Examples:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from torchrl_rslstorage import HistoryStorage
        >>> storage = HistoryStorage(max_len=2, num_envs=3)
        >>> storage.write(TensorDict({"x": torch.ones(3)}, [3]), mask=None)
        >>> storage.history()["x"].shape
        torch.Size([3, 2])
    """

    def __init__(self, max_len: int, num_envs: int, *, device: torch.device | str = "cpu") -> None:
        self.max_len = at_least_one("max_len", max_len)
        self.num_envs = at_least_one("num_envs", num_envs)
        super().__init__(max_len * num_envs, device=device, ndim=2)
        self.ring = Ring(max_len, num_envs, self.device)
        self._flat: dict[Key, Tensor] = {}
        self._rows: HalfColumns | None = None
        self._plan: RowPlan | None = None
        self._workspace: dict[Key, Tensor] = {}
        self._gather: tuple[list[Key] | None, int, Gather] | None = None

    # -- writing ---------------------------------------------------------------------------------

    def write(self, step: TensorDictBase, mask: Tensor | None) -> None:
        """Copies one step ``[N]`` into each environment's next cell, for those in ``mask`` ``[N]``."""
        sources = None if self._plan is None else self._plan.read(step)
        if sources is None:
            sources = self._sources(step)
        ring = self.ring
        if mask is None and ring.is_aligned:
            assert self._rows is not None
            foreach_copy_(self._rows.row(ring.row), sources)
        else:
            cells = ring.next_cells(mask)
            with torch.no_grad():
                for flat, source in zip(self._flat.values(), sources, strict=True):
                    flat.index_copy_(0, cells, source.to(flat.device))
        ring.advance(mask)

    def write_block(self, steps: TensorDictBase) -> None:
        """Copies the steps ``[T', N]`` of all environments; of more than ``max_len`` the newest remain."""
        ring = self.ring
        skipped = max(0, steps.shape[0] - self.max_len)
        if not skipped < steps.shape[0]:
            return
        sources = leaves(steps)
        first = steps[0]
        assert isinstance(first, TensorDictBase)
        self._sources(first)
        ring.advance(steps=skipped)
        kept = steps.shape[0] - skipped
        before_the_end = min(kept, self.max_len - ring.row)
        for start, stop in ((0, before_the_end), (before_the_end, kept)):
            if start < stop:
                rows = slice(ring.row, ring.row + stop - start)
                targets = [column[rows] for column in self._columns()]
                foreach_copy_(targets, [sources[key][skipped + start : skipped + stop] for key in self._flat])
                ring.advance(steps=stop - start)

    def _columns(self) -> list[Tensor]:
        assert self._rows is not None
        return list(self._rows.columns.values())

    def _sources(self, step: TensorDictBase) -> list[Tensor]:
        """The tensors of a step by name; the first one makes the columns, and others must be like it."""
        named = leaves(step)
        if self._rows is None:
            if not named:
                raise KeyError("A step needs entries to keep a history of; it came with none.")
            self._make({key: (value.shape[1:], value.dtype) for key, value in named.items()})
        assert self._rows is not None
        sources = self._rows.sources(self.ring.count, named)
        self._plan = RowPlan(step, list(self._flat))
        return sources

    def _make(self, layout: dict[Key, tuple[torch.Size, torch.dtype]]) -> None:
        cells = self.max_len * self.num_envs
        try:
            # A view made in inference mode could never again be written outside of it.
            with torch.inference_mode(False):
                self._flat = {
                    key: memory.zeros((cells + 2, *shape), dtype=dtype, device=self.device)
                    for key, (shape, dtype) in layout.items()
                }
        except (RuntimeError, MemoryError) as error:
            total = (cells + 2) * sum(shape.numel() * dtype.itemsize for shape, dtype in layout.values())
            raise MemoryError(
                f"A history of {self.max_len} steps x {self.num_envs} environments takes {total:,} bytes "
                f"({total / 2**30:.1f} GiB), which {self.device} has not got. Keep fewer or smaller steps."
            ) from error
        size = (self.max_len, self.num_envs)
        columns = {key: flat[:cells].view(*size, *flat.shape[1:]) for key, flat in self._flat.items()}
        self._rows = HalfColumns(None, columns, {key: column[0] for key, column in columns.items()})
        self._set_columns(TensorDict(nest(columns), size, device=self.device))
        self._workspace.clear()
        self._gather = None

    # -- reading ---------------------------------------------------------------------------------

    def require_steps(self) -> None:
        """Raises a RuntimeError if nothing was appended since the history was made or wholly reset."""
        if self.ring.count == 0:
            raise RuntimeError(
                f"The history of {self.max_len} steps x {self.num_envs} environments is empty: "
                "append a step before reading it."
            )

    def at_cells(self, cells: Tensor) -> TensorDict:
        """A fresh copy of these cells, ``[*cells.shape]``."""
        self.require_steps()
        wanted = cells.flatten()
        picked = {
            key: flat.index_select(0, wanted).view(*cells.shape, *flat.shape[1:])
            for key, flat in self._flat.items()
        }
        return TensorDict(nest(picked), cells.shape, device=self.device)

    def history(self) -> TensorDict:
        """``[N, max_len]``, oldest to newest, what is missing filled with the oldest held."""
        ages = torch.arange(self.max_len - 1, -1, -1, device=self.device).unsqueeze(-1)
        return self.at_cells(self.ring.cells(ages).T)

    def drawn(self, cells: Tensor, keys: Sequence[NestedKey] | None) -> dict[Key, Tensor]:
        """The cells ``[M]``, copied once into a workspace that is reused.

        Args:
            cells: int64, any cells, also several times the same.
            keys: what to copy; ``None`` takes everything.

        Returns:
            Leaves ``[M, *]`` by name: views of the workspace, good until the next call. The same
            dictionary as long as M and the keys are the same.

        Raises:
            KeyError: a key is not there.
        """
        wanted = None if keys is None else [canonical(key) for key in keys]
        if self._gather is None or self._gather[:2] != (wanted, len(cells)):
            names = list(self._flat) if wanted is None else select(self._flat, wanted)
            rooms = [self._room(name, len(cells)) for name in names]
            self._gather = (wanted, len(cells), Gather(names, [self._flat[name] for name in names], rooms))
        return self._gather[2].run(cells)

    def _room(self, name: Key, size: int) -> Tensor:
        room, flat = self._workspace.get(name), self._flat[name]
        if room is None or len(room) < size:
            room = self._workspace[name] = memory.empty_rows(flat, size)
        return room

    def __len__(self) -> int:
        """Cells held by all environments; waits for the device."""
        return int(self.ring.lengths.sum())

    def get(self, indices: Any) -> Any:
        """TorchRL's ``buffer[...]``: of `history`, time first."""
        return self.history().transpose(0, 1)[indices]

    def set(  # pyright: ignore[reportIncompatibleVariableOverride] - TorchRL registers it as a function
        self, cursor: Any, data: Any, *, set_cursor: bool = True
    ) -> None:
        """Not possible: steps are appended.

        Raises:
            TypeError: always.
        """
        raise TypeError("A history is written by append(step), not by index.")

    # -- emptying and saving ---------------------------------------------------------------------

    def _made_of(self) -> dict[str, Any]:
        return {"max_len": self.max_len, "num_envs": self.num_envs, "device": self.device}

    def _empty(self) -> None:
        self.ring.reset()

    def state_dict(self) -> dict[str, Any]:
        """The rows that were ever written (cloned) and the cursors."""
        ring = self.ring
        rows = min(ring.count, self.max_len)
        return {
            "max_len": self.max_len,
            "num_envs": self.num_envs,
            "columns": self._rows.filled(rows) if self._rows is not None and rows else {},
            "ring": ring.state(),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes back what `state_dict` gave.

        Raises:
            ValueError: it comes from a history of another size or of other entries.
        """
        theirs = (state_dict["max_len"], state_dict["num_envs"])
        if theirs != (self.max_len, self.num_envs):
            raise ValueError(
                f"The saved history is {theirs[0]} steps x {theirs[1]} environments, this one is "
                f"{self.max_len} x {self.num_envs}: build it with the saved sizes."
            )
        saved: dict[Key, Tensor] = state_dict["columns"]
        if saved:
            layout = {key: (rows.shape[2:], rows.dtype) for key, rows in saved.items()}
            if self._rows is None:
                self._make(layout)
            self._require_same(layout)
            for key, rows in saved.items():
                self._rows_of(key)[: len(rows)].copy_(rows)
        self.ring.load_state(state_dict["ring"])

    def _rows_of(self, key: Key) -> Tensor:
        assert self._rows is not None
        return self._rows.columns[key]

    def _require_same(self, saved: dict[Key, tuple[torch.Size, torch.dtype]]) -> None:
        if saved.keys() != self._flat.keys():
            raise ValueError(
                f"The saved history holds {show_all(saved)}, this one {show_all(self._flat)}: "
                "load it into a history of the same entries, or into one that was never written."
            )
        for key, (shape, dtype) in saved.items():
            mine = self._flat[key]
            if (shape, dtype) != (mine.shape[1:], mine.dtype):
                raise ValueError(
                    f"{show(key)} in the saved history is {dtype_name(dtype)} {tuple(shape)} a step and "
                    f"environment, in this one {dtype_name(mine.dtype)} {tuple(mine.shape[1:])}."
                )

    def dumps(self, path: str | Path) -> None:
        """Writes `state_dict` to one file in the folder ``path``."""
        Path(path).mkdir(parents=True, exist_ok=True)
        torch.save(self.state_dict(), Path(path) / "storage.pt")

    def loads(self, path: str | Path) -> None:
        """Reads what `dumps` wrote; tensors only, no code is run."""
        self.load_state_dict(torch.load(Path(path) / "storage.pt", weights_only=True, map_location="cpu"))
