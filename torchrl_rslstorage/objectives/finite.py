"""One look per window for NaN and inf, and the search that follows only when there is some."""

from __future__ import annotations

import torch
from tensordict import TensorDictBase
from torch import Tensor

from torchrl_rslstorage.data.leaves import Key, leaves, show


def check_finite(window: TensorDictBase, advantage: Tensor, log_prob: Tensor | None) -> None:
    """Raises if anything in the rollout is NaN or inf.

    Every fault reaches the advantages (through reward or value) or the log-probabilities (through an
    observation that the policy read), so two sums tell for the whole window, with one host
    synchronisation and no temporary of its size.

    Args:
        window: ``[T, N]``, searched only when the sums are not finite.
        advantage: ``[T, N, 1]``.
        log_prob: ``[T, N]``, or nothing.

    Raises:
        ValueError: names key, step and environment of the first fault, and how many cells have one.
    """
    total = advantage.sum()
    if log_prob is not None:
        total = total + log_prob.sum()
    if bool(total.isfinite()):
        return
    fault = first_fault(window)
    if fault is None:
        if bool(advantage.isfinite().all()):
            return  # finite values whose sum overflowed
        raise ValueError(
            "The advantages are not finite although every stored value is: the value network returned "
            "NaN or inf for a final observation, or gamma and the values overflow."
        )
    key, t, n, bad, cells = fault
    raise ValueError(
        f"{show(key)} is {bad} at step {t} of environment {n} ({cells} of {window.numel()} cells of "
        "this window are not finite). Check that environment's reward and observations."
    )


def first_fault(window: TensorDictBase) -> tuple[Key, int, int, float, int] | None:
    """Key, step, environment, value of the earliest fault, and the number of cells that have one.

    Of several keys at the same step, the one that is a cause rather than its consequence: observations
    before what policy and critic made of them, and those before rewards.
    """
    found: list[tuple[int, int, Key, int, float]] = []
    bad_cells = torch.zeros(window.batch_size, dtype=torch.bool, device=window.device)
    derived = ("advantage", "value_target")
    for order, (key, column) in enumerate(leaves(window).items()):
        if not column.is_floating_point() or key in derived:
            continue
        bad = ~column.isfinite()
        if column.ndim > 2:
            bad = bad.flatten(2).any(2)
        if not bool(bad.any()):
            continue
        bad_cells |= bad
        t, n = (int(index) for index in bad.nonzero()[0])
        value = column[t, n].flatten()
        found.append((t, _rank(key, order), key, n, float(value[~value.isfinite()][0])))
    if not found:
        return None
    t, _, key, n, value = min(found, key=lambda fault: fault[:2])
    return key, t, n, value, int(bad_cells.sum())


_MADE_BY_NETWORKS = frozenset({"action", "action_log_prob", "loc", "scale", "logits", "state_value"})


def _rank(key: Key, order: int) -> int:
    return order + 10_000 * (key in _MADE_BY_NETWORKS)
