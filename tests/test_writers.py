"""RolloutWriter: copies, in order, filled once; and whatever does not fit is refused by name."""

from __future__ import annotations

import re
from itertools import pairwise

import pytest
import torch
from conftest import make_row
from hypothesis import given
from hypothesis import strategies as st
from oracles import (
    OBSERVATIONS,
    ROOT_KEYS,
    WRITES,
    Plan,
    check_final_observations,
    check_window,
    check_writes_are_copies,
    column,
    filled,
    plans,
    same,
    tensors,
)
from tensordict import LazyStackedTensorDict, TensorDict
from torchrl.data import LazyTensorStorage, ReplayBuffer

from torchrl_rslstorage import RolloutBuffer, RolloutWriter

PLAN = Plan(4, 3, terminated=frozenset({(0, 1), (3, 0)}), truncated=frozenset({(1, 0), (1, 2), (3, 2)}))


def buffer_with(num_rows: int, plan: Plan = PLAN) -> RolloutBuffer:
    buffer = RolloutBuffer(plan.num_steps, plan.num_envs)
    for row in plan.rows()[:num_rows]:
        buffer.add(row)
    return buffer


# -- copies ------------------------------------------------------------------------------------


@given(plan=plans())
@pytest.mark.parametrize("write", WRITES)
def test_what_the_environment_does_to_its_tensors_later_changes_nothing_stored(write, plan):
    check_writes_are_copies(write, plan)


@pytest.mark.parametrize("write", WRITES)
def test_writing_leaves_what_it_was_given_as_it_was(write):
    rows = PLAN.rows()
    buffer = RolloutBuffer(PLAN.num_steps, PLAN.num_envs)
    for row in rows:
        if write == "add":
            buffer.add(row)
        elif write == "extend":
            buffer.extend(row.unsqueeze(1))
        else:
            buffer.writer.write_root(row)
            buffer.writer.write_next(row.get("next"))
    for row, untouched in zip(rows, PLAN.rows(), strict=True):
        assert tensors(row).keys() == tensors(untouched).keys()
        assert all(same(value, untouched.get(key)) for key, value in tensors(row).items())


@pytest.mark.parametrize("write", ["add", "extend", "halves"])
def test_what_requires_a_gradient_is_stored_without_it(write):
    buffer = RolloutBuffer(PLAN.num_steps, PLAN.num_envs)
    for row in PLAN.rows():
        for key in ("observation", "action", ("next", "observation"), ("next", "reward")):
            row.set(key, row.get(key) * torch.ones(1, requires_grad=True))
        if write == "halves":
            buffer.writer.write_root(row)
            buffer.writer.write_next(row.get("next"))
        else:
            buffer.add(row) if write == "add" else buffer.extend(row.unsqueeze(1))
    stored = [*tensors(buffer.window).values(), *tensors(buffer.final_observations.observation).values()]
    assert not any(value.requires_grad for value in stored)
    check_window(buffer, PLAN)
    check_final_observations(buffer, PLAN)


def test_a_window_begun_in_inference_mode_can_be_written_and_read_outside_of_it():
    buffer = RolloutBuffer(PLAN.num_steps, PLAN.num_envs)
    rows = PLAN.rows()
    for row in rows[:2]:
        with torch.inference_mode():
            buffer.add(row.clone())
    for row in rows[2:]:
        buffer.add(row)
    check_window(buffer, PLAN)
    check_final_observations(buffer, PLAN)
    with torch.inference_mode():
        buffer.sample()
    weight = torch.ones(4, 1, requires_grad=True)
    (buffer.sample()["observation"] @ weight).sum().backward()
    assert torch.equal(weight.grad.squeeze(), torch.stack(rows)["observation"].sum((0, 1)))


# -- blocks and rows give the same window ------------------------------------------------------


def pieces(rows: list[TensorDict], cuts: list[int]) -> list[list[TensorDict]]:
    """``rows`` cut before each of the positions in ``cuts``."""
    edges = [0, *sorted({cut for cut in cuts if cut < len(rows)} - {0}), len(rows)]
    return [rows[start:stop] for start, stop in pairwise(edges)]


BLOCKS = {
    "[N, T']": lambda rows: (torch.stack(rows, 1), 1),
    "[T', N]": lambda rows: (torch.stack(rows, 0), 0),
    "lazy [N, T']": lambda rows: (LazyStackedTensorDict.lazy_stack(rows, 1), 1),
    "lazy [T', N]": lambda rows: (LazyStackedTensorDict.lazy_stack(rows, 0), 0),
    "[N, T'] by default": lambda rows: (torch.stack(rows, 1), None),
    "named [N, T']": lambda rows: (torch.stack(rows, 1).refine_names(..., "time"), 1),
    "lazy over environments": lambda rows: (
        LazyStackedTensorDict.lazy_stack(list(torch.stack(rows, 1).unbind(0)), 0),
        1,
    ),
    "transposed": lambda rows: (torch.stack(rows, 0).transpose(0, 1), 1),
}


@given(plan=plans(), cuts=st.lists(st.integers(1, 5), max_size=3))
@pytest.mark.parametrize("block", BLOCKS)
def test_extending_by_blocks_is_adding_row_by_row(block, plan, cuts):
    buffer = RolloutBuffer(plan.num_steps, plan.num_envs)
    written: list[int] = []
    for part in pieces(plan.rows(), cuts):
        data, time_dim = BLOCKS[block](part)
        rows = buffer.extend(data) if time_dim is None else buffer.extend(data, time_dim=time_dim)
        written += rows.tolist()
        assert buffer.num_rows == len(written)
    assert written == list(range(plan.num_steps))
    check_window(buffer, plan)
    check_final_observations(buffer, plan)
    assert buffer.write_count == plan.num_steps * plan.num_envs


@given(plan=plans())
def test_adding_row_by_row_stores_every_row_and_returns_its_number(plan):
    buffer = RolloutBuffer(plan.num_steps, plan.num_envs)
    assert [buffer.add(row) for row in plan.rows()] == list(range(plan.num_steps))
    check_window(buffer, plan)
    check_final_observations(buffer, plan)
    assert buffer.write_count == plan.num_steps * plan.num_envs


@given(plan=plans())
def test_two_halves_make_the_row_that_add_makes(plan):
    buffer = RolloutBuffer(plan.num_steps, plan.num_envs)
    for t, row in enumerate(plan.rows()):
        buffer.writer.write_root(row)
        assert buffer.num_rows == t
        assert buffer.writer.write_next(row.get("next")) == t
    check_window(buffer, plan)
    check_final_observations(buffer, plan)


# -- one environment ---------------------------------------------------------------------------


@given(plan=plans(max_envs=1))
def test_a_single_environment_needs_no_batch_dimension(plan):
    batched, added, extended, extended_in_time = (RolloutBuffer(plan.num_steps, 1) for _ in range(4))
    rows = [row[0] for row in plan.rows()]
    for row in rows:
        assert row.batch_size == torch.Size([])
        added.add(row)
    extended.extend(torch.stack(rows))
    extended_in_time.extend(LazyStackedTensorDict.lazy_stack(rows), time_dim=0)
    batched.extend(torch.stack(plan.rows()), time_dim=0)
    for buffer in (batched, added, extended, extended_in_time):
        check_window(buffer, plan)
        check_final_observations(buffer, plan)


def test_an_example_of_a_single_environment_needs_no_batch_dimension():
    example = make_row(0, 1)
    assert RolloutBuffer(3, 1).nbytes(example[0]) == RolloutBuffer(3, 1).nbytes(example)
    assert RolloutBuffer(3, 1, example=example[0]).nbytes() == RolloutBuffer(3, 1).nbytes(example)


@pytest.mark.parametrize("write", WRITES)
def test_a_window_of_a_single_step_is_full_after_it(write):
    plan = Plan(1, 3, truncated=frozenset({(0, 1)}))
    buffer = RolloutBuffer(1, 3)
    WRITES[write](buffer, plan)
    assert buffer.is_full
    check_window(buffer, plan)
    check_final_observations(buffer, plan)


# -- what a row is made of ---------------------------------------------------------------------


def test_done_flags_of_the_root_collector_entries_and_resets_are_left_out():
    buffer = RolloutBuffer(2, 3)
    for row in Plan(2, 3).rows():
        for name in ("done", "terminated", "truncated", "_reset"):
            row.set(name, torch.ones(3, 1, dtype=torch.bool))
        row.set(("collector", "traj_ids"), torch.arange(3))
        row.set(("next", "is_init"), torch.ones(3, 1, dtype=torch.bool))
        buffer.add(row)
    check_window(buffer, Plan(2, 3))
    check_final_observations(buffer, Plan(2, 3))


def test_what_stands_under_next_only_gets_a_column():
    buffer = RolloutBuffer(2, 3)
    rows = Plan(2, 3).rows()
    for t, row in enumerate(rows):
        row.set(("next", "cost"), torch.full((3,), t))
        row.set(("next", "info", "goal"), torch.full((3, 2), t, dtype=torch.int16))
        buffer.add(row)
    for key in (("next", "cost"), ("next", "info", "goal")):
        assert same(buffer.window.get(key), column(rows, key))
    assert tensors(buffer.final_observations.observation).keys() == set(OBSERVATIONS)


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.uint8, torch.int32, torch.float64])
@pytest.mark.parametrize("shape", [(), (1,), (2,), (2, 3, 4)])
def test_actions_and_observations_of_any_dtype_and_rank_are_kept(dtype, shape):
    buffer, generator = RolloutBuffer(3, 2), torch.Generator().manual_seed(0)
    rows = Plan(3, 2, truncated=frozenset({(1, 0)})).rows()
    for row in rows:
        for key in ("action", ("deeply", "nested", "state"), ("next", "deeply", "nested", "state")):
            row.set(key, torch.randint(0, 2, (2, *shape), generator=generator).to(dtype))
        buffer.add(row)
    for key in ("action", ("deeply", "nested", "state")):
        assert same(buffer.window.get(key), column(rows, key))
    final = buffer.final_observations.observation.get(("deeply", "nested", "state"))
    after = column(rows, ("next", "deeply", "nested", "state"))
    assert same(final, torch.cat([after[1, :1], after[2]]))


@pytest.mark.parametrize("write", ["add", "extend", "halves"])
@pytest.mark.parametrize("missing", [("truncated",), ("terminated",), ("truncated", "terminated")])
def test_a_missing_flag_is_done_without_the_other(write, missing):
    buffer = RolloutBuffer(PLAN.num_steps, PLAN.num_envs)
    overlap = PLAN._replace(terminated=PLAN.terminated - PLAN.truncated)
    for row in overlap.rows():
        for name in missing:
            del row["next", name]
        if write == "halves":
            buffer.writer.write_root(row)
            buffer.writer.write_next(row.get("next"))
        else:
            buffer.add(row) if write == "add" else buffer.extend(row.unsqueeze(1))
    if len(missing) == 2:  # an environment that knows only `done` never truncates
        overlap = overlap._replace(terminated=overlap.terminated | overlap.truncated, truncated=frozenset())
    check_window(buffer, overlap)
    check_final_observations(buffer, overlap)


# -- the order of calls ------------------------------------------------------------------------


def test_the_root_half_comes_once_and_first():
    buffer = buffer_with(1)
    row = PLAN.rows()[1]
    with pytest.raises(RuntimeError, match=r"Row 1 has no root half: call write_root before"):
        buffer.writer.write_next(row.get("next"))
    buffer.writer.write_root(row)
    with pytest.raises(RuntimeError, match="Row 1 has its root half already: call write_next"):
        buffer.writer.write_root(row)


def test_a_half_written_row_is_neither_added_over_nor_saved():
    buffer = buffer_with(1)
    row = PLAN.rows()[1]
    buffer.writer.write_root(row)
    for wrong in (
        lambda: buffer.add(row),
        lambda: buffer.extend(row.unsqueeze(1)),
        buffer.state_dict,
        buffer.writer.state_dict,
    ):
        with pytest.raises(RuntimeError, match="Row 1 is half written"):
            wrong()
    assert buffer.num_rows == 1
    buffer.writer.write_next(row.get("next"))
    for row in PLAN.rows()[2:]:
        buffer.add(row)
    check_window(buffer, PLAN)


def test_emptying_forgets_a_half_written_row():
    buffer = buffer_with(1)
    buffer.writer.write_root(PLAN.rows()[1])
    buffer.empty()
    for row in PLAN.rows():
        buffer.add(row)
    check_window(buffer, PLAN)


@pytest.mark.parametrize(
    "write",
    [
        lambda buffer, row: buffer.add(row),
        lambda buffer, row: buffer.extend(row.unsqueeze(1)),
        lambda buffer, row: buffer.writer.write_root(row),
    ],
    ids=["add", "extend", "write_root"],
)
def test_a_full_window_overflows_and_says_how_full_it_is(write):
    buffer = filled(PLAN)
    with pytest.raises(OverflowError, match=r"holds 4 of 4 rows and 1 more do not fit.*buffer\.empty\(\)"):
        write(buffer, make_row(0, 3, window=9))
    check_window(buffer, PLAN)
    assert buffer.write_count == 12


def test_a_block_that_does_not_fit_is_not_written_at_all():
    buffer = buffer_with(2)
    with pytest.raises(OverflowError, match="holds 2 of 4 rows and 3 more do not fit"):
        buffer.extend(torch.stack([make_row(t, 3, window=9) for t in range(3)], 1))
    assert buffer.num_rows == 2
    assert buffer.write_count == 6
    buffer.extend(torch.stack(PLAN.rows()[2:], 1))
    check_window(buffer, PLAN)
    check_final_observations(buffer, PLAN)


# -- what does not fit is refused by name ------------------------------------------------------


def changed(row: TensorDict, **changes) -> TensorDict:
    """``row`` with entries replaced, removed (None) or cast; ``next_reward`` stands for a key of ``next``."""
    for name, value in changes.items():
        key = ("next", name.removeprefix("next_")) if name.startswith("next_") else name
        if value is None:
            del row[key]
        elif callable(value):
            row.set(key, value(row.get(key)))
        else:
            row.set(key, value)
    return row


LATER_ROWS = {
    "missing root key": (
        {"action": None},
        KeyError,
        ["Row 2 lacks 'action'", "root half", "'observation'"],
    ),
    "missing group": (
        {"sensors": None},
        KeyError,
        ["lacks ('sensors', 'camera'), ('sensors', 'height')"],
    ),
    "unknown root key": ({"extra": torch.zeros(3, 1)}, KeyError, ["brings the unknown 'extra'", "root half"]),
    "missing signal": ({"next_reward": None}, KeyError, ["Row 2 lacks 'reward'", "next half"]),
    "missing next observation": ({"next_observation": None}, KeyError, ["lacks 'observation'", "next half"]),
    "unknown next key": (
        {"next_extra": torch.zeros(3)},
        KeyError,
        ["brings the unknown 'extra'", "next half"],
    ),
    "root dtype": (
        {"observation": lambda x: x.double()},
        ValueError,
        ["'observation' in row 2", "root half", "float64 (3, 4)", "float32 (3, 4)"],
    ),
    "nested dtype": (
        {"sensors": lambda x: x.apply(lambda y: y.int() if y.dtype == torch.uint8 else y)},
        ValueError,
        ["('sensors', 'camera')", "int32 (3, 2, 2)", "uint8 (3, 2, 2)"],
    ),
    "root shape": (
        {"action": lambda x: x[:, :1]},
        ValueError,
        ["'action' in row 2", "(3, 1)", "(3, 2)"],
    ),
    "reward dtype": (
        {"next_reward": lambda x: x.double()},
        ValueError,
        ["'reward' in row 2", "next half", "float64 (3, 1)", "float32 (3, 1)"],
    ),
    "reward without its trailing 1": (
        {"next_reward": lambda x: x.squeeze(-1)},
        ValueError,
        ["'reward' in row 2", "(3,)", "(3, 1)"],
    ),
    "next observation dtype": (
        {"next_observation": lambda x: x.double()},
        ValueError,
        ["'observation' in row 2", "next half", "float64 (3, 4)", "float32 (3, 4)"],
    ),
    "next observation shape": (
        {"next_observation": lambda x: x[:, :3]},
        ValueError,
        ["'observation' in row 2", "next half", "(3, 3)", "(3, 4)"],
    ),
    "flag dtype": (
        {"next_truncated": lambda x: x.float()},
        ValueError,
        ["('next', 'truncated') is float32, expected bool"],
    ),
    "no next": ({"next": None}, KeyError, ["A row needs its `next`"]),
}


@pytest.mark.parametrize("fault", LATER_ROWS)
@pytest.mark.parametrize("block", [False, True], ids=["add", "extend"])
def test_a_row_unlike_the_first_is_refused_by_name(fault, block):
    changes, error, parts = LATER_ROWS[fault]
    buffer = buffer_with(2)
    row = changed(PLAN.rows()[2], **changes)
    with pytest.raises(error) as caught:
        buffer.extend(row.unsqueeze(1)) if block else buffer.add(row)
    for part in parts:
        assert part in caught.value.args[0]
    assert buffer.num_rows == 2
    for good in PLAN.rows()[2:]:
        buffer.add(good)
    check_window(buffer, PLAN)
    check_final_observations(buffer, PLAN)


FIRST_ROWS = {
    "no reward": ({"next_reward": None}, KeyError, ["needs reward and done", "'reward' is missing"]),
    "no done": (
        {"next_done": None},
        KeyError,
        ["needs reward and done", "'done' is missing", "'terminated'"],
    ),
    "no next": ({"next": None}, KeyError, ["A row needs its `next`"]),
    "reward without its trailing 1": (
        {"next_reward": lambda x: x.squeeze(-1)},
        ValueError,
        ["('next', 'reward') has shape (3,), expected (3, 1)"],
    ),
    "reward of two values": (
        {"next_reward": lambda x: x.expand(3, 2)},
        ValueError,
        ["('next', 'reward') has shape (3, 2), expected (3, 1)"],
    ),
    "float done": (
        {"next_done": lambda x: x.float(), "next_truncated": None},
        ValueError,
        ["('next', 'done') is float32, expected bool"],
    ),
    "uint8 terminated": (
        {"next_terminated": lambda x: x.byte()},
        ValueError,
        ["('next', 'terminated') is uint8, expected bool"],
    ),
    "next observation unlike the root's": (
        {"next_observation": lambda x: x.double()},
        ValueError,
        ["'observation' in row 0", "next half", "float64", "float32"],
    ),
    "no root entries": (
        {
            key: None
            for key in ("observation", "sensors", "action", "action_log_prob", "state_value", "is_init")
        },
        KeyError,
        ["entries of its own beside `next`"],
    ),
}


@pytest.mark.parametrize("fault", FIRST_ROWS)
def test_a_first_row_that_is_no_row_is_refused_and_leaves_no_layout_behind(fault):
    changes, error, parts = FIRST_ROWS[fault]
    buffer = RolloutBuffer(PLAN.num_steps, PLAN.num_envs)
    row = changed(make_row(0, 3), **changes)
    if fault != "no root entries":
        row.set("leftover", torch.zeros(3))
    with pytest.raises(error) as caught:
        buffer.add(row)
    for part in parts:
        assert part in caught.value.args[0]
    assert buffer.num_rows == 0
    for good in PLAN.rows():
        buffer.add(good)
    check_window(buffer, PLAN)
    check_final_observations(buffer, PLAN)


def test_an_entry_that_is_no_tensor_is_named():
    row = make_row(0, 3)
    row.set_non_tensor("task", "walk")
    with pytest.raises(TypeError, match=r"entry 'task' is a NonTensorData, not a tensor"):
        RolloutBuffer(4, 3).add(row)


@pytest.mark.parametrize("num_envs", [2, 4])
def test_a_row_of_another_number_of_environments_is_refused(num_envs):
    for write in (
        RolloutBuffer(4, 3).add,
        RolloutBuffer(4, 3).writer.add,
        RolloutBuffer(4, 3).writer.write_root,
    ):
        with pytest.raises(ValueError, match=re.escape(f"batch size ({num_envs},), expected (3,)")):
            write(make_row(0, num_envs))


def test_a_row_without_a_batch_dimension_is_refused_where_there_are_several_environments():
    with pytest.raises(ValueError, match=re.escape("batch size (), expected (3,)")):
        RolloutBuffer(4, 3).add(make_row(0, 3)[0])


def test_a_block_the_wrong_way_round_is_refused_with_the_way_to_turn_it():
    block = torch.stack(PLAN.rows())  # [T, N] = [4, 3]
    buffer = RolloutBuffer(4, 3)
    with pytest.raises(ValueError, match=r"\[N, T'\] with N = 3.*batch size \(4, 3\).*time_dim=0"):
        buffer.extend(block)
    with pytest.raises(ValueError, match=r"\[T', N\] with N = 3.*batch size \(3, 4\).*time_dim=1"):
        buffer.extend(block.transpose(0, 1), time_dim=0)
    assert buffer.num_rows == 0


def test_a_square_block_the_wrong_way_round_is_refused_where_its_dimensions_have_names():
    block = torch.stack([make_row(t, 3) for t in range(3)]).refine_names("time", ...)
    with pytest.raises(ValueError, match="dimension 0 is named 'time', but time_dim=1"):
        RolloutBuffer(4, 3).extend(block)


@pytest.mark.parametrize("shape", [(3,), (3, 4, 1)])
def test_a_block_of_one_or_three_dimensions_is_refused(shape):
    block = TensorDict({"observation": torch.zeros(*shape, 1)}, shape)
    with pytest.raises(ValueError, match=re.escape(f"batch size {shape}")):
        RolloutBuffer(4, 3).extend(block)


def test_the_writer_takes_time_first_blocks_only():
    buffer = RolloutBuffer(4, 3)
    with pytest.raises(ValueError, match=r"\[T', N\], got batch size \(3,\)"):
        buffer.writer.extend(make_row(0, 3))


def test_an_unknown_time_dim_and_priorities_are_refused():
    block = torch.stack(PLAN.rows(), 1)
    with pytest.raises(ValueError, match=r"`time_dim` must be 0 .* or 1 .*, got 2"):
        RolloutBuffer(4, 3).extend(block, time_dim=2)
    with pytest.raises(NotImplementedError, match="no priorities"):
        RolloutBuffer(4, 3).extend(block, update_priority=True)


def test_a_storage_of_another_kind_is_refused_by_name():
    with pytest.raises(TypeError, match="not into LazyTensorStorage"):
        ReplayBuffer(storage=LazyTensorStorage(12, ndim=2), writer=RolloutWriter(), batch_size=2)


# -- saving ------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["state_dict", "dumps"])
def test_a_loaded_writer_stands_where_the_saved_one_stood(how, tmp_path):
    saved, loaded = buffer_with(3).writer, RolloutBuffer(4, 3).writer
    if how == "state_dict":
        loaded.load_state_dict(saved.state_dict())
    else:
        for _ in range(2):  # into a folder that is not there yet, and over an older state
            saved.dumps(tmp_path / "new" / "writer")
        loaded.loads(tmp_path / "new" / "writer")
    assert (loaded.num_rows, loaded.write_count) == (3, 9)


def test_rows_hold_every_key_that_these_tests_write():
    assert tensors(make_row(0, 3).exclude("next")).keys() == ROOT_KEYS
