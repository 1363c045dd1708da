"""What buffers have in common whose sampler hands out whole updates: reading and saving."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDictBase
from torchrl.data.replay_buffers import Sampler

from torchrl_rslstorage._compat import ReplayBufferBase


class UpdateBuffer(ReplayBufferBase):
    """A replay buffer that is read as whole updates of an `UpdateSampler`."""

    @property
    def has_transform(self) -> bool:
        """Whether TorchRL transforms stand between the buffer and its readers and writers."""
        return self._has_transform()

    def set_sampler(self, sampler: Sampler) -> Sampler:
        """Reads by another sampler, which gets the buffer's generator; returns the one before.

        An update that is running in the one before ends: both read through the same workspace.
        """
        before: Sampler = super().set_sampler(sampler)
        before._empty()
        if self.generator is not None:
            sampler._rng = self.generator
        return before

    def sample(self, batch_size: int | None = None, return_info: bool = False) -> Any:
        """The next mini-batch of the running update; begins a fresh update if none is running.

        Args:
            batch_size: not for samplers that know their sizes.
            return_info: also return the sampler's info, an empty dictionary.

        Raises:
            RuntimeError: the buffer cannot be read yet.
            ValueError: a batch size was given.
        """
        if batch_size is not None:
            raise ValueError(
                f"{self._sampler} makes mini-batches of its own sizes: call sample() without batch_size."
            )
        batch = self._transformed(self._sampler.next(self._storage))
        return (batch, {}) if return_info else batch

    def __iter__(  # pyright: ignore[reportIncompatibleMethodOverride] - TorchRL promises a generator
        self,
    ) -> Iterator[TensorDictBase]:
        """One fresh, whole update, also after an earlier one was left before its end."""
        update = self._sampler.update(self._storage)
        return map(self._transformed, update) if self._has_transform() else update

    def _transformed(self, batch: TensorDictBase) -> TensorDictBase:
        if not self._has_transform():
            return batch
        return self._transform(batch.clone(recurse=False))

    def dumps(self, path: str | Path) -> None:
        """Writes the whole buffer to one file in the folder ``path``: contents, update, generator."""
        Path(path).mkdir(parents=True, exist_ok=True)
        torch.save(self.state_dict(), Path(path) / "buffer.pt")

    def loads(self, path: str | Path) -> None:
        """Reads what `dumps` wrote; tensors only, no code is run (TorchRL's own format is a pickle)."""
        self.load_state_dict(torch.load(Path(path) / "buffer.pt", weights_only=True, map_location="cpu"))

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes back what `state_dict` gave, the sampler's generator included."""
        rng = state_dict["_rng"]
        if rng is not None and self.generator is None:
            self.set_rng(torch.Generator(device=rng[1]))
        super().load_state_dict(state_dict)
