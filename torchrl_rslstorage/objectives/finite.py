"""One look per window for NaN and inf, and the search that follows only when there is some."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from torchrl_rslstorage.data.leaves import Key, show


class Bootstraps(NamedTuple):
    """What the values that are not in the window were computed from."""

    cell: Tensor
    """Positions ``[K]`` in the window, t·N + n."""
    inputs: Mapping[Key, Tensor]
    """What was read after these steps, leaves ``[K, *]``."""
    used: Tensor
    """``[K]`` bool: whether the value entered the advantages."""


class _Fault(NamedTuple):
    t: int
    rank: int
    key: Key
    n: int
    value: float


def check_finite(columns: Mapping[Key, Tensor], bootstraps: Bootstraps, advantage: Tensor) -> None:
    """Raises if anything that the advantages come from, or they themselves, is NaN or inf.

    Sums tell: they propagate NaN and inf, need no temporary, run at the speed of memory, and are read with
    one host synchronisation a window; where one is not finite, everything is looked at. Looking at the
    advantages alone would not do, since a network that saturates (tanh) makes finite values of infinite
    observations.

    Args:
        columns: leaves ``[T, N, *]`` by name, causes before their consequences.
        bootstraps: what stands behind the values that are in no row.
        advantage: ``[T, N, 1]``.

    Raises:
        ValueError: names key, step and environment of the first fault, and how many cells have one.
    """
    columns = {key: column for key, column in columns.items() if column.is_floating_point()}
    inputs = {key: value for key, value in bootstraps.inputs.items() if value.is_floating_point()}
    sums = [column.sum() for column in (*columns.values(), advantage)]
    fine = torch.stack([x.isfinite() for x in sums]).all()
    for value in inputs.values():
        fine = fine & ~(_bad(value, 1) & bootstraps.used).any()
    if bool(fine):
        return

    num_steps, num_envs = advantage.shape[:2]
    bad_cells = torch.zeros(num_steps, num_envs, dtype=torch.bool, device=advantage.device)
    faults: list[_Fault] = []
    for key, column in columns.items():
        t, n = _bad(column, 2).nonzero(as_tuple=True)
        _note(faults, key, t, n, column[t, n])
        bad_cells[t, n] = True
    for key, value in inputs.items():
        row = (_bad(value, 1) & bootstraps.used).nonzero()[:, 0]
        t, n = bootstraps.cell[row] // num_envs, bootstraps.cell[row] % num_envs
        _note(faults, key, t, n, value[row])
        bad_cells[t, n] = True
    if not faults and bool(advantage.isfinite().all()):
        return  # finite values whose sum overflowed
    if not faults:
        raise ValueError(
            "The advantages are not finite although everything they are made of is: the value network "
            "returned NaN or inf for a finite observation, or rewards and values are too large for "
            f"{advantage.dtype}."
        )
    fault = min(faults, key=lambda fault: (fault.t, fault.rank))
    raise ValueError(
        f"{show(fault.key)} is {fault.value} at step {fault.t} of environment {fault.n} "
        f"({int(bad_cells.sum())} of {bad_cells.numel()} cells of this window are not finite). "
        "Check that environment's reward and observations; where a network wrote it, the network's weights "
        "and the standard deviation of its actions."
    )


def _bad(value: Tensor, batch_dims: int) -> Tensor:
    bad = ~value.isfinite()
    return bad.flatten(batch_dims).any(batch_dims) if bad.ndim > batch_dims else bad


def _note(faults: list[_Fault], key: Key, t: Tensor, n: Tensor, cells: Tensor) -> None:
    """Adds the earliest of the bad cells ``(t, n)``, whose content is ``cells``, if there is one."""
    if len(t):
        at = int(t.argmin())
        content = cells[at].flatten()
        value = float(content[~content.isfinite()][0])
        faults.append(_Fault(int(t[at]), len(faults), key, int(n[at]), value))
