"""Cutting, padding and un-padding: inverses of each other, and RSL-RL's own trajectories."""

from __future__ import annotations

import dataclasses
import weakref

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rsl_rl.utils import split_and_pad_trajectories
from torch import Tensor

from torchrl_rslstorage import pad, plan_trajectories, unpad
from torchrl_rslstorage.data import trajectory_layouts
from torchrl_rslstorage.data.batch_views import balanced
from torchrl_rslstorage.data.trajectories import plan_groups, with_zero_row, zeros_with_zero_row
from torchrl_rslstorage.data.trajectory_layouts import (
    PaddedLayout,
    PlannedLayout,
    attach_plan,
    layout_of,
)

EDGES = ["none", "all", "first row", "last row", "random"]


def done_flags(num_steps: int, num_envs: int, kind: str, seed: int) -> Tensor:
    done = torch.zeros(num_steps, num_envs, dtype=torch.bool)
    if kind == "all":
        done[:] = True
    elif kind == "first row":
        done[0] = True
    elif kind == "last row":
        done[-1] = True
    elif kind == "random":
        generator = torch.Generator().manual_seed(seed)
        rate = torch.rand((), generator=generator)
        done = torch.rand(num_steps, num_envs, generator=generator) < rate
    return done


def cells(num_steps: int, num_envs: int, *trailing: int) -> Tensor:
    """Every entry knows its (t, n), counted from one, so that padding shows."""
    place = torch.arange(1, num_steps * num_envs + 1).view(num_steps, num_envs, *[1] * len(trailing))
    return place.expand(num_steps, num_envs, *trailing).contiguous()


windows = st.tuples(st.integers(1, 7), st.integers(1, 6), st.sampled_from(EDGES), st.integers(0, 2**31 - 1))


@given(windows, st.sampled_from([(), (1,), (3,), (2, 2)]))
def test_unpad_is_the_inverse_of_pad(window: tuple[int, int, str, int], trailing: tuple[int, ...]) -> None:
    steps, envs, kind, seed = window
    x = cells(steps, envs, *trailing)
    plan = plan_trajectories(done_flags(steps, envs, kind, seed))
    padded = pad(x, plan)
    assert torch.equal(unpad(padded, plan), x)
    assert torch.equal(padded.flatten(2).ne(0).all(-1) if trailing else padded.ne(0), plan.mask)


@given(windows)
def test_a_brute_force_cut_gives_the_same_trajectories(window: tuple[int, int, str, int]) -> None:
    steps, envs, kind, seed = window
    done = done_flags(steps, envs, kind, seed)
    expected: list[list[int]] = []
    for n in range(envs):
        expected.append([])
        for t in range(steps):
            expected[-1].append(t * envs + n)
            if done[t, n] and t + 1 < steps:
                expected.append([])
    plan = plan_trajectories(done)
    assert plan.lengths.tolist() == [len(cell) for cell in expected]
    assert plan.start.tolist() == [cell[0] for cell in expected]
    assert plan.padding.tolist() == plan.index.view(-1).eq(steps * envs).nonzero().view(-1).tolist()
    assert plan.mask.shape == (max(map(len, expected)), len(expected))
    for b, trajectory in enumerate(expected):
        assert plan.index[plan.mask[:, b], b].tolist() == trajectory


@given(windows.filter(lambda w: w[0] > 1))
def test_trajectories_are_those_of_rsl_rl(window: tuple[int, int, str, int]) -> None:
    steps, envs, kind, seed = window
    done = done_flags(steps, envs, kind, seed)
    x = cells(steps, envs, 3).float()
    theirs, their_masks = split_and_pad_trajectories(x, done.unsqueeze(-1).byte())
    plan = plan_trajectories(done)
    longest = plan.mask.shape[0]
    assert torch.equal(pad(x, plan), theirs[:longest])
    assert torch.equal(plan.mask, their_masks[:longest])
    assert not their_masks[longest:].any()  # what L is trimmed by


@given(windows, st.integers(0, 2**31 - 1))
def test_chosen_environments_are_planned_in_the_order_given(
    window: tuple[int, int, str, int], seed: int
) -> None:
    steps, envs, kind, flags = window
    done = done_flags(steps, envs, kind, flags)
    chosen = torch.randperm(envs, generator=torch.Generator().manual_seed(seed))[: max(1, envs // 2)]
    plan = plan_trajectories(done, chosen)
    x = cells(steps, envs)
    assert torch.equal(unpad(pad(x, plan), plan), x[:, chosen])
    part = slice(envs // 2, envs)
    plan = plan_trajectories(done, part)
    assert torch.equal(unpad(pad(x, plan), plan), x[:, part])


@given(windows, st.data(), st.booleans())
def test_groups_planned_together_are_those_planned_one_by_one(
    window: tuple[int, int, str, int], data: st.DataObject, zero_row: bool
) -> None:
    steps, envs, kind, seed = window
    done = done_flags(steps, envs, kind, seed)
    order = torch.randperm(envs, generator=torch.Generator().manual_seed(seed))
    bounds = balanced(envs, data.draw(st.integers(1, envs)))
    together = plan_groups(done.unsqueeze(-1), order, bounds)
    x = cells(steps, envs, 2)
    if zero_row:
        x = zeros_with_zero_row(x.shape, dtype=x.dtype, device="cpu").copy_(x)
    padded = together.split(together.pad(x))
    for plan, part, (first, last) in zip(together.plans, padded, bounds, strict=True):
        alone = plan_trajectories(done, order[first:last])
        for field in dataclasses.fields(plan):
            ours, theirs = getattr(plan, field.name), getattr(alone, field.name)
            if isinstance(theirs, Tensor):
                assert ours.dtype is theirs.dtype, field.name
                assert torch.equal(ours, theirs), field.name
            else:
                assert ours == theirs, field.name
        assert torch.equal(part, pad(x, alone))
        assert torch.equal(unpad(part, plan), x[:, order[first:last]])
    assert torch.equal(together.index, torch.cat([plan.index.view(-1) for plan in together.plans]))
    assert torch.equal(together.start, torch.cat([plan.start for plan in together.plans]))


def test_a_mask_that_was_changed_leaves_the_other_groups_their_plans() -> None:
    plans = plan_groups(torch.zeros(3, 4, dtype=torch.bool), torch.arange(4), balanced(4, 2)).plans
    for plan in plans:
        attach_plan(plan.mask, plan)
    plans[0].mask[2:] = False
    assert isinstance(layout_of(plans[0].mask), PaddedLayout)
    assert isinstance(layout_of(plans[1].mask), PlannedLayout)


@given(windows)
def test_resets_are_the_rows_after_a_done(window: tuple[int, int, str, int]) -> None:
    steps, envs, kind, seed = window
    done = done_flags(steps, envs, kind, seed)
    plan = plan_trajectories(done)
    assert list(plan.resets) == [t for t in range(1, steps) if done[t - 1].any()]
    assert not plan.goes_on[0].any()
    assert torch.equal(plan.goes_on[1:], ~done[:-1])


@given(windows)
def test_a_layout_reads_the_same_cells_with_and_without_its_plan(window: tuple[int, int, str, int]) -> None:
    steps, envs, kind, seed = window
    plan = plan_trajectories(done_flags(steps, envs, kind, seed))
    x = cells(steps, envs, 2).float()
    padded, mask = pad(x, plan), plan.mask.clone()
    bare = layout_of(mask)
    attach_plan(plan.mask, plan)
    planned = layout_of(plan.mask)
    assert planned.num_cells == bare.num_cells == steps * envs
    assert torch.equal(planned.take(padded), x.flatten(0, 1))
    assert torch.equal(planned.rows(padded), x)
    assert torch.equal(planned.of_rows(planned.rows(padded)), planned.take(padded))
    assert torch.equal(bare.of_rows(bare.rows(padded)), bare.take(padded))
    for layout in (planned, bare):
        assert torch.equal(layout.put(layout.take(padded)), padded)
    spoilt = padded.masked_fill(~mask.unsqueeze(-1), float("nan"))
    assert torch.equal(bare.rows(spoilt), padded)
    assert torch.equal(planned.rows(spoilt), x)


@pytest.mark.parametrize(
    "done",
    [torch.zeros(3), torch.zeros(3, 2), torch.zeros(3, 2, 2, dtype=torch.bool), torch.zeros(0, 2).bool()],
)
def test_flags_that_are_none_are_refused(done: Tensor) -> None:
    with pytest.raises(ValueError, match=r"`done` must be bool \[T, N\]"):
        plan_trajectories(done)


@given(windows)
def test_padding_is_gathered_from_a_row_of_zeros_where_there_is_one(
    window: tuple[int, int, str, int],
) -> None:
    steps, envs, kind, seed = window
    plan = plan_trajectories(done_flags(steps, envs, kind, seed))
    x = cells(steps, envs, 2)
    column = zeros_with_zero_row(x.shape, dtype=x.dtype, device="cpu").copy_(x)
    assert with_zero_row(column) is not None
    assert torch.equal(pad(column, plan), pad(x, plan))
    room = torch.full((plan.mask.numel(), 2), -1)
    assert torch.equal(pad(column, plan, out=room), pad(x, plan))


def test_a_mask_that_was_changed_or_copied_is_read_as_it_is() -> None:
    plan = plan_trajectories(torch.tensor([[False, True], [False, False], [False, False]]))
    attach_plan(plan.mask, plan)
    assert layout_of(plan.mask).num_cells == 6
    copy = plan.mask.clone()
    plan.mask[2:] = False
    for mask in (plan.mask, copy):
        expected = mask.clone()
        assert layout_of(mask).num_cells == int(expected.sum())
    assert len(trajectory_layouts._PLANNED) < 50, "a plan must not outlive its mask"


def test_plans_die_with_their_masks() -> None:
    plan = plan_trajectories(torch.zeros(3, 2, dtype=torch.bool))
    attach_plan(plan.mask, plan)
    before = weakref.ref(plan.mask)
    del plan
    assert before() is None


def test_what_was_not_padded_by_the_plan_is_refused() -> None:
    plan = plan_trajectories(torch.tensor([[False, True], [False, False], [False, False]]))
    with pytest.raises(ValueError, match=r"the plan pads to \[L, B\] = \(3, 3\)"):
        unpad(torch.zeros(2, 3), plan)


@pytest.mark.parametrize("envs", [torch.tensor([True, False]), torch.zeros(0, dtype=torch.int64)])
def test_environments_that_are_none_are_refused(envs: Tensor) -> None:
    with pytest.raises(ValueError, match=r"`envs` must be int64 \[M\]"):
        plan_trajectories(torch.zeros(3, 2, dtype=torch.bool), envs)


def test_a_part_of_a_column_is_not_taken_for_the_whole() -> None:
    column = zeros_with_zero_row((4, 2, 3), dtype=torch.float32, device="cpu")
    assert with_zero_row(column) is not None
    parts = (column[1:], column[:, :1], column[..., :2], column.transpose(0, 1), column.clone(), column[:3])
    assert all(with_zero_row(part) is None for part in parts)


def test_a_window_of_another_length_is_refused() -> None:
    plan = plan_trajectories(torch.zeros(3, 2, dtype=torch.bool))
    with pytest.raises(ValueError, match="4 rows of 2 environments, but the plan is of a window with 3 rows"):
        pad(torch.zeros(4, 2), plan)


def test_a_row_of_other_environments_is_refused() -> None:
    plan = plan_trajectories(torch.zeros(3, 2, dtype=torch.bool))
    with pytest.raises(ValueError, match=r"3 rows of 1 environments, .* 3 rows of 2"):
        pad(torch.zeros(3, 1), plan)
