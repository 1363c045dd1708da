"""The index maths of trajectories: cutting a window after ``done``, padding, and the way back.

    done [T = 4, N = 2]                 trajectories, environment-major as in RSL-RL
    env 0   ·  ✂  ·  ·                  0: env 0, t 0-1    1: env 0, t 2-3
    env 1   ·  ·  ·  ·                  2: env 1, t 0-3

    padded [L = 4, B = 3]               mask [L, B]
    (0,0) (2,0) (0,1)                   1 1 1          (t, n) of the cell that stands there
    (1,0) (3,0) (1,1)                   1 1 1
      0     0   (2,1)                   0 0 1          L is the longest trajectory, at most T
      0     0   (3,1)                   0 0 1

Everything is index arithmetic on whole tensors. Groups of environments are planned together, which asks the
device for their sizes and for the rows in which an environment resets, twice for all of them; padding and
un-padding never wait for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from torchrl_rslstorage.data import memory
from torchrl_rslstorage.data.gathering import gather_rows

_ZERO_ROW = "_rslstorage_zero_row"


@dataclass(frozen=True)
class Trajectories:
    """Where M environments' T steps stand in a padded mini-batch ``[L, B]``.

    Examples:
        >>> import torch
        >>> from torchrl_rslstorage import pad, plan_trajectories, unpad
        >>> done = torch.tensor([[False], [True], [False]])
        >>> plan = plan_trajectories(done)
        >>> padded = pad(torch.tensor([[1], [2], [3]]), plan)
        >>> padded.tolist(), unpad(padded, plan).flatten().tolist()
        ([[1, 3], [2, 0]], [1, 2, 3])
    """

    index: Tensor
    """Cell ``t·N + n`` of the window for every place ``[L, B]``, int64; on padding ``T·N``, which is none."""
    mask: Tensor
    """Which places hold a cell, ``[L, B]`` bool."""
    inverse: Tensor
    """Place ``l·B + b`` of every cell ``[T, M]``, int64."""
    start: Tensor
    """Cell ``t·N + n`` in which each trajectory starts, ``[B]`` int64."""
    lengths: Tensor
    """Steps of each trajectory, ``[B]`` int64."""
    first: Tensor
    """The trajectory with which each environment enters the window, ``[M]`` int64."""
    resets: tuple[int, ...]
    """The rows in which some environment starts anew, ascending, row 0 left out."""
    goes_on: Tensor
    """Whether an environment's episode goes on from the row before, ``[T, M]`` bool."""
    num_envs: int
    """N, the environments of the whole window."""

    @property
    def padding(self) -> Tensor:
        """The places that hold no cell, ``l·B + b``, int64."""
        return self.mask.logical_not().view(-1).nonzero().view(-1)


def plan_trajectories(done: Tensor, envs: Tensor | slice | None = None) -> Trajectories:
    """Cuts a window into trajectories, after every ``done`` and at the window's end.

    The order is RSL-RL's (rsl_rl 5.5.1, utils/utils.py, ``split_and_pad_trajectories``): by environment,
    then by time. L is the longest trajectory of these environments; RSL-RL pads to T.

    Args:
        done: ``[T, N]`` or ``[T, N, 1]`` bool.
        envs: the environments to plan, as ``[M]`` int64 or a slice; ``None`` takes all N in their order.

    Raises:
        ValueError: ``done`` is not bool, has another shape, or no cell; ``envs`` is no list of environments.

    Examples:
        >>> import torch
        >>> from torchrl_rslstorage import plan_trajectories
        >>> plan_trajectories(torch.tensor([[True], [False], [False]])).lengths
        tensor([1, 2])
    """
    done = _flags(done)
    if isinstance(envs, Tensor) and (envs.ndim != 1 or envs.dtype is not torch.int64 or not len(envs)):
        raise ValueError(
            f"`envs` must be int64 [M] with at least one environment, got {envs.dtype} {tuple(envs.shape)}."
        )
    num_envs = done.shape[1]
    if envs is None:
        ids = torch.arange(num_envs, device=done.device)
    elif isinstance(envs, slice):
        ids = torch.arange(num_envs, device=done.device)[envs]
    else:
        ids = envs
    return plan_groups(done, ids, [(0, len(ids))]).plans[0]


@dataclass(frozen=True)
class PlannedGroups:
    """The plans of groups of environments, made together; the places of each stand behind those before it."""

    plans: list[Trajectories]
    """One a group."""
    index: Tensor
    """The ``index`` of every plan, ``[P]``."""
    start: Tensor
    """The ``start`` of every plan, ``[B]``."""

    def pad(self, x: Tensor, *, out: Tensor | None = None) -> Tensor:
        """What the function `pad` gives by every plan, one behind the other, ``[P, *]``.

        Args:
            x: ``[T, N, *]``, the whole window, any dtype.
            out: ``[P, *]`` to write into.

        Raises:
            ValueError: ``x`` is not of the window's size.
        """
        return _padded(x, self.plans[0], self.index, out)

    def split(self, places: Tensor) -> list[Tensor]:
        """``[P, *]`` as ``[L, B, *]`` of each group."""
        parts = places.split([plan.mask.numel() for plan in self.plans])
        return [
            part.view(*plan.mask.shape, *part.shape[1:]) for part, plan in zip(parts, self.plans, strict=True)
        ]


def plan_groups(done: Tensor, envs: Tensor, bounds: Sequence[tuple[int, int]]) -> PlannedGroups:
    """The plans of ``envs[first:last]`` for all ``bounds``, which stand side by side and leave nothing out.

    Args:
        done: ``[T, N]`` or ``[T, N, 1]`` bool.
        envs: environments in the order of the groups, ``[M]`` int64.
        bounds: the first and the last environment of each group, the last left out.

    Raises:
        ValueError: ``done`` is not bool, has another shape, or no cell.
    """
    done, envs = _flags(done), envs.to(done.device)
    num_steps, num_envs = done.shape
    num, device = len(envs), done.device
    # Environment-major up to `env`: cell m·T + t.
    begins = torch.ones(num_envs, num_steps, dtype=torch.bool, device=device)
    begins[:, 1:] = done[:-1].t()
    begins = begins.index_select(0, envs)
    start = begins.view(-1).nonzero().view(-1)
    lengths = torch.diff(start, append=torch.full((1,), num * num_steps, device=device))
    trajectory = begins.view(-1).cumsum(0) - 1
    step = torch.arange(num * num_steps, device=device) - start.index_select(0, trajectory)
    trajectory, step = trajectory.view(num, num_steps), step.view(num, num_steps)
    env = start // num_steps
    start = (start - env * num_steps) * num_envs + envs.index_select(0, env)
    goes_on = torch.empty(num_steps, num, dtype=torch.bool, device=device)
    torch.logical_not(begins.t(), out=goes_on)
    found = _ask(goes_on, trajectory, step, bounds)

    num_places = sum(group.longest * group.number for group in found)
    index = torch.empty(num_places, dtype=torch.int64, device=device)
    nowhere = torch.full((), num_steps * num_envs, device=device)
    row = torch.arange(num_steps, device=device).unsqueeze(1)
    plans: list[Trajectories] = []
    place = 0
    for (first, last), (begin, number, longest, resets) in zip(bounds, found, strict=True):
        mine = slice(begin, begin + number)
        mask = row[:longest] < lengths[mine]
        places = index[place : (place := place + mask.numel())].view(mask.shape)
        torch.where(mask, start[mine] + row[:longest] * num_envs, nowhere, out=places)
        inverse = (trajectory[first:last] - begin).add_(step[first:last], alpha=number).t().contiguous()
        plans.append(
            Trajectories(
                index=places,
                mask=mask,
                inverse=inverse,
                start=start[mine],
                lengths=lengths[mine],
                first=inverse[0],
                resets=resets,
                goes_on=goes_on[:, first:last],
                num_envs=num_envs,
            )
        )
    return PlannedGroups(plans, index, start)


def pad(x: Tensor, plan: Trajectories, *, out: Tensor | None = None) -> Tensor:
    """The trajectories of ``x`` side by side, ``[L, B, *]``, with zeros behind the shorter ones.

    Args:
        x: ``[T, N, *]``, the whole window, any dtype.
        plan: of that window.
        out: ``[L·B, *]`` to write into.

    Raises:
        ValueError: ``x`` is not of the window's size.

    Examples:
        >>> import torch
        >>> from torchrl_rslstorage import pad, plan_trajectories
        >>> done = torch.tensor([[True], [False], [False]])
        >>> pad(torch.tensor([[1], [2], [3]]), plan_trajectories(done)).tolist()
        [[1, 2], [0, 3]]
    """
    return _padded(x, plan, plan.index.view(-1), out).view(*plan.mask.shape, *x.shape[2:])


def unpad(y: Tensor, plan: Trajectories) -> Tensor:
    """Back from ``[L, B, *]`` to the steps of the planned environments, ``[T, M, *]``.

    Args:
        y: ``[L, B, *]``, any dtype.
        plan: by which it was padded.

    Raises:
        ValueError: ``y`` is not of the padded size.

    Examples:
        >>> import torch
        >>> from torchrl_rslstorage import plan_trajectories, unpad
        >>> done = torch.tensor([[True], [False], [False]])
        >>> unpad(torch.tensor([[1, 2], [0, 3]]), plan_trajectories(done)).tolist()
        [[1], [2], [3]]
    """
    if y.shape[:2] != plan.mask.shape:
        raise ValueError(
            f"`y` has shape {tuple(y.shape)}, but the plan pads to [L, B] = {tuple(plan.mask.shape)}."
        )
    flat = y.flatten(0, 1).index_select(0, plan.inverse.view(-1))
    return flat.view(*plan.inverse.shape, *y.shape[2:])


def zeros_with_zero_row(
    shape: Sequence[int], *, dtype: torch.dtype, device: torch.device | str | None
) -> Tensor:
    """Zeros ``[T, N, *]`` with one more row behind the last, for padding to be gathered from.

    Gathering padding like everything else takes half the time of filling it in afterwards where many
    episodes end.
    """
    steps, envs, *features = shape
    base = memory.zeros((steps * envs + 1, *features), dtype=dtype, device=device)
    setattr(base, _ZERO_ROW, True)
    return base[:-1].view(steps, envs, *features)


def with_zero_row(x: Tensor) -> Tensor | None:
    """``[T·N + 1, *]`` of a whole ``x`` that `zeros_with_zero_row` made; None of any other tensor."""
    base = x._base
    if base is None or not hasattr(base, _ZERO_ROW) or base.dtype is not x.dtype:
        return None
    whole = x.is_contiguous() and x.data_ptr() == base.data_ptr() and x.shape[2:] == base.shape[1:]
    return base if whole and x.shape[0] * x.shape[1] + 1 == len(base) else None


def _padded(x: Tensor, plan: Trajectories, index: Tensor, out: Tensor | None) -> Tensor:
    """The cells ``[P, *]`` of ``x [T, N, *]``, with zeros where ``index [P]`` says that there is none."""
    window = (len(plan.inverse), plan.num_envs)
    if tuple(x.shape[:2]) != window:
        raise ValueError(
            f"`x` has {x.shape[0]} rows of {x.shape[1]} environments, but the plan is of a window with "
            f"{window[0]} rows of {window[1]} environments."
        )
    with_zeros = with_zero_row(x)
    if with_zeros is not None:
        return gather_rows(with_zeros, index, out=out)
    nowhere = x.shape[0] * x.shape[1]
    places = gather_rows(x.flatten(0, 1), index.clamp(max=nowhere - 1), out=out)
    return places.index_fill_(0, (index == nowhere).nonzero().view(-1), 0)


def _flags(done: Tensor) -> Tensor:
    """``done`` as ``[T, N]``, if it is one."""
    if done.ndim == 3 and done.shape[-1] == 1:
        done = done.squeeze(-1)
    if done.ndim != 2 or done.dtype is not torch.bool or not done.numel():
        raise ValueError(
            f"`done` must be bool [T, N] or [T, N, 1] with at least one cell, got {done.dtype} "
            f"{tuple(done.shape)}."
        )
    return done


class _Found(NamedTuple):
    """What the host has to know of a group."""

    begin: int
    """The first of its trajectories."""
    number: int
    """How many it has."""
    longest: int
    """The steps of the longest."""
    resets: tuple[int, ...]
    """The rows with a reset, row 0 left out."""


def _ask(
    goes_on: Tensor, trajectory: Tensor, step: Tensor, bounds: Sequence[tuple[int, int]]
) -> list[_Found]:
    """What the host has to know of all groups, fetched from the device at once."""
    numbers: list[Tensor] = []
    for first, last in bounds:
        numbers += [trajectory[first, 0], trajectory[last - 1, -1], step[first:last].max()]
    goes_on_everywhere = torch.stack([goes_on[:, first:last].all(1) for first, last in bounds])
    answers = torch.cat([torch.stack(numbers), goes_on_everywhere.view(-1).long()]).tolist()
    found: list[_Found] = []
    for group in range(len(bounds)):
        begin, end, longest = answers[3 * group : 3 * group + 3]
        rows = answers[3 * len(bounds) + group * len(goes_on) :][: len(goes_on)]
        resets = tuple(t for t, all_go_on in enumerate(rows) if t and not all_go_on)
        found.append(_Found(begin, end + 1 - begin, longest + 1, resets))
    return found
