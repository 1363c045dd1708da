"""Rows come in time order, as views, once per epoch; the states of a pass stand where it begins."""

from __future__ import annotations

import math
from itertools import chain

import pytest
import torch
from conftest import make_rows
from hypothesis import given
from hypothesis import strategies as st
from oracles import Plan, filled, plans
from tensordict import TensorDict
from torch import Tensor
from torchrl.data import LazyTensorStorage, ReplayBuffer

from torchrl_rslstorage import MiniBatchSampler, RolloutBuffer, TimeStepSampler
from torchrl_rslstorage.data.time_step_sampler import EpisodeStarts, starts_of


def steps_of(batch) -> list[int]:
    """The rows that a mini-batch holds, read off its cells."""
    observation = batch["observation"] if batch.ndim == 2 else batch["observation"].unsqueeze(0)
    steps = observation[:, :, 0]
    assert torch.equal(steps, steps[:, :1].expand_as(steps)), "cells of other rows are mixed in"
    assert torch.equal(observation[0, :, 1], torch.arange(observation.shape[1]).float())
    return steps[:, 0].long().tolist()


@given(plan=plans(), epochs=st.integers(1, 3), length=st.none() | st.integers(1, 8))
def test_every_epoch_yields_every_row_once_in_time_order(plan, epochs, length):
    sampler = TimeStepSampler(epochs, length=length)
    buffer = filled(plan, sampler=sampler)
    for _ in range(2):
        batches = [steps_of(batch) for batch in buffer]
        assert list(chain(*batches)) == epochs * list(range(plan.num_steps))
        assert len(batches) == sampler.num_batches == epochs * math.ceil(plan.num_steps / (length or 1))
        per_epoch = batches[: len(batches) // epochs]
        assert all(len(batch) == (length or 1) for batch in per_epoch[:-1])
        assert batches == epochs * per_epoch


@given(plan=plans(), length=st.none() | st.integers(1, 3))
def test_mini_batches_are_locked_views_of_the_window_with_done(plan, length):
    buffer = filled(plan, sampler=TimeStepSampler(length=length))
    window, start = buffer.window, 0
    for batch in buffer:
        count = 1 if length is None else len(batch)
        assert batch.is_locked
        assert set(batch.keys(True, True)) == {
            *(key for key in window.keys(True, True) if key[0] != "next"), ("next", "done")
        }  # fmt: skip
        for key, value in batch.items(True, True):
            rows = window.get(key)[start : start + count]
            assert torch.equal(value, rows.squeeze(0) if length is None else rows)
            assert value.data_ptr() == rows.data_ptr(), f"{key} was copied"
        start += count
    assert start == plan.num_steps


def test_chosen_keys_come_alone_with_done():
    buffer = filled(Plan(3, 2), sampler=TimeStepSampler(keys=["action", "sensors"]))
    for batch in buffer:
        keys = {"action", ("sensors", "camera"), ("sensors", "height"), ("next", "done")}
        assert set(batch.keys(True, True)) == keys
    with pytest.raises(KeyError, match="There is no key 'acton'"):
        next(iter(filled(Plan(3, 2), sampler=TimeStepSampler(keys=["acton"]))))


def with_states(row: TensorDict) -> TensorDict:
    state = row["observation"][:, :2].unsqueeze(1) + 1
    return row.update({"memory": {"h": state}, "next": {"memory": {"h": state + 1}}})


@pytest.mark.parametrize("kept", ["at starts", "as columns"])
@pytest.mark.parametrize("length", [None, 2])
def test_states_stand_where_a_pass_begins_and_nowhere_else(kept, length):
    sampler = TimeStepSampler(2, length=length, state_keys=["memory"])
    buffer = RolloutBuffer(3, 4, sampler=sampler, state_keys=["memory"] if kept == "at starts" else [])
    for row in make_rows(3, 4, terminated=[(0, 1), (1, 3)]):
        buffer.add(with_states(row))
    entering = torch.stack([torch.ones(4), torch.arange(4) + 1.0], -1).unsqueeze(1)
    for number, batch in enumerate(buffer):
        state = batch.get(("memory", "h"), None)
        if number % (sampler.num_batches // 2):
            assert state is None
            continue
        assert state.shape == (*batch.batch_size, 1, 2)
        assert torch.equal(state if length is None else state[0], entering)


@given(plan=plans(), length=st.integers(1, 4))
def test_the_rows_in_which_episodes_start_are_known_to_every_stretch(plan, length):
    buffer = filled(plan, sampler=TimeStepSampler(length=length))
    begin = 0
    for batch in buffer:
        flags, rows = starts_of(batch["next", "done"], batch["is_init"])
        copied, copied_rows = starts_of(batch["next", "done"].clone(), batch["is_init"])
        for row in range(len(batch)):
            t = begin + row
            expected = [
                t > 0 and any((t - 1, n) in ends for ends in (plan.terminated, plan.truncated))
                for n in range(plan.num_envs)
            ]
            assert flags[row].tolist() == expected
            assert (row in rows) == (row > 0 and any(expected))
        assert torch.equal(copied[1:], flags[1:]) and copied_rows == rows
        begin += length


def test_an_episode_that_was_started_from_outside_starts_anew_as_well():
    done, is_init = torch.zeros(3, 2, 1, dtype=torch.bool), torch.zeros(3, 2, 1, dtype=torch.bool)
    is_init[1, 0] = True
    starts = EpisodeStarts(done, is_init)
    assert starts.flags.tolist() == [[False, False], [True, False], [False, False]]
    assert starts.rows == (1,)


def test_a_running_update_goes_on_after_loading_in_a_new_buffer():
    buffer = filled(Plan(5, 2), sampler=TimeStepSampler(2, length=2))
    seen = [steps_of(buffer.sample()) for _ in range(4)]
    other = RolloutBuffer(5, 2, sampler=TimeStepSampler(2, length=2))
    other.load_state_dict(buffer.state_dict())
    seen += [steps_of(other.sample()) for _ in range(2)]
    assert seen == 2 * [[0, 1], [2, 3], [4]]
    with pytest.raises(ValueError, match="has 6 mini-batches, this sampler makes 10"):
        RolloutBuffer(5, 2, sampler=TimeStepSampler(2)).load_state_dict(buffer_in_its_middle().state_dict())
    with pytest.raises(ValueError, match="is one of a TimeStepSampler"):
        RolloutBuffer(5, 2, sampler=MiniBatchSampler(1)).load_state_dict(buffer_in_its_middle().state_dict())


def buffer_in_its_middle() -> RolloutBuffer:
    buffer = filled(Plan(5, 2), sampler=TimeStepSampler(2, length=2))
    buffer.sample()
    return buffer


def test_a_new_window_is_read_anew():
    buffer = filled(Plan(3, 2, terminated=frozenset({(0, 0)})), sampler=TimeStepSampler(length=3))
    assert starts_of(next(iter(buffer))["next", "done"], None)[1] == (1,)
    buffer.empty()
    for row in make_rows(3, 2, terminated=[(1, 1)]):
        buffer.add(row)
    assert starts_of(next(iter(buffer))["next", "done"], None)[1] == (2,)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: TimeStepSampler(0), "`num_epochs` must be an integer of at least 1, got 0"),
        (lambda: TimeStepSampler(length=0), "`length` must be an integer of at least 1, got 0"),
        (lambda: TimeStepSampler(keys=[]), "`keys` must be a sequence of at least one key"),
        (lambda: EpisodeStarts(torch.zeros(2, 3), None), r"must be bool \[T, N, 1\], got torch.float32"),
    ],
)
def test_what_cannot_be_is_named(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_a_stock_buffer_cannot_hand_out_views():
    stock = ReplayBuffer(storage=LazyTensorStorage(6, ndim=2), sampler=TimeStepSampler(), batch_size=2)
    with pytest.raises(TypeError, match="takes a RolloutBuffer"):
        stock.sample()


def test_it_says_what_it_is():
    assert repr(TimeStepSampler(2, length=3)) == "TimeStepSampler(num_epochs=2, length=3)"


def test_every_window_is_handed_out_as_it_is():
    buffer = filled(Plan(2, 2), sampler=TimeStepSampler())
    old: list[Tensor] = [batch["observation"].clone() for batch in buffer]
    buffer.empty()
    for row in make_rows(2, 2, window=1):
        buffer.add(row)
    new = [batch["observation"] for batch in buffer]
    assert all(not torch.equal(a, b) for a, b in zip(old, new, strict=True))
