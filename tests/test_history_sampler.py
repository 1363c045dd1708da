"""HistorySampler: uniform over what is held, fair over an update; and buffers read side by side."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterable
from itertools import chain

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from oracles import Plan, filled, tensors
from oracles_history import KEYS, Twin, check_epochs, make_step
from torch import Tensor
from torchrl.data.replay_buffers import RandomSampler

from torchrl_rslstorage import (
    HistoryBuffer,
    HistorySampler,
    MiniBatchSampler,
    TrajectorySampler,
    zip_mini_batches,
)


def filled_history(
    max_len: int = 4, num_envs: int = 3, num_steps: int | None = None, **sampler_options
) -> HistoryBuffer:
    buffer = HistoryBuffer(max_len, num_envs, sampler=HistorySampler(**sampler_options))
    for number in range(max_len if num_steps is None else num_steps):
        buffer.append(make_step(number, num_envs))
    return buffer


def cells_of_update(buffer: HistoryBuffer) -> list[list[int]]:
    return [batch["cell"].tolist() for batch in buffer]


def flat(lists: Iterable[list[int]]) -> list[int]:
    return list(chain.from_iterable(lists))


def epochs_of(buffer: HistoryBuffer) -> list[list[int]]:
    batches, parts = cells_of_update(buffer), buffer.sampler.num_mini_batches
    return [flat(batches[i : i + parts]) for i in range(0, len(batches), parts)]


# -- uniform -------------------------------------------------------------------------------------


def chi_squared(counts: Tensor) -> float:
    """Σ (observed − expected)² / expected against all cells being alike."""
    expected = counts.double().mean()
    return float(((counts - expected).square() / expected).sum())


def bound(degrees: int) -> float:
    """The 99.9 % quantile of χ², by Wilson and Hilferty (1931): k·(1 − 2/9k + z·√(2/9k))³, z = 3.09."""
    spread = 2 / (9 * degrees)
    return degrees * (1 - spread + 3.09 * spread**0.5) ** 3


def without_replacement(drawn: int, cells: int) -> float:
    """`bound` where a few cells at a time are drawn, none twice: they scatter less than independent ones."""
    return bound(cells - 1) * (cells - drawn) / (cells - 1)


def reset_some(buffer: HistoryBuffer, last: int) -> None:
    """Environment 1 is freshly reset and holds one step, environment 2 is empty."""
    buffer.reset([1])
    buffer.append(make_step(last, buffer.num_envs), torch.arange(buffer.num_envs) != 3)
    buffer.reset([2])


@pytest.mark.parametrize("redraw", ["epoch", "update"])
@pytest.mark.parametrize("ragged", [False, True], ids=["full", "partly reset"])
def test_every_held_cell_is_drawn_as_often_as_any_other(ragged, redraw):
    buffer = filled_history(5, 6, 13, num_mini_batches=3, num_epochs=4, num_samples=3, redraw=redraw)
    if ragged:
        reset_some(buffer, 13)
    held = buffer.history()["cell"].unique()
    held = held[held > 0]
    assert len(held) == len(buffer) == (21 if ragged else 30)
    generator = torch.Generator().manual_seed(7)
    buffer.set_rng(generator)
    # Epochs of an update exclude each other: draws of different updates are what is independent.
    counts: list[Counter[int]] = [Counter() for _ in range(4)]
    for _ in range(3000):
        for epoch, cells in enumerate(epochs_of(buffer)):
            counts[epoch].update(cells)
    for counted in counts:
        assert set(counted) == set(held.tolist())
        assert chi_squared(torch.tensor(list(counted.values()))) < without_replacement(3, len(held))


def test_the_surplus_is_drawn_uniformly_too():
    buffer = filled_history(2, 3, 2, num_samples=8)
    buffer.set_rng(torch.Generator().manual_seed(7))
    twice: Counter[int] = Counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        for _ in range(2000):
            (cells,) = cells_of_update(buffer)
            twice.update({cell: 1 for cell, times in Counter(cells).items() if times == 2})
    assert sum(twice.values()) == 4000
    assert chi_squared(torch.tensor(list(twice.values()))) < without_replacement(2, 6)


def test_the_bound_of_these_tests_is_that_of_tables():
    tables = {5: 20.515, 20: 45.315, 29: 58.301}  # χ² at 99.9 %
    for degrees, quantile in tables.items():
        assert abs(bound(degrees) / quantile - 1) < 0.02


def test_a_sampler_that_overlooks_a_cell_would_be_noticed():
    counts = torch.full((30,), 100)
    counts[0], counts[1:] = 0, counts[1:] + 3
    assert chi_squared(counts) > bound(29)


# -- without replacement while unseen cells remain -----------------------------------------------


@given(
    max_len=st.integers(1, 5),
    num_envs=st.integers(1, 5),
    num_samples=st.none() | st.integers(4, 60),
    parts=st.integers(1, 4),
    num_epochs=st.integers(1, 6),
    redraw=st.sampled_from(["epoch", "update"]),
    seed=st.integers(0, 2**32),
)
def test_no_cell_is_drawn_twice_more_often_than_another(
    max_len, num_envs, num_samples, parts, num_epochs, redraw, seed
):
    torch.manual_seed(seed)
    twin = Twin(max_len, num_envs, HistorySampler(parts, num_epochs, num_samples, redraw))
    for _ in range(max_len + seed % 3):
        twin.append()
    twin.check_update()
    twin.reset([n for n in range(num_envs) if seed >> n & 1])
    twin.check_update()
    twin.append()
    twin.check_update()


def test_epochs_take_what_the_epochs_before_them_left():
    buffer = filled_history(5, 4, num_epochs=3, num_samples=6)  # 18 of 20 cells
    drawn = flat(epochs_of(buffer))
    assert len(set(drawn)) == 18


def test_an_epoch_in_which_the_unseen_run_out_takes_all_of_them_and_none_twice():
    buffer = filled_history(5, 2, num_epochs=2, num_samples=7)
    first, second = epochs_of(buffer)
    assert len(set(second)) == 7
    assert set(range(1, 11)) - set(first) < set(second)


def test_the_oracle_of_draws_notices_a_repetition():
    with pytest.raises(AssertionError):
        check_epochs([1, 2, 3, 4], [[1, 2], [1, 3]], 2, "epoch")
    with pytest.raises(AssertionError):
        check_epochs([1, 2, 3, 4], [[1, 1]], 2, "epoch")
    check_epochs([1, 2, 3, 4], [[1, 2], [4, 3], [4, 1]], 2, "epoch")


# -- updates -------------------------------------------------------------------------------------


def test_redraw_by_name():
    torch.manual_seed(0)
    fresh = epochs_of(filled_history(5, 8, num_epochs=3, num_samples=9))
    assert len({tuple(sorted(epoch)) for epoch in fresh}) == 3
    buffer = filled_history(5, 8, num_mini_batches=2, num_epochs=3, num_samples=9, redraw="update")
    batches = list(buffer)
    assert [id(batch) for batch in batches] == [id(batch) for batch in batches[:2]] * 3
    assert sorted(epochs_of(buffer)[0]) != sorted(epochs_of(buffer)[0])


def test_all_that_is_held_is_dealt_anew_each_epoch():
    buffer = filled_history(5, 8, num_mini_batches=3, num_epochs=2)
    batches = cells_of_update(buffer)
    assert [len(batch) for batch in batches] == [14, 13, 13] * 2
    for epoch in (batches[:3], batches[3:]):
        assert sorted(flat(epoch)) == list(range(1, 41))
    assert [set(batch) for batch in batches[:3]] != [set(batch) for batch in batches[3:]]


def test_each_iteration_is_a_whole_fresh_update_also_after_an_early_break():
    buffer = filled_history(5, 4, num_mini_batches=3, num_epochs=2, num_samples=10)
    for taken in range(1, 6):
        for number, _ in enumerate(buffer, start=1):
            if number == taken:
                break
        check_epochs(list(range(1, 21)), epochs_of(buffer), 10, "epoch")


def test_sampling_one_by_one_gives_whole_updates_one_after_another():
    buffer = filled_history(5, 4, num_mini_batches=3, num_epochs=2, num_samples=10)
    for _ in range(3):
        cells = [buffer.sample()["cell"].tolist() for _ in range(6)]
        assert buffer.sampler.ran_out
        check_epochs(list(range(1, 21)), [flat(cells[:3]), flat(cells[3:])], 10, "epoch")


@pytest.mark.parametrize(
    "write",
    [
        lambda buffer: buffer.append(make_step(9, 3)),
        lambda buffer: buffer.extend(make_step(9, 3).unsqueeze(0)),
        lambda buffer: buffer.writer.append(make_step(9, 3)),
        lambda buffer: buffer.reset([0]),
        lambda buffer: buffer.empty(),
        lambda buffer: buffer.load_state_dict(buffer.state_dict()),
    ],
    ids=["append", "extend", "writer", "reset", "empty", "load_state_dict"],
)
def test_a_running_update_ends_when_the_history_changes(write):
    buffer = filled_history(num_mini_batches=2, num_epochs=2)
    iteration = iter(buffer)
    next(iteration)
    write(buffer)
    with pytest.raises(RuntimeError, match="cut off"):
        next(iteration)


def test_an_append_ends_the_update_that_sample_takes_from():
    buffer = filled_history(num_mini_batches=2, num_epochs=2, num_samples=4)
    buffer.sample()
    buffer.append(make_step(4, 3))
    check = [buffer.sample()["cell"].tolist() for _ in range(4)]
    check_epochs(list(range(4, 16)), [flat(check[:2]), flat(check[2:])], 4, "epoch")


def test_an_environment_that_holds_nothing_is_never_drawn():
    buffer = filled_history(4, 3, num_samples=5, num_epochs=3)
    buffer.reset([1])
    for _ in range(50):
        for cells in cells_of_update(buffer):
            assert not {cell for cell in cells if (cell - 1) % 3 == 1 or cell == 0}


def test_a_history_whose_environments_were_all_reset_cannot_be_sampled():
    buffer = filled_history(4, 3)
    buffer.reset([0, 1, 2])
    with pytest.raises(RuntimeError, match="Every environment was reset: append a step"):
        buffer.sample()
    with pytest.raises(RuntimeError, match="Every environment was reset"):
        next(iter(buffer))


# -- mini-batches --------------------------------------------------------------------------------


def test_mini_batches_are_locked_and_use_the_same_memory_in_every_update():
    buffer = filled_history(num_mini_batches=2, num_samples=6)
    batches = list(buffer)
    for batch in batches:
        assert tensors(batch).keys() == KEYS
        with pytest.raises(RuntimeError, match="lock"):
            batch["observation"] = torch.zeros(3, 3)
    buffer.append(make_step(4, 3))
    assert [id(batch) for batch in buffer] == [id(batch) for batch in batches]


def test_memory_is_used_again_when_updates_have_other_sizes():
    buffer = filled_history(4, 3)
    (whole,) = buffer
    place = whole["observation"].data_ptr()
    for envs in ([0], [1]):
        buffer.reset(envs)
        (batch,) = buffer
        assert len(batch) == len(buffer)
        assert batch["observation"].data_ptr() == place


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        (["observation"], {"observation"}),
        (["sensors", "cell"], {("sensors", "camera"), ("sensors", "height"), "cell"}),
        ([("sensors", "height")], {("sensors", "height")}),
    ],
)
def test_keys_select_entries_and_groups_of_entries(keys, expected):
    for batch in filled_history(num_mini_batches=2, keys=keys):
        assert tensors(batch).keys() == expected


def test_an_unknown_key_is_named_beside_the_ones_that_there_are():
    with pytest.raises(KeyError, match=r"no key 'lidar' in this buffer\. It holds 'observation'"):
        filled_history(keys=["lidar"]).sample()


def test_the_generator_of_the_buffer_decides_and_the_global_one_is_left_alone():
    def update(seed: int) -> list[list[int]]:
        buffer = filled_history(num_mini_batches=2, num_epochs=3, num_samples=8)
        buffer.set_rng(torch.Generator().manual_seed(seed))
        return cells_of_update(buffer)

    before = torch.get_rng_state()
    assert update(3) == update(3) != update(4)
    assert torch.equal(before, torch.get_rng_state())


# -- shortage ------------------------------------------------------------------------------------


def test_more_cells_than_are_held_are_drawn_evenly_and_this_is_said_once():
    buffer = filled_history(2, 3, num_mini_batches=2, num_epochs=3, num_samples=15)
    with pytest.warns(UserWarning, match="holds 6 cells and 15 are asked for") as caught:
        epochs = epochs_of(buffer)
    assert len(caught) == 1
    check_epochs(list(range(1, 7)), epochs, 15, "epoch")
    check_epochs(list(range(1, 7)), epochs_of(buffer), 15, "epoch")


def test_a_shortage_is_an_error_if_it_shall_be_one():
    buffer = filled_history(2, 3, 1, num_samples=6, on_shortage="error")
    with pytest.raises(RuntimeError, match="holds 3 cells and 6 are asked for: append more"):
        buffer.sample()
    buffer.append(make_step(1, 3))
    assert len(buffer.sample()) == 6


def test_fewer_cells_than_mini_batches_are_refused():
    with pytest.raises(ValueError, match=r"`num_samples` has 2 cells, from which 3 mini-batches"):
        HistorySampler(3, num_samples=2)
    with pytest.raises(ValueError, match=r"The history has 3 cells, from which 4 mini-batches"):
        filled_history(2, 3, 1, num_mini_batches=4).sample()


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"num_mini_batches": 0}, "`num_mini_batches` must be an integer of at least 1"),
        ({"num_epochs": 0}, "`num_epochs` must be"),
        ({"num_samples": 0}, "`num_samples` must be"),
        ({"redraw": "never"}, "`redraw` must be one of 'epoch', 'update', got 'never'"),
        ({"on_shortage": "warn"}, "`on_shortage` must be one of 'replace', 'error', got 'warn'"),
        ({"keys": []}, "`keys` must be a sequence"),
    ],
)
def test_arguments_that_cannot_be_are_refused_by_name(arguments, match):
    with pytest.raises(ValueError, match=match):
        HistorySampler(**arguments)


# -- saving --------------------------------------------------------------------------------------


@pytest.mark.parametrize("redraw", ["epoch", "update"])
@pytest.mark.parametrize("samples", [None, 5, 9, 40])
@pytest.mark.parametrize("taken", range(9))
@pytest.mark.filterwarnings("ignore:The history holds")
def test_a_loaded_history_goes_on_with_the_numbers_of_the_saved_one(taken, samples, redraw, tmp_path):
    def make() -> HistoryBuffer:
        buffer = HistoryBuffer(4, 3, sampler=HistorySampler(2, 4, samples, redraw))
        buffer.set_rng(torch.Generator().manual_seed(1))
        return buffer

    saved, loaded = make(), HistoryBuffer(4, 3, sampler=HistorySampler(2, 4, samples, redraw))
    for number in range(5):
        saved.append(make_step(number, 3))
    saved.reset([1])
    for _ in range(taken):
        saved.sample()
    saved.dumps(tmp_path)
    loaded.loads(tmp_path)
    for _ in range(2):
        for _ in range(17):
            assert torch.equal(loaded.sample()["cell"], saved.sample()["cell"])
        for buffer in (saved, loaded):
            buffer.append(make_step(5, 3))


def test_a_running_update_of_other_counts_is_refused():
    buffer = filled_history(num_mini_batches=2)
    buffer.sample()
    other = HistoryBuffer(4, 3, sampler=HistorySampler(3))
    with pytest.raises(ValueError, match="saved update has 2 mini-batches, this sampler makes 3"):
        other.load_state_dict(buffer.state_dict())


# -- side by side --------------------------------------------------------------------------------

PLAN = Plan(4, 3)


def three(rollout=(2, 3), policy=(2, 3), demo=(2, 3)) -> dict:
    return {
        "rollout": filled(PLAN, sampler=MiniBatchSampler(*rollout)),
        "policy_history": filled_history(num_mini_batches=policy[0], num_epochs=policy[1]),
        "demo_history": filled_history(5, 2, 9, num_mini_batches=demo[0], num_epochs=demo[1], num_samples=7),
    }


@pytest.mark.parametrize("named", [False, True])
def test_every_tuple_has_the_next_mini_batch_of_each(named):
    buffers = three()
    zipped = zip_mini_batches(**buffers) if named else zip_mini_batches(*buffers.values())
    tuples = [[batch.clone() for batch in group] for group in zipped]
    assert len(tuples) == 6
    assert all(len(group) == 3 for group in tuples)
    assert [len(group[2]) for group in tuples] == [4, 3] * 3
    assert all("state_value" in group[0] and "cell" in group[1] and "cell" in group[2] for group in tuples)
    check_epochs(
        list(range(1, 13)),
        [flat(group[1]["cell"].tolist() for group in tuples[i : i + 2]) for i in (0, 2, 4)],
        12,
        "epoch",
    )


@pytest.mark.parametrize(
    "counts", [{"rollout": (3, 2)}, {"policy": (6, 1)}, {"demo": (2, 2)}, {"demo": (2, 4), "policy": (3, 3)}]
)
def test_counts_that_differ_are_refused_before_anything_is_drawn(counts):
    buffers = three(**counts)
    with pytest.raises(ValueError) as caught:
        zip_mini_batches(**buffers)
    for name, buffer in buffers.items():
        sampler = buffer.sampler
        assert f"{name} {sampler.num_epochs} x {sampler.num_mini_batches}" in caught.value.args[0]
    with pytest.raises(ValueError, match=r"buffer 0 .*buffer 1 .*buffer 2 "):
        zip_mini_batches(*buffers.values())


def test_recurrent_rollouts_stand_beside_histories_too():
    rollout = filled(PLAN, sampler=TrajectorySampler(3, 2))
    zipped = zip_mini_batches(rollout, filled_history(num_mini_batches=3, num_epochs=2))
    assert [batch["mask"].ndim for batch, _ in zipped] == [2] * 6


def test_less_than_two_buffers_and_the_same_twice_and_something_else_are_refused():
    buffer = filled_history()
    with pytest.raises(ValueError, match="At least two buffers are read side by side, got 1"):
        zip_mini_batches(buffer)
    with pytest.raises(ValueError, match="comes twice"):
        zip_mini_batches(buffer, demo=buffer)
    with pytest.raises(TypeError, match="demo is a list with the sampler NoneType"):
        zip_mini_batches(buffer, demo=[])


def test_a_buffer_that_cannot_be_read_says_so_at_the_first_mini_batch():
    with pytest.raises(RuntimeError, match="is empty: append a step"):
        next(zip_mini_batches(filled_history(), HistoryBuffer(2, 2)))


# -- another sampler -----------------------------------------------------------------------------


def test_another_sampler_ends_the_update_of_the_one_before_and_gets_the_generator():
    buffer = HistoryBuffer(4, 2, sampler=HistorySampler(2))
    buffer.extend(torch.stack([make_step(number, 2) for number in range(4)]))
    generator = torch.Generator()
    buffer.set_rng(generator)
    running = iter(buffer)
    next(running)
    before = buffer.set_sampler(HistorySampler(4))
    assert isinstance(before, HistorySampler) and before.num_mini_batches == 2
    assert buffer.sampler.generator is generator
    assert len(list(buffer)) == 4
    with pytest.raises(RuntimeError, match="cut off"):  # its memory holds the other one's draw
        next(running)


def test_a_history_takes_no_sampler_that_does_not_know_it():
    buffer = HistoryBuffer(4, 2)
    with pytest.raises(TypeError, match="not by RandomSampler"):
        buffer.set_sampler(RandomSampler())
    assert isinstance(buffer.sampler, HistorySampler)
