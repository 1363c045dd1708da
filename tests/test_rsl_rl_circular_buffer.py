"""CircularBuffer: the golden values of RSL-RL's own, and what is repaired of it.

Golden values are derived by hand from the semantics of leggedrobotics/rsl_rl, commit 84ac0088,
storage/circular_buffer.py: one row a push, at (pointer + 1) mod max_len; an environment's first push since
its reset goes into all of its rows; ``buffer`` starts behind the pointer. To two environments 0, 1, 2, … is
appended, 10 more for environment 1.
"""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import Tensor

from torchrl_rslstorage import CircularBuffer


def pushed(*numbers: int, max_len: int = 3, reset_before: dict[int, object] | None = None) -> CircularBuffer:
    history = CircularBuffer(max_len, 2, "cpu")
    for number in numbers:
        if reset_before and number in reset_before:
            history.reset(reset_before[number])  # pyright: ignore[reportArgumentType]
        history.append(torch.tensor([[number], [10 + number]]))
    return history


def shown(values: Tensor) -> list:
    return values.squeeze(-1).tolist()


def epochs_of(history: CircularBuffer, fetch_length: int, parts: int, epochs: int) -> list[list[int]]:
    batches = list(history.mini_batch_generator(fetch_length, parts, epochs))
    assert len(batches) == parts * epochs
    groups = [batches[start : start + parts] for start in range(0, len(batches), parts)]
    return [torch.cat(group).flatten().tolist() for group in groups]


# -- golden values -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pushes", "rows"),
    [
        (1, [0, 0, 0]),  # pointer 0; the first push is in all rows
        (2, [0, 0, 1]),  # pointer 1: rows [0 1 0], from row 2 on
        (3, [0, 1, 2]),  # pointer 2: rows [0 1 2], from row 0 on
        (4, [1, 2, 3]),  # pointer 0: rows [3 1 2], from row 1 on
        (6, [3, 4, 5]),
    ],
)
def test_the_buffer_runs_from_oldest_to_newest(pushes, rows):
    history = pushed(*range(pushes))
    assert shown(history.buffer) == [rows, [10 + x for x in rows]]
    assert history.current_length.tolist() == [min(pushes, 3)] * 2


def test_keys_are_ages_and_end_with_the_oldest():
    history = pushed(0, 1, 2, 3)
    assert shown(history[torch.tensor([0, 2])]) == [3, 11]
    assert shown(history[torch.tensor([1, 9])]) == [2, 11]
    # two pushes: age 2 is clamped to age 1
    assert shown(pushed(0, 1)[torch.tensor([2, 0])]) == [0, 11]


@pytest.mark.parametrize("who", [[1], torch.tensor([1]), torch.tensor([False, True]), slice(1, None)])
def test_a_reset_zeroes_an_environment_and_its_next_push_fills_it(who):
    history = pushed(0, 1, 2)
    history.reset(who)
    assert shown(history.buffer) == [[0, 1, 2], [0, 0, 0]]
    assert history.current_length.tolist() == [3, 0]
    history.append(torch.tensor([[3], [13]]))
    assert shown(history.buffer) == [[1, 2, 3], [13, 13, 13]]
    assert shown(history[torch.tensor([1, 1])]) == [2, 13]
    assert history.current_length.tolist() == [3, 1]


def test_a_reset_of_all_leaves_zeros_that_can_be_read():
    history = pushed(4, 5)
    history.reset()
    assert shown(history.buffer) == [[0, 0, 0], [0, 0, 0]]
    assert history.current_length.tolist() == [0, 0]
    history.append(torch.tensor([[6], [16]]))
    assert shown(history.buffer) == [[6, 6, 6], [16, 16, 16]]


def test_sizes_and_device_are_told_as_they_were_given():
    history = CircularBuffer(max_len=5, batch_size=3, device="cpu")
    assert (history.max_length, history.batch_size, history.device) == (5, 3, "cpu")
    assert history.current_length.tolist() == [0, 0, 0]


def test_an_epoch_over_everything_has_every_cell_once():
    torch.manual_seed(0)
    epochs = epochs_of(pushed(0, 1, 2, 3), 3, 2, 4)
    assert all(sorted(epoch) == [1, 2, 3, 11, 12, 13] for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) > 1  # reshuffled


def test_a_generator_has_eight_epochs_unless_told_otherwise():
    assert len(list(pushed(0).mini_batch_generator(1, 2))) == 16


# -- repaired ------------------------------------------------------------------------------------


def test_after_a_partial_reset_every_cell_that_is_held_is_drawn_alike():
    # RSL-RL takes environment 0's length for both. If that is 1, it draws out of row 0 alone: 3 and 13.
    # If it is 3, it draws environment 1's three rows, which are all 13.
    for reset, held in (([0], [3, 11, 12, 13]), ([1], [1, 2, 3, 13])):
        history = pushed(0, 1, 2, 3, reset_before={3: reset})
        for epoch in epochs_of(history, 3, 2, 5):
            assert sorted(epoch) == held
        # Two of four each epoch: after two epochs each was drawn once.
        assert Counter(cell for epoch in epochs_of(history, 1, 1, 6) for cell in epoch) == dict.fromkeys(
            held, 3
        )


def test_an_empty_environment_reads_as_zeros_and_is_never_drawn():
    history = pushed(4, 5)
    history.reset([0])
    assert shown(history[torch.tensor([0, 1])]) == [0, 14]
    assert all(sorted(epoch) == [14, 15] for epoch in epochs_of(history, 2, 2, 3))


def test_mini_batches_that_do_not_divide_differ_by_one_at_most():
    sizes = [len(batch) for batch in pushed(0, 1, 2).mini_batch_generator(3, 4, 1)]
    assert sizes == [2, 2, 1, 1]


def test_mini_batches_are_copies():
    history = pushed(0, 1, 2)
    batches = list(history.mini_batch_generator(3, 1, 2))
    for batch in batches:
        batch.fill_(-1)
    assert shown(history.buffer) == [[0, 1, 2], [10, 11, 12]]
    assert batches[0].data_ptr() != batches[1].data_ptr()


def test_values_without_features_and_images_are_kept_as_well():
    flat = CircularBuffer(2, 3, "cpu")
    flat.append(torch.tensor([1.0, 2.0, 3.0]))
    flat.reset([1])
    assert flat.buffer.tolist() == [[1, 1], [0, 0], [3, 3]]
    images = CircularBuffer(2, 3, "cpu")
    images.append(torch.ones(3, 4, 5, 2, dtype=torch.uint8))
    assert images.buffer.shape == (3, 2, 4, 5, 2) and images.buffer.dtype is torch.uint8


def test_what_happens_to_the_appended_tensor_later_changes_nothing():
    history, data = CircularBuffer(2, 2, "cpu"), torch.tensor([1.0, 2.0])
    history.append(data)
    data.zero_()
    assert history.buffer.tolist() == [[1, 1], [2, 2]]


def test_a_saved_state_brings_everything_back():
    history = pushed(0, 1, 2, 3, reset_before={2: [0]})
    state = history.history.state_dict()
    history.append(torch.tensor([[7], [17]]))
    other = CircularBuffer(3, 2, "cpu")
    other.history.load_state_dict(state)
    assert shown(other.buffer) == [[2, 2, 3], [11, 12, 13]]


# -- refused -------------------------------------------------------------------------------------


def test_what_does_not_fit_is_refused_with_a_reason():
    history = pushed(0)
    for data, message in (
        (torch.zeros(3, 1, dtype=torch.int64), r"shape \(3, 1\), expected \[N = 2, \*\]"),
        (torch.zeros(()), r"shape \(\), expected \[N = 2"),
        (torch.zeros(2, 1), r"'data'.*float32.*int64"),
        (torch.zeros(2, 5, dtype=torch.int64), r"'data'.*\(2, 5\).*\(2, 1\)"),
    ):
        with pytest.raises(ValueError, match=message):
            history.append(data)
    for key in (torch.tensor([0]), torch.tensor([0.0, 1.0]), 0):
        with pytest.raises(ValueError, match=r"integers \[N = 2\]"):
            history[key]  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="environments 0 to 1"):
        history.reset([2])
    with pytest.raises(ValueError, match="`max_len` must be an integer of at least 1"):
        CircularBuffer(0, 2, "cpu")


def test_more_than_is_held_cannot_be_fetched():
    history = pushed(0, 1)
    with pytest.raises(ValueError, match="`fetch_length` is 3, but the longest history holds 2 of 3"):
        history.mini_batch_generator(3, 1)
    with pytest.raises(ValueError, match="`num_samples` has 2 cells, from which 3 mini-batches"):
        history.mini_batch_generator(1, 3)
    for numbers in ((0, 1), (1, 0), (1, 1, 0)):
        with pytest.raises(ValueError, match="at least 1, got 0"):
            history.mini_batch_generator(*numbers)


def test_nothing_can_be_read_before_the_first_push():
    history = CircularBuffer(3, 2, "cpu")
    key = torch.tensor([0, 0])
    for read in (lambda: history.buffer, lambda: history[key], lambda: history.mini_batch_generator(1, 1)):
        with pytest.raises(RuntimeError, match="append a step"):
            read()


@pytest.mark.parametrize("end", [lambda h: h.append(torch.zeros(2, 1).long()), lambda h: h.reset([0])])
def test_a_generator_ends_where_its_history_changes(end):
    history = pushed(0, 1, 2)
    batches = history.mini_batch_generator(3, 2)
    next(batches)
    end(history)
    with pytest.raises(RuntimeError, match="cut off"):
        next(batches)


def test_a_second_generator_ends_the_first():
    history = pushed(0, 1, 2)
    first = history.mini_batch_generator(3, 2)
    next(first)
    second = history.mini_batch_generator(3, 2)
    next(second)
    with pytest.raises(RuntimeError, match="cut off"):
        next(first)
    assert len(list(second)) == 15
