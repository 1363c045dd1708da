"""HistorySampler: mini-batches of cells drawn uniformly out of what each environment holds."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any, Literal, get_args

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.utils import NestedKey
from torch import Tensor
from torchrl.data import Storage

from torchrl_rslstorage.data.batch_views import BatchViews
from torchrl_rslstorage.data.history_storage import HistoryStorage
from torchrl_rslstorage.data.updates import UpdateSampler, at_least_one, checked_keys

Redraw = Literal["epoch", "update"]
OnShortage = Literal["replace", "error"]


class HistorySampler(UpdateSampler[HistoryStorage]):
    """Shuffled mini-batches ``[B]`` of (age, environment) cells, each held cell as likely as any other.

    Without replacement while unseen cells remain, which is to say: at the end of every epoch the numbers of
    times that any two held cells were drawn differ by at most one, in that epoch as in the update so far.

        cells a b c d e, 3 an epoch    epoch 1   c a e        b and d remain
                                       epoch 2   d b │ e      they are taken, and a new round begins
                                       epoch 3   a c d        only b remains of that

    RSL-RL draws one random subset of the ring's cells and reshuffles it each epoch, takes the length of
    environment 0 for everybody's, and so repeats and leaves out cells after a partial reset (AMP branch,
    storage/circular_buffer.py). Here an environment counts with what it holds; an empty one is never drawn.

    A mini-batch is a locked view of a copy that is gathered once a draw and used again by the next: it is
    good until the next epoch begins, and with ``redraw="update"`` until the next update does. Appending to
    the history, or resetting part of it, ends a running update. Beginning an update waits for the device
    once, to learn how many cells are held.

    Args:
        num_mini_batches: M, mini-batches of an epoch; their sizes differ by at most one.
        num_epochs: epochs of an update.
        num_samples: cells drawn for an epoch; ``None`` takes all that are held.
        redraw: ``"epoch"`` draws for each epoch; ``"update"`` once, for the same mini-batches in each.
        on_shortage: what to do if fewer than ``num_samples`` cells are held. ``"replace"`` draws each as
            often as the others, give or take one, and warns once; ``"error"`` raises.
        keys: what mini-batches hold; ``None`` takes everything. A group of entries may be named by its
            prefix.

    Raises:
        ValueError: a count below one; fewer samples than mini-batches; an unknown choice; no keys.

    Examples:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from torchrl_rslstorage import HistoryBuffer, HistorySampler
        >>> history = HistoryBuffer(10, 3, sampler=HistorySampler(num_mini_batches=2, num_samples=5))
        >>> for _ in range(4):
        ...     history.append(TensorDict({"x": torch.randn(3, 6)}, [3]))
        >>> [len(batch) for batch in history]
        [3, 2]
    """

    def __init__(
        self,
        num_mini_batches: int = 1,
        num_epochs: int = 1,
        num_samples: int | None = None,
        redraw: Redraw = "epoch",
        on_shortage: OnShortage = "replace",
        keys: Sequence[NestedKey] | None = None,
    ) -> None:
        super().__init__(num_epochs)
        self.num_mini_batches = at_least_one("num_mini_batches", num_mini_batches)
        self.num_samples = None if num_samples is None else at_least_one("num_samples", num_samples)
        self.redraw = _one_of("redraw", redraw, Redraw)
        self.on_shortage = _one_of("on_shortage", on_shortage, OnShortage)
        self.keys = checked_keys(keys)
        if num_samples is not None:
            self._require_enough(num_samples, "`num_samples`")
        self._held = 0
        self._cells: Tensor | None = None
        self._round: Tensor | None = None
        self._taken = 0
        self._batches: list[TensorDict] | None = None
        self._views = BatchViews()
        self._warned = False

    @property
    def num_batches(self) -> int:
        """Mini-batches of one update, ``num_epochs x num_mini_batches``."""
        return self.num_epochs * self.num_mini_batches

    def check(self, storage: HistoryStorage) -> None:
        """Raises a RuntimeError if nothing was appended."""
        storage.require_steps()

    def begin(self, storage: HistoryStorage) -> None:
        """Counts what is held and draws the first epoch.

        Raises:
            RuntimeError: every environment was reset; or ``on_shortage="error"`` and too few cells are held.
            ValueError: fewer cells are held than there are mini-batches.
        """
        self._held = len(storage)
        if not self._held:
            raise RuntimeError("Every environment was reset: append a step before sampling the history.")
        if self.num_samples is None:
            self._require_enough(self._held, "The history")
        elif self.num_samples > self._held:
            self._fall_short(self.num_samples)
        self._cells, self._round, self._taken = None, None, 0
        self._draw_epoch(storage)

    def mini_batch(self, storage: HistoryStorage, position: int) -> TensorDictBase:
        """The mini-batch number ``position``, a locked view of the draw's copy."""
        epoch, number = divmod(position, self.num_mini_batches)
        if self.redraw == "epoch" and number == 0 and epoch:
            self._draw_epoch(storage)
        if self._batches is None:
            assert self._draw is not None
            drawn = storage.drawn(self._draw.to(storage.device), self.keys)
            self._batches = self._views.cut(drawn, self.num_mini_batches)
        return self._batches[number]

    def sample(self, storage: Storage, batch_size: int | None = None) -> tuple[Any, dict[str, Any]]:
        """Not possible over a stock buffer, which does not know what each environment holds.

        Raises:
            TypeError: always.
        """
        raise TypeError("HistorySampler draws what each environment holds, which takes a HistoryBuffer.")

    def mark_update(self, index: Any, *, storage: Storage | None = None) -> None:
        """Ends a running update: the history was written or reset."""
        self._empty()

    # -- drawing ---------------------------------------------------------------------------------

    def _draw_epoch(self, storage: HistoryStorage) -> None:
        wholes, rest = divmod(self.num_samples or self._held, self._held)
        if self._cells is None:
            self._cells = storage.ring.cells_held(self._held)
        draw = self._next_of_round(rest, self._cells) if rest else self._cells[:0]
        self._draw = self._shuffled(torch.cat([*[self._cells] * wholes, draw])) if wholes else draw
        self._batches = None

    def _next_of_round(self, count: int, held: Tensor) -> Tensor:
        """The next ``count`` cells, fewer than are held, of rounds that have every cell once."""
        if self._round is None:
            self._round = self._shuffled(held)
        self._round = self._round.to(held.device)  # a loaded one is on the CPU
        start, self._taken = self._taken, self._taken + count
        if self._taken <= self._held:
            return self._round[start : self._taken]
        # The unseen ones, and the first of a new round, in which these come later.
        unseen, others = self._round[start:], self._shuffled(self._round[:start])
        self._taken -= self._held
        again, later = others[: self._taken], others[self._taken :]
        self._round = torch.cat([again, self._shuffled(torch.cat([later, unseen]))])
        return self._shuffled(torch.cat([unseen, again]))

    def _shuffled(self, cells: Tensor) -> Tensor:
        generator = self.generator
        source = cells.device if generator is None else generator.device
        order = torch.randperm(len(cells), generator=generator, device=source)
        return cells.index_select(0, order.to(cells.device))

    def _require_enough(self, cells: int, what: str) -> None:
        if cells < self.num_mini_batches:
            raise ValueError(
                f"{what} has {cells} cells, from which {self.num_mini_batches} mini-batches cannot be cut: "
                "each needs at least one."
            )

    def _fall_short(self, asked: int) -> None:
        short = f"The history holds {self._held} cells and {asked} are asked for"
        if self.on_shortage == "error":
            raise RuntimeError(f"{short}: append more, lower num_samples, or use on_shortage='replace'.")
        if not self._warned:
            self._warned = True
            warnings.warn(f"{short}: some are drawn more than once. This is said once.", stacklevel=2)

    # -- saving ----------------------------------------------------------------------------------

    def _empty(self) -> None:
        super()._empty()
        self._cells, self._round, self._taken = None, None, 0

    def _forget(self) -> None:
        self._batches = None

    def state_dict(self) -> dict[str, Any]:
        """Where a running update stands: what it drew and is yet to draw, its position, the generator."""
        rounds = None if self._round is None else self._round.clone()
        return {**super().state_dict(), "held": self._held, "round": rounds, "taken": self._taken}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes back what `state_dict` gave; a running update goes on with its next mini-batch."""
        super().load_state_dict(state_dict)
        self._held, self._taken = state_dict["held"], state_dict["taken"]
        rounds = state_dict["round"]
        self._cells, self._round = None, None if rounds is None else rounds.clone()

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(num_mini_batches={self.num_mini_batches}, num_epochs={self.num_epochs}, "
            f"num_samples={self.num_samples}, redraw={self.redraw!r}, on_shortage={self.on_shortage!r})"
        )


def _one_of(name: str, value: Any, choices: Any) -> Any:
    if value not in get_args(choices):
        raise ValueError(f"`{name}` must be one of {', '.join(map(repr, get_args(choices)))}, got {value!r}.")
    return value
