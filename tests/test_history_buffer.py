"""HistoryBuffer: a list per environment, RSL-RL's golden values, errors and saving."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from oracles_history import Twin, Waits, check_random_program, make_step, same
from tensordict import LazyStackedTensorDict, TensorDict
from torchrl.data.replay_buffers import RandomSampler, ReplayBuffer
from torchrl.envs import DoubleToFloat

from torchrl_rslstorage import HistoryBuffer, HistorySampler, MiniBatchSampler, RolloutTensorStorage

# -- a list per environment ----------------------------------------------------------------------


class ListPerEnvironment(RuleBasedStateMachine):
    """Whatever is done to a history, it reads as a list per environment that the same is done to."""

    @initialize(
        max_len=st.integers(1, 5),
        num_envs=st.integers(1, 4),
        parts=st.integers(1, 3),
        epochs=st.integers(1, 4),
        samples=st.none() | st.integers(3, 12),
        redraw=st.sampled_from(["epoch", "update"]),
    )
    def make(self, max_len, num_envs, parts, epochs, samples, redraw):
        self.twin = Twin(max_len, num_envs, HistorySampler(parts, epochs, samples, redraw))

    def some(self, data) -> list[bool]:
        return data.draw(st.lists(st.booleans(), min_size=self.twin.num_envs, max_size=self.twin.num_envs))

    @rule()
    def append(self):
        self.twin.append()

    @rule(data=st.data())
    def append_some(self, data):
        self.twin.append(self.some(data))

    @rule(data=st.data(), masked=st.booleans())
    def extend(self, data, masked):
        num_steps = data.draw(st.integers(0, 2 * self.twin.max_len + 1))
        self.twin.extend(num_steps, [self.some(data) for _ in range(num_steps)] if masked else None)

    @rule(data=st.data(), form=st.sampled_from(["list", "tensor", "mask"]))
    def reset_some(self, data, form):
        self.twin.reset(data.draw(st.lists(st.integers(0, self.twin.num_envs - 1))), form)

    @rule()
    def reset_all(self):
        self.twin.reset_all()

    @rule(age=st.integers(0, 12))
    def read_at_one_age(self, age):
        self.twin.check_at_age(age)

    @rule(data=st.data())
    def read_at_ages(self, data):
        n = self.twin.num_envs
        self.twin.check_at_age(data.draw(st.lists(st.integers(0, 12), min_size=n, max_size=n)))

    @rule()
    def read_all(self):
        self.twin.check_history()

    @rule(save_before=st.none() | st.integers(0, 11))
    def sample(self, save_before):
        self.twin.check_update(save_before)

    @rule()
    def save_and_load(self):
        self.twin.save_and_load()

    @invariant()
    def lengths_agree(self):
        if hasattr(self, "twin"):
            self.twin.check_sizes()


ListPerEnvironment.TestCase.settings = settings(
    max_examples=60, stateful_step_count=50, deadline=None, derandomize=True
)
test_a_history_is_a_list_per_environment = ListPerEnvironment.TestCase


@pytest.mark.parametrize("masks", [False, True])
def test_long_random_programs_agree_with_a_list_per_environment(masks):
    for seed in range(10):
        check_random_program(seed, 100, masks=masks)


# -- golden values of RSL-RL's CircularBuffer ----------------------------------------------------
#
# Derived by hand from what its docstrings promise (leggedrobotics/rsl_rl, AMP branch, commit 84ac0088,
# storage/circular_buffer.py): a ring of max_len = 3 for two environments, to which 0, 1, 2, … are appended,
# 10 more for environment 1.


def appended(*numbers: int, reset_before: dict[int, list[int]] | None = None) -> HistoryBuffer:
    buffer = HistoryBuffer(3, 2)
    for number in numbers:
        if reset_before and number in reset_before:
            buffer.reset(reset_before[number])
        buffer.append(TensorDict({"x": torch.tensor([number, 10 + number])}, [2]))
    return buffer


def test_the_first_append_fills_every_slot():
    # "the first push after a reset is written into all slots": one step, shown max_len times.
    assert appended(0).history()["x"].tolist() == [[0, 0, 0], [10, 10, 10]]


def test_until_the_ring_is_full_the_oldest_step_fills_the_rest():
    # push 0: [0 0 0]; push 1 overwrites the slot behind it: oldest to newest [0 0 1].
    assert appended(0, 1).history()["x"].tolist() == [[0, 0, 1], [10, 10, 11]]


@pytest.mark.parametrize("last", [2, 3, 4, 5, 6])
def test_a_full_ring_shows_its_newest_steps_from_oldest_to_newest(last):
    expected = [last - 2, last - 1, last]
    assert appended(*range(last + 1)).history()["x"].tolist() == [expected, [10 + x for x in expected]]


def test_reading_is_last_in_first_out_and_clamped_to_the_oldest():
    buffer = appended(0, 1, 2, 3)  # holds 1 2 3
    ages = {0: 3, 1: 2, 2: 1, 3: 1, 100: 1}
    for age, x in ages.items():
        assert buffer.at_age(age)["x"].tolist() == [x, 10 + x]
    assert buffer.at_age(torch.tensor([0, 2]))["x"].tolist() == [3, 11]


def test_reading_is_clamped_to_what_was_appended_before_the_ring_is_full():
    buffer = appended(0, 1)
    assert [buffer.at_age(age)["x"].tolist() for age in range(4)] == [[1, 11], [0, 10], [0, 10], [0, 10]]


def test_the_first_append_after_a_reset_fills_the_slots_of_that_environment_only():
    buffer = appended(0, 1, 2, 3, reset_before={3: [1]})
    assert buffer.history()["x"].tolist() == [[1, 2, 3], [13, 13, 13]]
    assert buffer.lengths.tolist() == [3, 1]
    assert buffer.num_pushes.tolist() == [4, 1]
    assert appended(*range(5), reset_before={3: [1]}).history()["x"].tolist() == [[2, 3, 4], [13, 13, 14]]


# -- what RSL-RL leaves open ---------------------------------------------------------------------


def test_an_environment_that_was_reset_reads_as_zeros_until_its_next_append():
    buffer = appended(5, 6)
    buffer.reset([0])
    assert buffer.at_age(0)["x"].tolist() == [0, 16]
    assert buffer.history()["x"].tolist() == [[0, 0, 0], [15, 15, 16]]


@pytest.mark.parametrize("make_empty", [lambda b: None, lambda b: b.reset(), lambda b: b.empty()])
def test_a_history_that_holds_nothing_cannot_be_read(make_empty):
    buffer = HistoryBuffer(3, 2)
    for _ in range(2):
        for read in (lambda: buffer.at_age(0), buffer.history, buffer.sample, lambda: next(iter(buffer))):
            with pytest.raises(RuntimeError, match="3 steps x 2 environments is empty: append a step"):
                read()
        assert len(buffer) == 0
        buffer.append(make_step(0, 2))
        make_empty(buffer)
        if buffer.lengths.any():
            break


def test_negative_ages_in_a_tensor_are_the_newest():
    assert appended(0, 1, 2).at_age(torch.tensor([-1, -7]))["x"].tolist() == [2, 12]


def test_reading_changes_nothing_and_what_was_read_is_a_copy():
    buffer = appended(0, 1, 2)
    before = buffer.state_dict()
    buffer.at_age(1)["x"].fill_(-1)
    buffer.history()["x"].fill_(-1)
    for batch in buffer:
        batch["x"].fill_(-1)
    after = buffer.state_dict()
    assert torch.equal(before["_storage"]["columns"]["x"], after["_storage"]["columns"]["x"])
    assert buffer.history()["x"].tolist() == [[0, 1, 2], [10, 11, 12]]


def test_the_stock_view_of_the_whole_buffer_is_its_history():
    buffer = appended(0, 1, 2, 3)
    assert buffer[:]["x"].tolist() == buffer.history()["x"].tolist()
    assert buffer["x"].tolist() == buffer.history()["x"].tolist()
    with pytest.raises(TypeError, match=r"append\(step\)"):
        buffer[:] = buffer.history()


def test_add_is_append_and_transitions_are_counted():
    buffer = HistoryBuffer(2, 3)
    buffer.add(make_step(0, 3))
    buffer.append(make_step(1, 3), torch.zeros(3, dtype=torch.bool))
    buffer.extend(torch.stack([make_step(k, 3) for k in range(5)]))
    assert buffer.write_count == 21
    buffer.empty()
    assert buffer.write_count == 21
    buffer.empty(empty_write_count=True)
    assert buffer.write_count == 0


def test_a_stack_of_steps_is_taken_apart_as_a_dense_one():
    steps = [make_step(k, 2) for k in range(5)]
    for mask in (None, torch.tensor([True, False])):
        lazy, dense = HistoryBuffer(3, 2), HistoryBuffer(3, 2)
        lazy.extend(LazyStackedTensorDict(*steps, stack_dim=0), mask)
        dense.extend(torch.stack(steps), mask)
        assert same(lazy.history()["observation"], dense.history()["observation"])
        assert lazy.lengths.tolist() == ([3, 3] if mask is None else [3, 0])


def test_a_step_whose_tensors_need_gradients_is_stored_without_them():
    buffer = HistoryBuffer(2, 2)
    step = TensorDict({"x": torch.ones(2, requires_grad=True) * 2}, [2])
    for mask in (None, torch.tensor([True, False]), None):
        buffer.append(step, mask)
    assert not buffer.history()["x"].requires_grad


def test_what_was_written_in_inference_mode_can_be_written_outside_of_it():
    buffer = HistoryBuffer(2, 2, sampler=HistorySampler(2, 2))
    with torch.inference_mode():
        buffer.append(make_step(0, 2))
        buffer.append(make_step(1, 2), torch.tensor([True, False]))
        buffer.reset([0])
        buffer.append(make_step(2, 2))
        first = list(buffer)
    buffer.append(make_step(3, 2))
    buffer.reset()
    buffer.append(make_step(4, 2), torch.tensor([True, True]))
    assert len(list(buffer)) == len(first) == 4
    assert buffer.at_age(0)["cell"].tolist() == [9, 10]


def test_transforms_stand_between_the_history_and_its_readers_and_writers():
    buffer = HistoryBuffer(2, 2)
    buffer.append_transform(DoubleToFloat(in_keys=["x"], in_keys_inv=[]))
    buffer.append(TensorDict({"x": torch.ones(2, dtype=torch.float64)}, [2]))
    assert buffer.sample()["x"].dtype is torch.float32
    assert next(iter(buffer))["x"].dtype is torch.float32


def test_unmasked_appends_are_row_copies_again_once_all_environments_are_reset():
    buffer = HistoryBuffer(3, 2)
    buffer.append(make_step(0, 2), torch.tensor([True, False]))
    assert not buffer.storage.ring.is_aligned
    buffer.reset()
    assert buffer.storage.ring.is_aligned


def write_and_read(buffer: HistoryBuffer, steps: list[TensorDict], mask: torch.Tensor) -> None:
    """All that happens between two updates, with everything on the device."""
    ages = torch.arange(len(mask), device=mask.device)
    for written in (None, mask, None):
        buffer.append(steps[0], written)
        buffer.extend(torch.stack(steps), written)
        buffer.reset(mask)
        buffer.at_age(1)
        buffer.at_age(ages)
        buffer.history()


def test_writing_and_reading_never_wait_for_the_device_and_an_update_does_once():
    buffer = HistoryBuffer(3, 4, sampler=HistorySampler(2, 3, 5))
    steps, mask = [make_step(k, 4) for k in range(5)], torch.tensor([True, False, False, True])
    with Waits() as waits:
        write_and_read(buffer, steps, mask)
    assert waits.names == []
    with Waits() as waits:
        assert sum(1 for _ in buffer) == 6  # list() would also ask for len(buffer)
    assert waits.names == ["_local_scalar_dense"]
    with Waits() as waits:
        mask.any().item()
        mask.nonzero()
    assert len(waits.names) == 2


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_on_a_cuda_device_writing_and_reading_do_not_wait_for_it():
    buffer = HistoryBuffer(3, 4, sampler=HistorySampler(2, 3, 5), device="cuda")
    steps = [make_step(k, 4).to("cuda") for k in range(5)]
    mask = torch.tensor([True, False, False, True], device="cuda")
    write_and_read(buffer, steps, mask)
    torch.cuda.set_sync_debug_mode("error")
    try:
        write_and_read(buffer, steps, mask)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert [batch.device.type for batch in buffer] == ["cuda"] * 6


# -- errors --------------------------------------------------------------------------------------


def wrong_step(**changes) -> TensorDict:
    step = make_step(1, 3)
    for key, value in changes.items():
        if value is None:
            del step[key]
        else:
            step[key] = value
    return step


@pytest.mark.parametrize("mask", [None, torch.tensor([True, False, True])], ids=["all", "some"])
@pytest.mark.parametrize(
    ("step", "error", "words"),
    [
        (make_step(0, 2), ValueError, ["batch size (", "N = 3]"]),
        (wrong_step(alive=None), KeyError, ["lacks 'alive'", "'observation'"]),
        (wrong_step(more=torch.zeros(3)), KeyError, ["brings the unknown 'more'"]),
        (
            wrong_step(observation=torch.zeros(3, 4)),
            ValueError,
            ["'observation' in row 1 is float32 (3, 4)", "float32 (3, 3)"],
        ),
        (
            wrong_step(observation=torch.zeros(3, 3).double()),
            ValueError,
            ["'observation'", "float64 (3, 3)", "float32"],
        ),
    ],
    ids=["environments", "missing", "unknown", "shape", "dtype"],
)
def test_a_wrong_step_is_refused_in_words_and_writes_nothing(step, error, words, mask):
    buffer = HistoryBuffer(2, 3)
    buffer.append(make_step(0, 3))
    for write in (lambda: buffer.append(step, mask), lambda: buffer.extend(step.unsqueeze(0), mask)):
        with pytest.raises(error) as caught:
            write()
        for word in words:
            assert word in caught.value.args[0]
    assert buffer.num_pushes.tolist() == [1, 1, 1]
    assert buffer.at_age(0)["cell"].tolist() == [1, 2, 3]


def test_a_step_without_entries_is_refused():
    with pytest.raises(KeyError, match="came with none"):
        HistoryBuffer(2, 3).append(TensorDict({}, [3]))
    with pytest.raises(TypeError, match="from TensorDicts, got Tensor"):
        HistoryBuffer(2, 3).append(torch.zeros(3))


@pytest.mark.parametrize("mask", [torch.ones(3), torch.ones(2, dtype=torch.bool), torch.ones(3, 1).bool()])
def test_a_wrong_mask_is_refused(mask):
    buffer = HistoryBuffer(2, 3)
    with pytest.raises(ValueError, match=r"`mask` is .*expected bool \(3,\)"):
        buffer.append(make_step(0, 3), mask)
    with pytest.raises(ValueError, match=r"`mask` is .*expected bool \((3,|2, 3)\)"):
        buffer.extend(torch.stack([make_step(0, 3)] * 2), mask)


def test_steps_with_time_in_the_wrong_place_are_refused():
    buffer = HistoryBuffer(2, 3)
    block = torch.stack([make_step(k, 3) for k in range(3)])
    with pytest.raises(ValueError, match=r"\[T', N = 3\], got batch size \(3, 2\).*transpose"):
        buffer.extend(block[:2].transpose(0, 1))
    block.names = [None, "time"]
    with pytest.raises(ValueError, match=r"dimension 1 is named 'time': pass steps\.transpose"):
        buffer.extend(block)


@pytest.mark.parametrize("age", [-1, 1.0, True, "0", None])
def test_an_age_that_is_no_number_from_zero_is_refused(age):
    with pytest.raises(ValueError, match="`age` must be an integer of at least 0"):
        appended(0).at_age(age)


@pytest.mark.parametrize("age", [torch.zeros(2), torch.zeros(3, dtype=torch.int64), torch.tensor(0)])
def test_ages_that_are_not_one_integer_an_environment_are_refused(age):
    with pytest.raises(ValueError, match=r"`age` is .*integers \[N = 2\]"):
        appended(0).at_age(age)


@pytest.mark.parametrize("ages", [torch.int32, torch.uint8])
def test_ages_may_have_any_integer_dtype(ages):
    assert appended(0, 1, 2).at_age(torch.tensor([0, 1], dtype=ages))["x"].tolist() == [2, 11]


@pytest.mark.parametrize(
    ("envs", "match"),
    [
        ([2], "environments 0 to 1, got 2 to 2"),
        (torch.tensor([-1, 0]), "got -1 to 0"),
        (5, "got 5 to 5"),
        (torch.tensor([True]), r"mask of environments has shape \(1,\), expected \[N = 2\]"),
        (torch.tensor([0.0]), r"by integers \[K\], got float32"),
        (torch.tensor([[0]]), r"by integers \[K\], got int64 \(1, 1\)"),
    ],
)
def test_an_environment_that_is_not_there_cannot_be_reset(envs, match):
    buffer = appended(0)
    with pytest.raises(ValueError, match=match):
        buffer.reset(envs)
    assert buffer.lengths.tolist() == [1, 1]


def test_one_environment_none_of_them_and_the_same_twice_can_be_reset():
    buffer = appended(0, 1)
    buffer.reset([])
    assert buffer.lengths.tolist() == [2, 2]
    buffer.reset(1)
    assert buffer.lengths.tolist() == [2, 0]
    buffer.reset(torch.tensor([0, 0], dtype=torch.int32))
    assert buffer.lengths.tolist() == [0, 0]


@pytest.mark.parametrize(
    ("sizes", "name"), [((0, 3), "max_len"), ((3, 0), "num_envs"), ((2.0, 3), "max_len")]
)
def test_a_size_below_one_is_refused_by_name(sizes, name):
    with pytest.raises(ValueError, match=f"`{name}` must be an integer of at least 1"):
        HistoryBuffer(*sizes)


@pytest.mark.parametrize("sampler", [RandomSampler(), MiniBatchSampler()])
def test_a_sampler_that_does_not_know_what_is_held_is_refused(sampler):
    with pytest.raises(TypeError, match=f"by a HistorySampler, not by {type(sampler).__name__}"):
        HistoryBuffer(3, 2, sampler=sampler)


def test_the_writer_and_the_sampler_want_a_history():
    with pytest.raises(TypeError, match="not into RolloutTensorStorage"):
        ReplayBuffer(storage=RolloutTensorStorage(2, 2), writer=HistoryBuffer(2, 2).writer)
    with pytest.raises(TypeError, match="takes a HistoryBuffer"):
        HistorySampler().sample(RolloutTensorStorage(2, 2), 3)


def test_a_history_that_does_not_fit_is_refused_with_its_size():
    step = TensorDict({"x": torch.zeros(1).expand(10**6, 390)}, [10**6])
    with pytest.raises(MemoryError, match=r"10000000 steps x 1000000 environments takes 15,600,.* bytes"):
        HistoryBuffer(10**7, 10**6).append(step)


# -- saving --------------------------------------------------------------------------------------


def test_a_saved_history_is_complete_and_holds_no_views(tmp_path):
    twin = Twin(3, 2, HistorySampler(2, 2))
    for _ in range(5):
        twin.append()
    twin.reset([1])
    twin.append([True, False])
    twin.buffer.dumps(tmp_path)
    state = twin.buffer.state_dict()
    kept = state["_storage"]["columns"]["cell"].clone()
    twin.append()
    assert torch.equal(state["_storage"]["columns"]["cell"], kept)
    other = HistoryBuffer(3, 2)
    other.loads(tmp_path)
    assert other.lengths.tolist() == [3, 0]
    assert other.write_count == 12
    other.append(twin.steps[-1])
    assert same(other.history()["observation"], twin.buffer.history()["observation"])


@pytest.mark.parametrize("part", ["storage", "writer", "sampler"])
def test_each_part_can_be_saved_by_itself(part, tmp_path):
    buffer = appended(0, 1, 2, 3)
    getattr(buffer, part).dumps(tmp_path)
    other = HistoryBuffer(3, 2)
    getattr(other, part).loads(tmp_path)
    if part == "storage":
        assert other.history()["x"].tolist() == buffer.history()["x"].tolist()
    if part == "writer":
        assert other.write_count == 8


def test_a_history_of_another_size_or_of_other_entries_is_refused():
    state = appended(0, 1).state_dict()
    with pytest.raises(ValueError, match="saved history is 3 steps x 2 environments, this one is 4 x 2"):
        HistoryBuffer(4, 2).load_state_dict(state)
    for step, match in (
        ({"y": torch.zeros(2)}, "saved history holds 'x', this one 'y'"),
        ({"x": torch.zeros(2)}, r"'x' in the saved history is int64 \(\) a step.*float32 \(\)"),
        ({"x": torch.zeros(2, 3, dtype=torch.int64)}, r"int64 \(\) .*int64 \(3,\)"),
    ):
        other = HistoryBuffer(3, 2)
        other.append(TensorDict(step, [2]))
        with pytest.raises(ValueError, match=match):
            other.load_state_dict(state)
        assert other.lengths.tolist() == [1, 1]


def test_an_empty_history_can_be_saved_and_loaded_over_a_full_one():
    buffer = appended(0, 1, 2)
    buffer.load_state_dict(HistoryBuffer(3, 2).state_dict())
    assert buffer.lengths.tolist() == [0, 0]
    buffer.append(TensorDict({"x": torch.tensor([7, 8])}, [2]))
    assert buffer.history()["x"].tolist() == [[7, 7, 7], [8, 8, 8]]


# -- copies --------------------------------------------------------------------------------------


def pickled(buffer):
    return pickle.loads(pickle.dumps(buffer))


@pytest.mark.parametrize("copied", [copy.deepcopy, pickled])
@pytest.mark.parametrize("before", [0, 2, 5])
def test_a_copy_goes_on_by_itself(copied, before):
    buffer = appended(*range(before))
    twin = copied(buffer)
    assert twin.lengths.tolist() == buffer.lengths.tolist()
    for history, number in ((buffer, 20), (twin, 50)):
        for step in range(4):
            history.append(TensorDict({"x": torch.tensor([number + step, 10 + number + step])}, [2]))
        newest = [number + 1, number + 2, number + 3]
        assert history.history()["x"].tolist() == [newest, [10 + x for x in newest]]
        shown = torch.cat([batch["x"] for batch in history]).sort().values.tolist()
        assert shown == history.history()["x"].flatten().sort().values.tolist()


@pytest.mark.parametrize("copied", [copy.deepcopy, pickled])
def test_what_is_appended_to_a_copy_ends_its_update_alone(copied):
    buffer = HistoryBuffer(3, 2, sampler=HistorySampler(2))
    buffer.append(make_step(0, 2))
    twin = copied(buffer)
    mine, theirs = iter(buffer), iter(twin)
    next(mine), next(theirs)
    twin.append(make_step(1, 2))
    assert len(list(mine)) == 1
    with pytest.raises(RuntimeError, match="cut off"):
        next(theirs)


def test_environments_named_by_bytes_are_refused_since_they_may_mean_a_mask():
    buffer = appended(0, 1)
    with pytest.raises(ValueError, match=r"uint8, which may mean a mask or numbers: pass envs.bool\(\)"):
        buffer.reset(torch.tensor([0, 1], dtype=torch.uint8))
    assert buffer.lengths.tolist() == [2, 2]


def test_any_age_is_clamped():
    assert appended(0, 1).at_age(10**30)["x"].tolist() == [0, 10]


def test_a_mask_that_is_no_tensor_is_refused():
    buffer = appended(0)
    step = TensorDict({"x": torch.tensor([1, 11])}, [2])
    with pytest.raises(ValueError, match=r"`mask` is a list, expected a tensor of bool \(2,\)"):
        buffer.append(step, [True, False])  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match=r"`mask` is a list, expected a tensor of bool \(2,\)"):
        buffer.extend(step.unsqueeze(0), [True, False])  # pyright: ignore[reportArgumentType]
