"""The writer of a rollout: one row of all environments at a time, copied, filled once."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from tensordict import LazyStackedTensorDict, TensorDictBase
from torch import Tensor
from torchrl.data import Storage

from torchrl_rslstorage._compat import WriterBase
from torchrl_rslstorage.data.leaves import Key, leaves
from torchrl_rslstorage.data.rows import complete_done, root_leaves
from torchrl_rslstorage.data.storages import RolloutTensorStorage


class RolloutWriter(WriterBase):
    """Writes one time step of all N environments per call, into row ``cursor`` of a ``[T, N]`` storage.

        cursor   0      1      2      3 = T
               ┌──────┬──────┬──────┐
        root   │ s₀a₀ │ s₁a₁ │ s₂a₂ │  before env.step     full: sample, then empty()
        next   │ r₀d₀ │ r₁d₁ │ r₂d₂ │  after env.step
               └──────┴──────┴──────┘

    Values are *copied*. Simulators such as mjlab and Isaac Lab reuse their observation, reward and done
    tensors; keeping a reference would leave T copies of the last step. Those that overwrite observations
    in ``step`` need the two halves: `write_root` before it, `write_next` after it.

    State: row open for its root half, row open for its next half, full.

    Examples:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from torchrl_rslstorage import RolloutBuffer
        >>> buffer = RolloutBuffer(num_steps=2, num_envs=3)
        >>> step = TensorDict({"observation": torch.zeros(3, 4)}, [3])
        >>> buffer.writer.write_root(step)
        >>> flags = {"reward": torch.ones(3, 1), "done": torch.zeros(3, 1, dtype=torch.bool)}
        >>> buffer.writer.write_next(TensorDict(flags, [3]))
        0
        >>> buffer.writer.num_rows
        1
    """

    storage: RolloutTensorStorage
    """The storage that the buffer registered."""

    def __init__(self) -> None:
        super().__init__()
        self._cursor = 0
        self._write_count = 0
        self._half_open = False

    def register_storage(self, storage: Storage) -> None:
        """Takes the storage to write into.

        Raises:
            TypeError: it is not a `RolloutTensorStorage`.
        """
        if not isinstance(storage, RolloutTensorStorage):
            raise TypeError(
                "RolloutWriter writes into a RolloutTensorStorage, not into "
                f"{type(storage).__name__}. RolloutBuffer(num_steps, num_envs) wires them."
            )
        super().register_storage(storage)
        self.storage = storage
        self._batch_size = torch.Size([storage.num_envs])

    @property
    def num_rows(self) -> int:
        """Rows written into the present window."""
        return self._cursor

    @property
    def write_count(self) -> int:
        """Transitions written since the last full reset, over all windows."""
        return self._write_count

    def write_root(self, td: TensorDictBase) -> None:
        """Copies what stands before ``env.step``: observations, action, what the policy wrote.

        Args:
            td: batch size ``[N]``. Its ``next``, done flags and ``collector`` entries are left out.

        Raises:
            OverflowError: the window is full.
            RuntimeError: the row's root half is written already.
            KeyError, ValueError: the keys, shapes or dtypes are not those of the first row.
        """
        self._check_batch(td)
        self.write_root_leaves(root_leaves(td))

    def write_root_leaves(self, row: Mapping[Key, Tensor]) -> None:
        """`write_root` of tensors by name, each ``[N, *]``: what is stored, and nothing else."""
        self._check_room(1)
        if self._half_open:
            raise RuntimeError(
                f"Row {self._cursor} has its root half already: call write_next after env.step."
            )
        self.storage.write_root(self._cursor, row)
        self._half_open = True

    def write_next(self, td: TensorDictBase) -> int:
        """Copies what ``env.step`` returned and closes the row.

        Args:
            td: batch size ``[N]``: the content of ``next``. Reward and done are ``[N, 1]``;
                observations are kept where they are not the next row.

        Returns:
            The row that was closed.

        Raises:
            RuntimeError: `write_root` has not been called for this row.
        """
        self._check_batch(td)
        return self.write_next_leaves(leaves(td))

    def write_next_leaves(self, after: dict[Key, Tensor]) -> int:
        """`write_next` for an environment that hands over tensors by name, each ``[N, *]``."""
        if not self._half_open:
            raise RuntimeError(f"Row {self._cursor} has no root half: call write_root before env.step.")
        row = self._cursor
        self.storage.write_next(row, complete_done(after))
        self._close_row()
        return row

    def add(self, data: TensorDictBase) -> int:
        """Copies one whole row ``[N]`` with its ``next``; returns the row's number."""
        storage, row = self.storage, self._cursor
        self._check_room(1)
        if self._half_open:
            raise RuntimeError(f"Row {row} is half written: close it with write_next.")
        self._check_batch(data)
        storage.write_row(row, data)
        self._close_row()
        return row

    def extend(  # pyright: ignore[reportIncompatibleMethodOverride] - TorchRL: Sequence to flat indices
        self, data: TensorDictBase
    ) -> range:
        """Copies ``T'`` rows from ``[T', N]``; returns their numbers.

        Raises:
            OverflowError: they do not fit; nothing is written.
        """
        if data.ndim != 2:
            raise ValueError(
                f"Rows come as [T', N], got batch size {tuple(data.batch_size)}. "
                "A collector's [N, T'] goes through RolloutBuffer.extend."
            )
        self._check_room(data.shape[0])
        first = self._cursor
        for row in rows_of(data):
            self.add(row)
        return range(first, self._cursor)

    def _close_row(self) -> None:
        self._half_open = False
        self._cursor += 1
        self._write_count += self.storage.num_envs
        self.storage.set_num_rows(self._cursor)

    def _check_room(self, rows: int) -> None:
        storage = self.storage
        if self._cursor + rows > storage.num_steps:
            raise OverflowError(
                f"The window holds {self._cursor} of {storage.num_steps} rows and {rows} more do not fit. "
                "A window is filled once: take the mini-batches, then call buffer.empty()."
            )

    def _check_batch(self, td: TensorDictBase) -> None:
        if td.batch_size != self._batch_size:
            raise ValueError(
                f"A row has batch size {tuple(td.batch_size)}, expected {tuple(self._batch_size)}: "
                "one entry an environment."
            )

    def _empty(self, empty_write_count: bool = True) -> None:
        self._cursor = 0
        self._half_open = False
        if empty_write_count:
            self._write_count = 0

    def state_dict(self) -> dict[str, Any]:
        """The cursor and the count of transitions.

        Raises:
            RuntimeError: a row is half written, which no checkpoint can hold.
        """
        self._require_closed()
        return {"cursor": self._cursor, "write_count": self._write_count}

    def __getstate__(self) -> Any:
        self._require_closed()
        return super().__getstate__()

    def _require_closed(self) -> None:
        if self._half_open:
            raise RuntimeError(
                f"Row {self._cursor} is half written: close it before the buffer is saved or copied."
            )

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes back what `state_dict` gave."""
        self._cursor = int(state_dict["cursor"])
        self._write_count = int(state_dict["write_count"])
        self._half_open = False

    def dumps(self, path: str | Path) -> None:
        """Writes `state_dict` as JSON into the folder ``path``."""
        Path(path).mkdir(parents=True, exist_ok=True)
        (Path(path) / "writer.json").write_text(json.dumps(self.state_dict()), encoding="utf-8")

    def loads(self, path: str | Path) -> None:
        """Reads what `dumps` wrote."""
        self.load_state_dict(json.loads((Path(path) / "writer.json").read_text(encoding="utf-8")))


def rows_of(data: TensorDictBase) -> tuple[TensorDictBase, ...]:
    """The rows of ``[T', N]``; a stack of steps, as collectors hand over, is taken apart, not copied."""
    if isinstance(data, LazyStackedTensorDict) and data.stack_dim == 0:
        return tuple(data.tensordicts)
    return data.unbind(0)
