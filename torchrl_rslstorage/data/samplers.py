"""Samplers that cut one full window into mini-batches, a whole update at a time.

An update is ``num_epochs`` passes over the window. Its state machine: idle, running (an update was begun
and mini-batches are left), ran out. Beginning a new update, or emptying the buffer, ends a running one.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from itertools import chain, pairwise
from operator import is_
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.utils import NestedKey
from torch import Tensor
from torchrl.data import Storage

from torchrl_rslstorage._compat import SamplerBase
from torchrl_rslstorage.data.leaves import Key, canonical, nest
from torchrl_rslstorage.data.storages import RolloutTensorStorage


class RolloutSampler(SamplerBase):
    """A sampler that hands out whole updates; the base of the samplers of a `RolloutBuffer`.

    Subclasses say what one mini-batch is (`mini_batch`), how many an update has (`num_batches`), and
    draw what an update needs in `begin`.

    Args:
        num_epochs: passes over the window in one update.

    Raises:
        ValueError: ``num_epochs`` is below one.

    Examples:
        >>> from torchrl_rslstorage import MiniBatchSampler, RolloutSampler
        >>> issubclass(MiniBatchSampler, RolloutSampler)
        True
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
    def begin(self, storage: RolloutTensorStorage) -> None:
        """Starts an update on a full window: draws what it needs and rewinds to its first mini-batch."""

    @abstractmethod
    def mini_batch(self, storage: RolloutTensorStorage, position: int) -> TensorDictBase:
        """The mini-batch number ``position`` of the running update."""

    @property
    def ran_out(self) -> bool:
        """Whether the last update was handed out to its end and no new one was begun."""
        return self._ran_out

    @ran_out.setter
    def ran_out(self, value: bool) -> None:
        self._ran_out = value

    def next(self, storage: RolloutTensorStorage) -> TensorDictBase:
        """The next mini-batch of the running update; begins one if none is running."""
        if self._position is None:
            self._start(storage)
        assert self._position is not None
        return self._take(storage, self._position)

    def update(self, storage: RolloutTensorStorage) -> Iterator[TensorDictBase]:
        """One fresh, whole update; what `next` takes of it meanwhile is not handed out again.

        Raises:
            RuntimeError: the window is not full; or, while iterating, another update was begun or the
                buffer was emptied or loaded, so that the memory of this one holds something else.
        """
        self._start(storage)
        mine, position, last = self._update, self._position, self.num_batches - 1
        while position is not None:
            batch = self.mini_batch(storage, position)
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

    def _start(self, storage: RolloutTensorStorage) -> None:
        storage.window()
        self._update += 1
        self._ran_out = False
        self.begin(storage)
        self._position = 0

    def _take(self, storage: RolloutTensorStorage, position: int) -> TensorDictBase:
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


class MiniBatchSampler(RolloutSampler):
    """Flat, shuffled mini-batches ``[B]``: every transition once per epoch, sizes differing by at most one.

        cells     0 1 2 3 4 5 6 7 8 9          T·N = 10, cell = t·N + n
        shuffled  7 2 9 0 │ 4 1 8 │ 3 6 5      3 mini-batches of 4, 3, 3

    ``reshuffle=False`` is RSL-RL's way (rsl_rl 5.5.1, storage/rollout_storage.py): one permutation for all
    epochs. The window is gathered *once*, and every mini-batch is a locked view of that copy, the same
    object in each epoch. ``reshuffle=True`` draws a permutation, and gathers, for each epoch; a mini-batch
    is then good until the next epoch begins. Either way, in-place writes into a mini-batch's tensors change
    the copy that later epochs read: setting a key is refused, writing into memory cannot be.

    Args:
        num_mini_batches: M, mini-batches of an epoch.
        num_epochs: passes over the window in one update.
        reshuffle: draw a new permutation for each epoch.
        drop_remainder: RSL-RL's behaviour to the letter: only the first ``M·⌊T·N / M⌋`` cells are
            permuted, and the rest of the last row never seen.
        keys: what mini-batches hold; ``None`` takes every root entry, ``advantage`` and ``value_target``
            included, without ``next`` and ``is_init``. A group of entries may be named by its prefix.

    Raises:
        ValueError: a count below one; no keys; more mini-batches than transitions (when an update begins).

    Examples:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from torchrl_rslstorage import MiniBatchSampler, RolloutBuffer
        >>> buffer = RolloutBuffer(2, 5, sampler=MiniBatchSampler(num_mini_batches=3))
        >>> flags = {"reward": torch.ones(5, 2, 1), "done": torch.zeros(5, 2, 1, dtype=torch.bool)}
        >>> steps = TensorDict({"observation": torch.zeros(5, 2, 4), "next": flags}, [5, 2])
        >>> _ = buffer.extend(steps)
        >>> [len(batch) for batch in buffer]
        [4, 3, 3]
    """

    def __init__(
        self,
        num_mini_batches: int = 1,
        num_epochs: int = 1,
        reshuffle: bool = False,
        drop_remainder: bool = False,
        keys: Sequence[NestedKey] | None = None,
    ) -> None:
        super().__init__(num_epochs)
        self.num_mini_batches = at_least_one("num_mini_batches", num_mini_batches)
        self.reshuffle = reshuffle
        self.drop_remainder = drop_remainder
        self.keys = checked_keys(keys)
        self._batches: list[TensorDict] | None = None
        self._views: tuple[dict[Key, Tensor], list[TensorDict], list[_Contents]] | None = None

    @property
    def num_batches(self) -> int:
        """Mini-batches of one update, ``num_epochs x num_mini_batches``."""
        return self.num_epochs * self.num_mini_batches

    def begin(self, storage: RolloutTensorStorage) -> None:
        """Draws the permutation of the first epoch."""
        self._shuffle(storage.max_size, storage.device)

    def mini_batch(self, storage: RolloutTensorStorage, position: int) -> TensorDictBase:
        """The mini-batch number ``position``, a locked view of the shuffled copy."""
        epoch, number = divmod(position, self.num_mini_batches)
        if self.reshuffle and number == 0 and epoch:
            self._shuffle(storage.max_size, storage.device)
        if self._batches is None:
            assert self._draw is not None
            self._batches = self._cut(storage.shuffled(self._draw.to(storage.device), self.keys))
        return self._batches[number]

    def sample(self, storage: Storage, batch_size: int | None = None) -> tuple[Any, dict[str, Any]]:
        """TorchRL's protocol, for a stock buffer over any ``[T, N]`` storage: ``(t, n)`` and no info.

        Args:
            storage: two-dimensional, all of its rows filled.
            batch_size: not used; sizes follow from ``num_mini_batches``.

        Raises:
            RuntimeError: the storage is empty.
            ValueError: it does not have two dimensions.
        """
        shape = storage.shape
        if shape is None or not shape.numel():
            raise RuntimeError("The storage is empty: write a window before sampling it.")
        if len(shape) != 2:
            raise ValueError(
                f"MiniBatchSampler flattens [T, N], but the storage has the shape {tuple(shape)}: "
                "build it with ndim=2."
            )
        steps, envs = shape
        if self._position is None:
            self._shuffle(steps * envs, torch.device("cpu"))
            self._position, self._ran_out = 0, False
        position = self._position
        epoch, number = divmod(position, self.num_mini_batches)
        if self.reshuffle and number == 0 and epoch:
            self._shuffle(steps * envs, torch.device("cpu"))
        assert self._draw is not None
        start, stop = balanced(len(self._draw), self.num_mini_batches)[number]
        cells = self._draw[start:stop]
        last = position + 1 == self.num_batches
        self._position, self._ran_out = (None, True) if last else (position + 1, False)
        return (cells // envs, cells % envs), {}

    def _shuffle(self, num_cells: int, device: torch.device | str) -> None:
        if self.num_mini_batches > num_cells:
            raise ValueError(
                f"{self.num_mini_batches} mini-batches cannot be cut from {num_cells} transitions: "
                "each needs at least one. Lower num_mini_batches or collect a longer window."
            )
        if self.drop_remainder:
            num_cells -= num_cells % self.num_mini_batches
        generator = self.generator
        source = device if generator is None else generator.device
        cells = torch.randperm(num_cells, generator=generator, device=source).to(device)
        if self.reshuffle:
            # The order within a mini-batch is free: ascending cells are gathered faster.
            kind = torch.uint8 if self.num_mini_batches <= 256 else torch.int64
            number = torch.arange(num_cells, device=device).remainder_(self.num_mini_batches).to(kind)
            cells = torch.argsort(number.index_select(0, cells), stable=True)
        self._draw = cells
        self._batches = None

    def _cut(self, shuffled: dict[Key, Tensor]) -> list[TensorDict]:
        if self._views is not None and self._views[0] is shuffled:
            batches, made = self._views[1:]
            # One that somebody unlocked and set something in is not handed out again.
            if all(map(_holds, made)):
                return batches
        first = next(iter(shuffled.values()))
        batches = [
            TensorDict(
                nest({name: leaf[start:stop] for name, leaf in shuffled.items()}),
                [stop - start],
                device=first.device,
            ).lock_()
            for start, stop in balanced(len(first), self.num_mini_batches)
        ]
        self._views = (shuffled, batches, [held for batch in batches for held in _contents(batch)])
        return batches

    def _forget(self) -> None:
        self._batches = None

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(num_mini_batches={self.num_mini_batches}, "
            f"num_epochs={self.num_epochs}, reshuffle={self.reshuffle}, "
            f"drop_remainder={self.drop_remainder})"
        )


def at_least_one(name: str, value: int) -> int:
    """``value``, or a ValueError that names it if it is not an integer of at least one."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"`{name}` must be an integer of at least 1, got {value!r}.")
    return value


def balanced(total: int, parts: int) -> list[tuple[int, int]]:
    """Where to cut ``total`` things into ``parts`` whose sizes differ by at most one."""
    small, longer = divmod(total, parts)
    return list(pairwise(i * small + min(i, longer) for i in range(parts + 1)))


def checked_keys(keys: Sequence[NestedKey] | None) -> list[Key] | None:
    """What mini-batches shall hold, as names of leaves or groups; None for everything."""
    if keys is not None and (isinstance(keys, str) or not keys):
        raise ValueError(f"`keys` must be a sequence of at least one key, or None for all, got {keys!r}.")
    return None if keys is None else [canonical(key) for key in keys]


_Contents = tuple[TensorDictBase, list[Any]]
"""A TensorDict with the names and values, in turns, that it was locked with."""


def _contents(td: TensorDictBase) -> Iterator[_Contents]:
    """What ``td`` and every TensorDict below it hold now."""
    yield td, list(chain.from_iterable(td.items()))
    for value in td.values():
        if isinstance(value, TensorDictBase):
            yield from _contents(value)


def _holds(contents: _Contents) -> bool:
    """Whether the TensorDict is locked and holds the very same objects, names as well as values."""
    td, held = contents
    items = list(td.items())
    # One comparison of identities, in C: this runs over every mini-batch of every update.
    return td.is_locked and 2 * len(items) == len(held) and all(map(is_, chain.from_iterable(items), held))
