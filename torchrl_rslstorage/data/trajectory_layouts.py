"""How a network that steps through time reads a padded mini-batch, with and without the plan that made it."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from torchrl_rslstorage.data.trajectories import Trajectories


class Layout(ABC):
    """How a network that steps through time reads a padded mini-batch: its rows, and where they reset."""

    num_cells: int
    """V, the cells that are not padding."""

    resets: tuple[int, ...] = ()
    """The rows in which some environment starts anew, row 0 left out."""

    def __init__(self, shape: torch.Size, cells: Tensor) -> None:
        self._shape = shape
        self._cells = cells
        self.num_cells = len(cells)

    def take(self, x: Tensor) -> Tensor:
        """The valid cells of ``[L, B, *]``, as ``[V, *]``."""
        return x.flatten(0, 1).index_select(0, self._cells)

    def put(self, y: Tensor) -> Tensor:
        """``[V, *]`` in the order of `take` back to ``[L, B, *]``, with zeros for padding."""
        places = y.new_zeros(self._shape.numel(), *y.shape[1:])
        return places.index_copy(0, self._cells, y).view(*self._shape, *y.shape[1:])

    @abstractmethod
    def rows(self, x: Tensor) -> Tensor:
        """``[L, B, *]`` as the rows to step through, ``[T, M, *]``."""

    @abstractmethod
    def entering(self, state: Tensor) -> Tensor:
        """Of the states ``[L, B, *]`` those with which the rows are entered, ``[M, *]``."""

    @abstractmethod
    def goes_on(self, row: int) -> Tensor:
        """Which of the M go on from the row before, ``[M]`` bool."""

    @abstractmethod
    def of_rows(self, y: Tensor) -> Tensor:
        """Results ``[T, M, *]`` for the rows, as ``[V, *]`` in the order of `take`."""


class PlannedLayout(Layout):
    """A mini-batch read as the T steps of M environments that it was made of: no padding to compute on."""

    def __init__(self, plan: Trajectories) -> None:
        super().__init__(plan.mask.shape, plan.inverse.view(-1))
        self.resets = plan.resets
        self._rows_shape = plan.inverse.shape
        self._first = plan.first
        self._goes_on = plan.goes_on

    def rows(self, x: Tensor) -> Tensor:
        """The steps of the environments, ``[T, M, *]``."""
        return self.take(x).view(*self._rows_shape, *x.shape[2:])

    def entering(self, state: Tensor) -> Tensor:
        """The state of each environment's first trajectory."""
        return state[0].index_select(0, self._first)

    def goes_on(self, row: int) -> Tensor:
        """Which environments' episodes go on from the row before."""
        return self._goes_on[row]

    def of_rows(self, y: Tensor) -> Tensor:
        """Every cell: none of them is padding."""
        return y.flatten(0, 1)


class PaddedLayout(Layout):
    """A mini-batch of which the mask alone is known: B trajectories of L rows, zeros for padding."""

    def __init__(self, mask: Tensor) -> None:
        super().__init__(mask.shape, mask.reshape(-1).nonzero().view(-1))
        self._mask = mask

    def rows(self, x: Tensor) -> Tensor:
        """The trajectories as they are, with zeros for padding."""
        return torch.where(self._mask.view(*self._mask.shape, *[1] * (x.ndim - 2)), x, 0)

    def entering(self, state: Tensor) -> Tensor:
        """The state of each trajectory."""
        return state[0]

    def goes_on(self, row: int) -> Tensor:
        """Every trajectory does, in every row."""
        return torch.ones_like(self._mask[row])

    def of_rows(self, y: Tensor) -> Tensor:
        """The cells that are not padding."""
        return self.take(y)


# Beside the masks, not on them: a plan on a mask that it holds itself would be freed late and saved with it.
_PLANNED: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def attach_plan(mask: Tensor, plan: Trajectories) -> None:
    """Remembers by which plan the mini-batch with this very ``mask`` was made."""
    _PLANNED[mask] = (mask._version, PlannedLayout(plan))


def layout_of(mask: Tensor) -> Layout:
    """How a mini-batch with this ``mask [L, B]`` is read; a copied or changed one is read as it is."""
    planned = _PLANNED.get(mask)
    return planned[1] if planned is not None and planned[0] == mask._version else PaddedLayout(mask)
