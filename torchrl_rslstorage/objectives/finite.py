"""One look per window for NaN and inf, and the search that follows only when there is some."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

import torch
from tensordict import TensorDictBase
from tensordict.utils import NestedKey
from torch import Tensor

from torchrl_rslstorage.data.leaves import Key, canonical, show


class Bootstraps(NamedTuple):
    """What the bootstrap values of a window were computed from, for the search."""

    t: Tensor
    """Rows ``[K]`` of the steps that are bootstrapped."""
    n: Tensor
    """Their environments ``[K]``."""
    inputs: TensorDictBase
    """What the value network read after these steps, ``[K]``."""


class Fault(NamedTuple):
    """Where a window first holds NaN or inf."""

    t: int
    rank: int
    """Of several keys at the same step, the lowest is a cause and the others its consequences."""
    key: Key
    n: int
    value: float


def check_finite(
    window: TensorDictBase,
    advantage: Tensor,
    log_prob: Tensor | None,
    bootstraps: Bootstraps,
    *,
    reward_key: NestedKey,
    made_by_critic: Collection[NestedKey],
    derived: Collection[NestedKey],
) -> None:
    """Raises if anything that the advantages and the policy read is NaN or inf.

    Every fault reaches the advantages (through reward or value) or the log-probabilities (through an
    observation that the policy read), so two sums tell for the whole window, with one host
    synchronisation and no temporary of its size. The rest is read only when the sums are not finite.

    Args:
        window: ``[T, N]``.
        advantage: ``[T, N, 1]``.
        log_prob: ``[T, N]``, or nothing.
        bootstraps: what stands behind the values that are not in the window.
        reward_key: the reward, under ``next``.
        made_by_critic: what the critic wrote, which is a consequence of what it read.
        derived: what the advantages were written to; never to blame.

    Raises:
        ValueError: names key, step and environment of the first fault, and how many cells have one.
    """
    total = advantage.sum()
    if log_prob is not None:
        total = total + log_prob.sum()
    if bool(total.isfinite()):
        return
    made = _MADE_BY_ACTORS | {canonical(key) for key in made_by_critic}
    skipped = {canonical(key) for key in derived}
    faults: list[Fault] = []
    bad_cells = torch.zeros(window.batch_size, dtype=torch.bool, device=window.device)
    for order, (key, column) in enumerate(_columns(window, reward_key)):
        if key not in skipped:
            bad = _bad(column, 2)
            bad_cells |= bad
            t, n = bad.nonzero(as_tuple=True)
            faults += _first(key, column, t, n, order + _CONSEQUENCE * (key in made))
    for order, (key, value) in enumerate(_floats(bootstraps.inputs)):
        k = _bad(value, 1).nonzero()[:, 0]
        t, n = bootstraps.t[k], bootstraps.n[k]
        bad_cells[t, n] = True
        faults += _first(_under_next(key), value, t, n, order + _AFTERWARDS, row=k)
    if faults:
        fault = min(faults, key=lambda fault: (fault.t, fault.rank))
        raise ValueError(
            f"{show(fault.key)} is {fault.value} at step {fault.t} of environment {fault.n} "
            f"({int(bad_cells.sum())} of {window.numel()} cells of this window are not finite). "
            "Check that environment's reward and observations."
        )
    if not bool(advantage.isfinite().all()):
        raise ValueError(
            "The advantages are not finite although everything they are made of is: the value network "
            "returned NaN or inf for a finite observation, or rewards and values are too large for "
            f"{advantage.dtype}."
        )
    # What is left are finite values whose sum overflowed.


_AFTERWARDS = 10_000
_CONSEQUENCE = 20_000
_MADE_BY_ACTORS = frozenset({"action", "action_log_prob", "sample_log_prob", "loc", "scale", "logits", "probs"})


def _columns(window: TensorDictBase, reward_key: NestedKey) -> Iterator[tuple[Key, Tensor]]:
    """The floating-point columns ``[T, N, *]`` outside ``next``, and the reward."""
    yield from _floats(window.exclude("next"))
    reward = _under_next(reward_key)
    yield reward, window.get(reward)


def _floats(td: TensorDictBase) -> Iterator[tuple[Key, Tensor]]:
    for key, value in td.items(include_nested=True, leaves_only=True):
        if isinstance(value, Tensor) and value.is_floating_point():
            yield canonical(key), value


def _bad(value: Tensor, batch_dims: int) -> Tensor:
    bad = ~value.isfinite()
    return bad.flatten(batch_dims).any(batch_dims) if bad.ndim > batch_dims else bad


def _first(
    key: Key, value: Tensor, t: Tensor, n: Tensor, rank: int, *, row: Tensor | None = None
) -> Sequence[Fault]:
    """The earliest of the bad cells ``(t, n)``; in ``value`` they stand at ``[t, n]``, or at ``[row]``."""
    if not len(t):
        return ()
    at = int(t.argmin())
    cell = (value[t[at], n[at]] if row is None else value[row[at]]).flatten()
    return (Fault(int(t[at]), rank, key, int(n[at]), float(cell[~cell.isfinite()][0])),)


def _under_next(key: NestedKey) -> Key:
    return canonical(("next", key) if isinstance(key, str) else ("next", *key))
