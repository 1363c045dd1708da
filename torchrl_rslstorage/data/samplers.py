"""Samplers that cut one full window into mini-batches, a whole update at a time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.utils import NestedKey
from torchrl.data import Storage

from torchrl_rslstorage.data.batch_views import BatchViews, balanced
from torchrl_rslstorage.data.storages import RolloutTensorStorage
from torchrl_rslstorage.data.updates import UpdateSampler, at_least_one, checked_keys

_MANY_CELLS = 65536
"""Above which sorting saves more than it takes: 0.6 ms an epoch of 24 x 1024, a tenth of the gather."""


class RolloutSampler(UpdateSampler[RolloutTensorStorage]):
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

    def check(self, storage: RolloutTensorStorage) -> None:
        """Raises a RuntimeError if the window is not full."""
        storage.window()


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
        self._views = BatchViews()

    @property
    def num_batches(self) -> int:
        """Mini-batches of one update, ``num_epochs x num_mini_batches``."""
        return self.num_epochs * self.num_mini_batches

    def begin(self, storage: RolloutTensorStorage) -> None:
        """Draws the permutation of the first epoch."""
        self._shuffle(storage.max_size, storage.device)

    def mini_batch(self, storage: RolloutTensorStorage, position: int) -> TensorDictBase:
        """The mini-batch number ``position``, a locked view of the shuffled copy."""
        number = position % self.num_mini_batches
        if self.reshuffle and number == 0 and position:
            self._shuffle(storage.max_size, storage.device)
        batches = self._batches
        if batches is None:
            assert self._draw is not None
            shuffled = storage.shuffled(self._draw.to(storage.device), self.keys)
            batches = self._batches = self._views.cut(shuffled, self.num_mini_batches)
        return batches[number]

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
        if self.reshuffle and num_cells > _MANY_CELLS:
            # The order within a mini-batch is free: ascending cells are gathered faster.
            kind = torch.uint8 if self.num_mini_batches <= 256 else torch.int64
            number = torch.arange(num_cells, device=device).remainder_(self.num_mini_batches).to(kind)
            cells = torch.argsort(number.index_select(0, cells), stable=True)
        self._draw = cells
        self._batches = None

    def _forget(self) -> None:
        self._batches = None

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(num_mini_batches={self.num_mini_batches}, "
            f"num_epochs={self.num_epochs}, reshuffle={self.reshuffle}, "
            f"drop_remainder={self.drop_remainder})"
        )
