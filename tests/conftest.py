"""Shared by all tests: rows whose cells know their coordinates, and one thread for every tensor operation."""

from __future__ import annotations

from collections.abc import Collection

import pytest
import torch
from hypothesis import settings
from tensordict import TensorDict

pytest.register_assert_rewrite("oracles")

# The suite runs on two cores, beside other work; tensors here are tiny, and more threads only wait.
torch.set_num_threads(1)

# Derandomized: a red run is red again. `--hypothesis-profile=thorough` looks further afield.
settings.register_profile("fast", max_examples=40, deadline=None, derandomize=True, database=None)
settings.register_profile("thorough", max_examples=1000, deadline=None, database=None)
settings.load_profile("fast")


def make_row(
    t: int,
    num_envs: int,
    *,
    terminated: Collection[int] = (),
    truncated: Collection[int] = (),
    window: int = 0,
) -> TensorDict:
    """One step ``[N]`` whose every entry tells the cell ``(window, t, n)`` that it belongs to.

    ``observation`` is ``(t, n, window, 0)`` and ``("next", "observation")`` is ``(t, n, window, 1)``: a
    next observation is never equal to the next row's observation, so that mixing them up shows.

    Args:
        t: the row.
        num_envs: N, environments.
        terminated: the environments whose episode ends here.
        truncated: the environments whose episode is cut off here.
        window: which window the row belongs to.
    """
    n = torch.arange(num_envs)
    step, which = torch.full_like(n, t), torch.full_like(n, window)
    cell = step * num_envs + n + 10_000 * window

    def observation(after: int) -> dict:
        state = torch.stack([step, n, which, torch.full_like(n, after)], -1)
        image = state.to(torch.uint8).view(num_envs, 2, 2)
        return {"observation": state.float(), "sensors": {"camera": image, "height": state[:, :2].half()}}

    ends = torch.tensor([i in terminated for i in range(num_envs)]).unsqueeze(-1)
    cut = torch.tensor([i in truncated for i in range(num_envs)]).unsqueeze(-1)
    row = {
        **observation(after=0),
        "action": torch.stack([step, n], -1).float() + 0.5,
        "action_log_prob": -cell.float(),
        "state_value": cell.float().unsqueeze(-1) + 0.25,
        "is_init": torch.zeros(num_envs, 1, dtype=torch.bool),
        "next": {
            **observation(after=1),
            "reward": cell.float().unsqueeze(-1),
            "done": ends | cut,
            "terminated": ends,
            "truncated": cut,
        },
    }
    return TensorDict(row, [num_envs])


def make_rows(
    num_steps: int,
    num_envs: int,
    *,
    terminated: Collection[tuple[int, int]] = (),
    truncated: Collection[tuple[int, int]] = (),
    window: int = 0,
) -> list[TensorDict]:
    """The rows of one window; ``terminated`` and ``truncated`` name cells ``(t, n)``."""
    return [
        make_row(
            t,
            num_envs,
            terminated=[n for step, n in terminated if step == t],
            truncated=[n for step, n in truncated if step == t],
            window=window,
        )
        for t in range(num_steps)
    ]
