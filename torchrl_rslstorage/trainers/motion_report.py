"""How far a policy's motion is from the one that it was shown, as a number and as a picture."""

from __future__ import annotations

import io
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tensordict.utils import NestedKey
from torch import Tensor
from torchrl.envs import EnvBase

from torchrl_rslstorage._extras import require_extra
from torchrl_rslstorage._files import atomic_write_bytes
from torchrl_rslstorage.trainers.playing import play

_DRAWN_ENVS = 6
_DRAWN_FEATURES = 6


class Alignment(NamedTuple):
    """A motion laid beside a reference, at the phase where it fits best."""

    error: Tensor
    """Mean distance of the states of each environment, ``[N]``, in standard deviations of the reference."""

    phase: Tensor
    """The reference's row that stands beside each environment's first state, ``[N]`` int64."""


def align_motion(states: Tensor, reference: Tensor) -> Alignment:
    """Finds, for every environment, the span of ``reference`` that its states are nearest to.

        error_n = min_p mean_t ‖(s_{t,n} − r_{p+t}) / std(r)‖

    Args:
        states: ``[L, N, F]``.
        reference: ``[R, F]``, R ≥ L, with the same time step: two cycles of a motion for one cycle of states
            let every phase be found.

    Raises:
        ValueError: the shapes do not fit.

    Examples:
        >>> import torch
        >>> from torchrl_rslstorage.trainers.motion_report import align_motion
        >>> reference = torch.arange(6.0).unsqueeze(-1)
        >>> align_motion(reference[2:4].unsqueeze(1), reference)
        Alignment(error=tensor([0.]), phase=tensor([2]))
    """
    length = len(states)
    if states.ndim != 3 or reference.ndim != 2 or states.shape[-1] != reference.shape[-1]:
        raise ValueError(
            f"Expected states [L, N, F] and a reference [R, F], got {tuple(states.shape)} and "
            f"{tuple(reference.shape)}."
        )
    if not 1 <= length <= len(reference):
        raise ValueError(f"{length} rows of states do not fit into a reference of {len(reference)}.")
    spread = reference.std(0, correction=0)
    spread = torch.where(spread > 0, spread, torch.ones_like(spread))
    spans = (reference / spread).unfold(0, length, 1).transpose(1, 2)  # [P, L, F]
    scaled = (states / spread).transpose(0, 1)  # [N, L, F]
    distance = torch.stack([(scaled - span).norm(dim=-1).mean(-1) for span in spans])  # [P, N]
    best = distance.min(0)
    return Alignment(best.values, best.indices)


def record_motion(
    env: EnvBase, actor: Any, keys: list[NestedKey], *, num_steps: int, settle_steps: int
) -> Tensor:
    """The states ``[num_steps, N, F]`` that a policy's mean action goes through after ``settle_steps``.

    Args:
        env: started anew.
        actor: the policy.
        keys: the entries that make up a state, concatenated.
        num_steps: states recorded.
        settle_steps: steps before the first one, in which a policy finds from its start to its motion.
    """
    steps = islice(play(env, actor), settle_steps, settle_steps + num_steps)
    return torch.stack([torch.cat([step.get(key) for key in keys], -1) for step in steps])


def draw_motions(path: Path, states: Tensor, reference: Tensor, dt: float, title: str) -> None:
    """Draws a policy's motion over the reference, in the plane of the first two features and over time.

    Args:
        path: the PNG.
        states: ``[L, N, F]``.
        reference: ``[R, F]``.
        dt: seconds of one row.
        title: printed above.

    Raises:
        ImportError: matplotlib is missing.
        OSError: the file cannot be written.
    """
    figure_module = require_extra("matplotlib.figure", "cli", feature="the picture of motions")
    error, phase = align_motion(states, reference)
    order = error.argsort()[:_DRAWN_ENVS].tolist()
    num_features = min(reference.shape[-1], _DRAWN_FEATURES)
    states, reference = states.cpu(), reference.cpu()
    figure = figure_module.Figure(figsize=(11, 1 + 1.3 * max(num_features, 4)), layout="constrained")
    grid = figure.add_gridspec(num_features, 2, width_ratios=(1, 1.4))
    plane = figure.add_subplot(grid[:, 0])
    other = 1 if reference.shape[-1] > 1 else 0
    for n in order:
        plane.plot(states[:, n, 0], states[:, n, other], color="#1f6feb", linewidth=1, alpha=0.6)
    plane.plot(reference[:, 0], reference[:, other], color="#bf5700", linewidth=1.5, linestyle="--")
    plane.set(xlabel="state 0", ylabel=f"state {other}", aspect="equal", adjustable="datalim")
    seconds = torch.arange(len(states)) * dt
    best = order[0]
    start = int(phase[best])
    rows = [figure.add_subplot(grid[feature, 1]) for feature in range(num_features)]
    for feature, axes in enumerate(rows):
        shown = reference[start : start + len(states), feature]
        axes.plot(seconds, states[:, best, feature], color="#1f6feb", linewidth=1.5, label="policy")
        axes.plot(seconds, shown, color="#bf5700", linewidth=1.5, linestyle="--", label="reference")
        axes.set_ylabel(f"state {feature}")
    rows[0].legend(loc="upper right", frameon=False)
    rows[-1].set_xlabel("seconds")
    figure.suptitle(f"{title}: error {float(error.mean()):.3f} standard deviations")
    image = io.BytesIO()
    figure.savefig(image, format="png", dpi=144)
    atomic_write_bytes(path, image.getvalue())
