"""The writer of a history: one step of all environments at a time, or of some of them, copied."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor
from torchrl.data import Storage

from torchrl_rslstorage._compat import WriterBase
from torchrl_rslstorage.data.history_storage import HistoryStorage
from torchrl_rslstorage.data.ring import as_environments
from torchrl_rslstorage.data.writers import rows_of


class HistoryWriter(WriterBase):
    """Writes each environment's step over its oldest one, without waiting for the device.

    Values are *copied*: what a simulator does to its tensors afterwards changes nothing. While every
    environment takes part in every step, a step is one contiguous row. After the first `append` with a mask
    environments write into rows of their own, until all are reset.

    Examples:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from torchrl_rslstorage import HistoryBuffer
        >>> history = HistoryBuffer(max_len=2, num_envs=3)
        >>> history.writer.append(TensorDict({"x": torch.zeros(3)}, [3]))
        >>> history.writer.append(TensorDict({"x": torch.ones(3)}, [3]), torch.tensor([True, False, False]))
        >>> history.lengths
        tensor([2, 1, 1])
    """

    storage: HistoryStorage
    """The storage that the buffer registered."""

    def __init__(self) -> None:
        super().__init__()
        self._write_count = 0

    def register_storage(self, storage: Storage) -> None:
        """Takes the storage to write into.

        Raises:
            TypeError: it is not a `HistoryStorage`.
        """
        if not isinstance(storage, HistoryStorage):
            raise TypeError(
                f"HistoryWriter writes into a HistoryStorage, not into {type(storage).__name__}. "
                "HistoryBuffer(max_len, num_envs) wires them."
            )
        super().register_storage(storage)
        self.storage = storage

    @property
    def write_count(self) -> int:
        """Steps offered since the last full reset, N an append, those that a mask left out included."""
        return self._write_count

    def append(self, step: TensorDictBase, mask: Tensor | None = None) -> None:
        """Copies one step ``[N]``.

        Args:
            step: batch size ``[N]``; everything in it is kept.
            mask: bool ``[N]``; the other environments keep their history as it is.

        Raises:
            KeyError, ValueError: batch size, keys, shapes or dtypes are not those of the first step.
        """
        envs = self.storage.num_envs
        if step.batch_size != (envs,):
            raise ValueError(
                f"A step has batch size {tuple(step.batch_size)}, expected [N = {envs}]: "
                "one entry an environment."
            )
        if mask is not None:
            mask = self._checked_mask(mask, (envs,))
        self.storage.write(step, mask)
        self._wrote(1)

    def extend(  # pyright: ignore[reportIncompatibleMethodOverride] - TorchRL: Sequence to flat indices
        self, steps: TensorDictBase, mask: Tensor | None = None
    ) -> None:
        """Copies the steps ``[T', N]`` one after another; ``T'`` may exceed ``max_len``.

        Args:
            steps: batch size ``[T', N]``, time first.
            mask: bool ``[T', N]``, or ``[N]`` for all steps alike.

        Raises:
            KeyError, ValueError: as `append`; or time is not the first dimension.
        """
        storage = self.storage
        if steps.ndim != 2 or steps.shape[1] != storage.num_envs:
            raise ValueError(
                f"Steps come as [T', N = {storage.num_envs}], got batch size {tuple(steps.batch_size)}. "
                "A collector's [N, T'] goes in as steps.transpose(0, 1)."
            )
        if steps.names is not None and "time" in steps.names[1:]:
            raise ValueError("The steps' dimension 1 is named 'time': pass steps.transpose(0, 1).")
        num_steps = steps.shape[0]
        if mask is None and storage.ring.is_aligned:
            storage.write_block(steps)
            if num_steps:
                self._wrote(num_steps)
        else:
            masks = [None] * num_steps if mask is None else self._masks(mask, num_steps)
            for step, written in zip(rows_of(steps), masks, strict=True):
                storage.write(step, written)
                self._wrote(1)

    def add(  # pyright: ignore[reportIncompatibleMethodOverride] - environments write into different rows
        self, data: TensorDictBase
    ) -> None:
        """TorchRL's name of `append`."""
        self.append(data)

    def reset(self, envs: Sequence[int] | Tensor | int | None = None) -> None:
        """Empties the histories of some environments, or of all.

        Args:
            envs: integers ``[K]`` or a bool mask ``[N]``; ``None`` for all.

        Raises:
            ValueError: there is no such environment (asked only of numbers that are on the host).
        """
        storage = self.storage
        if envs is not None:
            envs = as_environments(envs, storage.num_envs, storage.device)
        storage.ring.reset(envs)
        self._announce(storage.ring.row)

    def _masks(self, mask: Tensor, num_steps: int) -> Sequence[Tensor]:
        envs = self.storage.num_envs
        shape = (envs,) if getattr(mask, "ndim", 1) == 1 else (num_steps, envs)
        return self._checked_mask(mask, shape).expand(num_steps, envs).unbind(0)

    def _checked_mask(self, mask: Tensor, shape: tuple[int, ...]) -> Tensor:
        if not isinstance(mask, Tensor):
            raise ValueError(f"`mask` is a {type(mask).__name__}, expected a tensor of bool {shape}.")
        if mask.dtype is not torch.bool or mask.shape != shape:
            raise ValueError(
                f"`mask` is {str(mask.dtype).removeprefix('torch.')} {tuple(mask.shape)}, expected bool "
                f"{shape}: whether each environment's step is written."
            )
        return mask.to(self.storage.device)

    def _wrote(self, steps: int) -> None:
        self._write_count += steps * self.storage.num_envs
        self._announce(self.storage.ring.row)

    @property
    def _cursor(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride] - the ring keeps it
        return self.storage.ring.row

    def _empty(self, empty_write_count: bool = True) -> None:
        if empty_write_count:
            self._write_count = 0

    def state_dict(self) -> dict[str, Any]:
        """The count of steps; the cursors are the storage's."""
        return {"write_count": self._write_count}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes back what `state_dict` gave."""
        self._write_count = int(state_dict["write_count"])

    def dumps(self, path: str | Path) -> None:
        """Writes `state_dict` as JSON into the folder ``path``."""
        Path(path).mkdir(parents=True, exist_ok=True)
        (Path(path) / "writer.json").write_text(json.dumps(self.state_dict()), encoding="utf-8")

    def loads(self, path: str | Path) -> None:
        """Reads what `dumps` wrote."""
        self.load_state_dict(json.loads((Path(path) / "writer.json").read_text(encoding="utf-8")))
