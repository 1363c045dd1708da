"""Samplers that hand out whole updates: the state machine, apart from what a mini-batch is.

An update is ``num_epochs`` passes over what a buffer holds. Its state machine: idle, running (an update was
begun and mini-batches are left), ran out. Beginning a new update, or emptying the buffer, ends a running one.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from tensordict import TensorDictBase
from tensordict.utils import NestedKey
from torch import Tensor

from torchrl_rslstorage._compat import SamplerBase
from torchrl_rslstorage.data.leaves import Key, canonical

StorageT = TypeVar("StorageT")


class UpdateSampler(SamplerBase, Generic[StorageT]):
    """A sampler that hands out whole updates; the base of every sampler of this package.

    Subclasses say what can be read (`check`), what one mini-batch is (`mini_batch`), how many an update has
    (`num_batches`), and draw what an update needs in `begin`.

    Args:
        num_epochs: passes over what the buffer holds in one update.

    Raises:
        ValueError: ``num_epochs`` is below one.
    """

    def __init__(self, num_epochs: int = 1) -> None:
        self.num_epochs = at_least_one("num_epochs", num_epochs)
        self._position: int | None = None
        self._ran_out = False
        self._update = 0
        self._draw: Tensor | None = None

    @property
    @abstractmethod
    def num_batches(self) -> int:
        """Mini-batches of one update."""

    @abstractmethod
    def check(self, storage: StorageT) -> None:
        """Raises a RuntimeError if ``storage`` cannot be read yet."""

    @abstractmethod
    def begin(self, storage: StorageT) -> None:
        """Starts an update: draws what it needs and rewinds to its first mini-batch."""

    @abstractmethod
    def mini_batch(self, storage: StorageT, position: int) -> TensorDictBase:
        """The mini-batch number ``position`` of the running update."""

    @property
    def ran_out(self) -> bool:
        """Whether the last update was handed out to its end and no new one was begun."""
        return self._ran_out

    @ran_out.setter
    def ran_out(self, value: bool) -> None:
        self._ran_out = value

    def next(self, storage: StorageT) -> TensorDictBase:
        """The next mini-batch of the running update; begins one if none is running."""
        if self._position is None:
            self._start(storage)
        assert self._position is not None
        return self._take(storage, self._position)

    def update(self, storage: StorageT) -> Iterator[TensorDictBase]:
        """One fresh, whole update; what `next` takes of it meanwhile is not handed out again.

        Raises:
            RuntimeError: the window is not full; or, while iterating, another update was begun or the
                buffer was emptied or loaded, so that the memory of this one holds something else.
        """
        self._start(storage)
        mine, position, last = self._update, self._position, self.num_batches - 1
        mini_batch = self.mini_batch
        while position is not None:
            batch = mini_batch(storage, position)
            if position == last:
                self._position, self._ran_out = None, True
                yield batch
                return
            self._position = position + 1
            yield batch
            if self._update != mine:
                raise RuntimeError(
                    "This update was cut off: another one was begun on the same buffer, or the buffer was "
                    "emptied or loaded. Finish one iteration before starting the next."
                )
            position = self._position

    def _start(self, storage: StorageT) -> None:
        self.check(storage)
        self._update += 1
        self._ran_out = False
        self.begin(storage)
        self._position = 0

    def _take(self, storage: StorageT, position: int) -> TensorDictBase:
        batch = self.mini_batch(storage, position)
        if position + 1 < self.num_batches:
            self._position = position + 1
        else:
            self._position, self._ran_out = None, True
        return batch

    def _empty(self) -> None:
        self._update += 1
        self._position, self._ran_out = None, False
        self._draw = None
        self._forget()

    def _forget(self) -> None:
        """Lets go of the mini-batches that were made of the present draw."""

    def state_dict(self) -> dict[str, Any]:
        """Where a running update stands: what it drew, its position, and the generator."""
        generator = self.generator
        return {
            "kind": type(self).__name__,
            "num_batches": self.num_batches,
            "position": self._position,
            "ran_out": self._ran_out,
            "draw": None if self._draw is None else self._draw.clone(),
            "generator": None if generator is None else generator.get_state(),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes back what `state_dict` gave; a running update goes on with its next mini-batch.

        Raises:
            ValueError: an update is running in it, of another kind or number of mini-batches; or it holds the
                state of a generator and this sampler has none to put it in.
        """
        position = state_dict["position"]
        if position is not None and state_dict["kind"] != type(self).__name__:
            raise ValueError(
                f"The saved update is one of a {state_dict['kind']}, this sampler is a {type(self).__name__}."
            )
        if position is not None and state_dict["num_batches"] != self.num_batches:
            raise ValueError(
                f"The saved update has {state_dict['num_batches']} mini-batches, this sampler makes "
                f"{self.num_batches}: use the same num_mini_batches and num_epochs."
            )
        self._update += 1
        self._position, self._ran_out = position, state_dict["ran_out"]
        drawn = state_dict["draw"]
        self._draw = None if drawn is None else drawn.clone()
        self._forget()
        saved = state_dict["generator"]
        if saved is not None:
            generator = self.generator
            if generator is None:
                raise ValueError(
                    "The saved sampler had a generator of its own and this one has none: "
                    "call buffer.set_rng(torch.Generator()) before loading."
                )
            generator.set_state(saved.cpu())

    def dumps(self, path: str | Path) -> None:
        """Writes `state_dict` to one file in the folder ``path``."""
        Path(path).mkdir(parents=True, exist_ok=True)
        torch.save(self.state_dict(), Path(path) / "sampler.pt")

    def loads(self, path: str | Path) -> None:
        """Reads what `dumps` wrote; tensors only, no code is run."""
        self.load_state_dict(torch.load(Path(path) / "sampler.pt", weights_only=True, map_location="cpu"))


def at_least_one(name: str, value: int) -> int:
    """``value``, or a ValueError that names it if it is not an integer of at least one."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"`{name}` must be an integer of at least 1, got {value!r}.")
    return value


def checked_keys(keys: Sequence[NestedKey] | None) -> list[Key] | None:
    """What mini-batches shall hold, as names of leaves or groups; None for everything."""
    if keys is not None and (isinstance(keys, str) or not keys):
        raise ValueError(f"`keys` must be a sequence of at least one key, or None for all, got {keys!r}.")
    return None if keys is None else [canonical(key) for key in keys]
