"""The checks of histories notice when the index maths is wrong.

Each fault is planted where it shows in no shape and no dtype; random programs beside a list per environment
must turn red.
"""

from __future__ import annotations

import pytest
import torch
from oracles_history import check_random_program

from torchrl_rslstorage import HistoryStorage
from torchrl_rslstorage.data.ring import Ring

original = {name: getattr(Ring, name) for name in ("cells", "cells_held", "reset", "advance", "next_cells")}


def ages_are_not_clamped(patch):
    def cells(self, ages):
        rows = torch.remainder(self.count - 1 - self._lags() - ages, self.max_len)
        return rows * self.num_envs + self._envs

    patch.setattr(Ring, "cells", cells)


def the_first_length_is_everybodys(patch):  # RSL-RL's fault
    patch.setattr(
        Ring,
        "lengths",
        property(lambda self: self.num_pushes.clamp(max=self.max_len)[:1].expand(self.num_envs)),
    )


def ages_count_from_the_oldest(patch):
    def cells(self, ages):
        return original["cells"](self, (self.lengths - 1 - ages).clamp(min=0))

    patch.setattr(Ring, "cells", cells)


def an_empty_environment_shows_what_it_held(patch):
    def cells(self, ages):
        found = original["cells"](self, ages)
        return found.where(found != self.nowhere, self._envs)

    patch.setattr(Ring, "cells", cells)


def resets_reset_all(patch):
    patch.setattr(Ring, "reset", lambda self, envs=None: original["reset"](self))


def resets_do_nothing(patch):
    patch.setattr(Ring, "reset", lambda self, envs=None: envs is None and original["reset"](self))


def masks_are_ignored(patch):
    patch.setattr(Ring, "next_cells", lambda self, mask: original["next_cells"](self, None))


def missed_appends_count(patch):
    patch.setattr(
        Ring, "advance", lambda self, mask=None, *, steps=1: original["advance"](self, None, steps=steps)
    )


def physical_cells_are_drawn(patch):
    patch.setattr(Ring, "cells_held", lambda self, num_held: torch.arange(num_held))


def the_oldest_cell_is_never_drawn(patch):
    def cells_held(self, num_held):
        found = original["cells_held"](self, num_held)
        return found.where(found != found.min(), found.max())

    patch.setattr(Ring, "cells_held", cells_held)


def blocks_do_not_wrap(patch):
    def write_block(self, steps):
        for step in steps.unbind(0)[: self.max_len]:
            self.write(step, None)

    patch.setattr(HistoryStorage, "write_block", write_block)


FAULTS = [
    ages_are_not_clamped,
    the_first_length_is_everybodys,
    ages_count_from_the_oldest,
    an_empty_environment_shows_what_it_held,
    resets_reset_all,
    resets_do_nothing,
    masks_are_ignored,
    missed_appends_count,
    physical_cells_are_drawn,
    the_oldest_cell_is_never_drawn,
    blocks_do_not_wrap,
]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_planted_fault_is_noticed(fault, monkeypatch):
    fault(monkeypatch)
    with pytest.raises(AssertionError):
        for seed in range(10):
            check_random_program(seed, 100)
