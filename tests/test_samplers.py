"""MiniBatchSampler: whole updates, exact covers, its own randomness, and what a mini-batch holds."""

from __future__ import annotations

from itertools import chain

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from oracles import (
    ROOT_KEYS,
    Plan,
    cells_of,
    check_every_cell_is_seen_once_an_epoch,
    check_update,
    column,
    filled,
    plans,
    same,
    tensors,
)
from rsl_rl.storage import RolloutStorage
from tensordict import TensorDict
from torchrl.data import LazyTensorStorage, ReplayBuffer

from torchrl_rslstorage import MiniBatchSampler, RolloutBuffer
from torchrl_rslstorage.data import samplers

PLAN = Plan(5, 3)


def cells_of_update(buffer: RolloutBuffer | ReplayBuffer, plan: Plan = PLAN) -> list[list[int]]:
    return [cells_of(batch, plan) for batch in buffer]


# -- the cover ---------------------------------------------------------------------------------


@given(plan=plans(), parts=st.integers(1, 6), epochs=st.integers(1, 3), flags=st.tuples(*[st.booleans()] * 3))
def test_every_cell_is_seen_once_an_epoch_in_balanced_mini_batches(plan, parts, epochs, flags):
    reshuffle, drop_remainder, is_large = flags
    parts = min(parts, plan.num_steps * plan.num_envs)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(samplers, "_MANY_CELLS", 0 if is_large else 10**9)
        check_every_cell_is_seen_once_an_epoch(plan, parts, epochs, reshuffle, drop_remainder=drop_remainder)


def test_reshuffled_mini_batches_of_a_large_window_are_read_in_the_order_of_its_memory(monkeypatch):
    monkeypatch.setattr(samplers, "_MANY_CELLS", 0)
    batches = cells_of_update(filled(PLAN, sampler=MiniBatchSampler(3, 2, reshuffle=True)))
    assert batches == [sorted(batch) for batch in batches]
    assert batches[:3] != batches[3:]


def test_the_cover_does_not_depend_on_the_window_being_small():
    check_every_cell_is_seen_once_an_epoch(Plan(25, 41), num_mini_batches=7)


def different_epochs(buffer: RolloutBuffer | ReplayBuffer, sampler: MiniBatchSampler) -> int:
    """In how many ways the epochs of one update deal the cells out to mini-batches."""
    batches, parts = cells_of_update(buffer), sampler.num_mini_batches
    epochs = [batches[i * parts : (i + 1) * parts] for i in range(sampler.num_epochs)]
    return len({tuple(frozenset(batch) for batch in epoch) for epoch in epochs})


@pytest.mark.parametrize(("reshuffle", "ways"), [(False, 1), (True, 4)])
def test_only_reshuffle_deals_the_cells_anew_for_each_epoch(reshuffle, ways):
    sampler = MiniBatchSampler(5, 4, reshuffle)
    assert different_epochs(filled(PLAN, sampler=sampler), sampler) == ways


def test_without_reshuffle_epochs_share_the_very_mini_batches():
    buffer = filled(PLAN, sampler=MiniBatchSampler(2, 3))
    batches = list(buffer)
    assert [id(batch) for batch in batches] == [id(batch) for batch in batches[:2]] * 3


def test_each_update_draws_another_permutation():
    buffer = filled(PLAN, sampler=MiniBatchSampler(2))
    assert cells_of_update(buffer) != cells_of_update(buffer)


def test_a_window_is_shuffled():
    buffer = filled(PLAN, sampler=MiniBatchSampler(1))
    (order,) = cells_of_update(buffer)
    assert order != sorted(order)


def test_drop_remainder_leaves_out_the_end_of_the_last_row_only():
    plan = Plan(3, 5)
    buffer = filled(plan, sampler=MiniBatchSampler(4, drop_remainder=True))
    assert sorted(chain(*cells_of_update(buffer, plan))) == list(range(12))


@pytest.mark.parametrize("reshuffle", [False, True])
def test_more_mini_batches_than_transitions_are_refused_when_the_update_begins(reshuffle):
    buffer = filled(PLAN, sampler=MiniBatchSampler(16, reshuffle=reshuffle))
    with pytest.raises(ValueError, match="16 mini-batches cannot be cut from 15 transitions"):
        next(iter(buffer))
    with pytest.raises(ValueError, match="16 mini-batches cannot be cut from 15 transitions"):
        buffer.sample()


@pytest.mark.parametrize(
    "arguments",
    [
        {"num_mini_batches": 0},
        {"num_mini_batches": 2.0},
        {"num_mini_batches": True},
        {"num_epochs": 0},
        {"num_epochs": -1},
    ],
)
def test_a_count_below_one_or_not_an_integer_is_refused_by_name(arguments):
    ((name, value),) = arguments.items()
    with pytest.raises(ValueError, match=f"`{name}` must be an integer of at least 1, got {value!r}"):
        MiniBatchSampler(**arguments)


# -- parity with RSL-RL ------------------------------------------------------------------------


def rsl_rl_storage(plan: Plan) -> RolloutStorage:
    """The same window in rsl-rl-lib's own storage."""
    rows = plan.rows()
    first = rows[0]
    groups = {"policy": first["observation"], "camera": first["sensors", "camera"]}
    observations = TensorDict(groups, [plan.num_envs])
    storage = RolloutStorage("rl", plan.num_envs, plan.num_steps, observations, [2])
    for row in rows:
        transition = RolloutStorage.Transition()
        transition.observations = TensorDict(
            {"policy": row["observation"], "camera": row["sensors", "camera"]}, [plan.num_envs]
        )
        transition.actions = row["action"]
        transition.rewards = row["next", "reward"]
        transition.dones = row["next", "done"]
        transition.values = row["state_value"]
        transition.actions_log_prob = row["action_log_prob"]
        transition.distribution_params = (row["action"], row["action"])
        storage.add_transition(transition)
    storage.advantages = column(rows, ("next", "reward")) + 0.125
    storage.returns = column(rows, ("next", "reward")) - 0.125
    return storage


def ours(plan: Plan, sampler: MiniBatchSampler) -> RolloutBuffer:
    """The same window in our buffer, with the advantages and returns that `rsl_rl_storage` has."""
    buffer = filled(plan, sampler=sampler)
    reward = buffer.window["next", "reward"]
    buffer.storage.derived("advantage").copy_(reward + 0.125)
    buffer.storage.derived("value_target").copy_(reward - 0.125)
    return buffer


@given(plan=plans(), parts=st.integers(1, 4), epochs=st.integers(1, 3), seed=st.integers(0, 2**32))
def test_drop_remainder_is_rsl_rl_to_the_letter(plan, parts, epochs, seed):
    parts = min(parts, plan.num_steps * plan.num_envs)
    check_same_batches_as_rsl_rl(plan, MiniBatchSampler(parts, epochs, drop_remainder=True), seed)


@given(plan=plans(), epochs=st.integers(1, 3), seed=st.integers(0, 2**32))
def test_the_default_is_rsl_rl_to_the_letter_where_mini_batches_divide_the_window(plan, epochs, seed):
    check_same_batches_as_rsl_rl(plan, MiniBatchSampler(plan.num_envs, epochs), seed)


def check_same_batches_as_rsl_rl(plan: Plan, sampler: MiniBatchSampler, seed: int) -> None:
    buffer, theirs = ours(plan, sampler), rsl_rl_storage(plan)
    torch.manual_seed(seed)
    expected = list(theirs.mini_batch_generator(sampler.num_mini_batches, sampler.num_epochs))
    torch.manual_seed(seed)
    batches = list(buffer)
    assert len(batches) == len(expected)
    for batch, their in zip(batches, expected, strict=True):
        assert same(batch["observation"], their.observations["policy"])
        assert same(batch["sensors", "camera"], their.observations["camera"])
        assert same(batch["action"], their.actions)
        assert same(batch["state_value"], their.values)
        assert same(batch["action_log_prob"], their.old_actions_log_prob.squeeze(-1))
        assert same(batch["advantage"], their.advantages)
        assert same(batch["value_target"], their.returns)


# -- updates -----------------------------------------------------------------------------------


@pytest.mark.parametrize("reshuffle", [False, True])
def test_each_iteration_is_a_whole_fresh_update_also_after_an_early_break(reshuffle):
    buffer = filled(PLAN, sampler=MiniBatchSampler(4, 2, reshuffle))
    for taken in range(1, 8):
        for number, _ in enumerate(buffer, start=1):
            if number == taken:
                break
        check_update(cells_of_update(buffer), PLAN, buffer.sampler)


@pytest.mark.parametrize("reshuffle", [False, True])
def test_sampling_one_by_one_gives_whole_updates_one_after_another(reshuffle):
    buffer = filled(PLAN, sampler=MiniBatchSampler(4, 2, reshuffle))
    for _ in range(3):
        assert not buffer.sampler.ran_out
        check_update([cells_of(buffer.sample(), PLAN) for _ in range(8)], PLAN, buffer.sampler)
        assert buffer.sampler.ran_out
        buffer.sampler.ran_out = False


@pytest.mark.parametrize("reshuffle", [False, True])
@pytest.mark.parametrize("before", range(1, 9))
def test_sampling_amid_an_iteration_takes_from_the_same_update(reshuffle, before):
    buffer = filled(PLAN, sampler=MiniBatchSampler(4, 2, reshuffle))
    iteration = iter(buffer)
    taken = [cells_of(next(iteration), PLAN) for _ in range(before)]
    taken += [cells_of(buffer.sample(), PLAN) for _ in range(min(3, 8 - before))]
    taken += [cells_of(batch, PLAN) for batch in iteration]
    check_update(taken, PLAN, buffer.sampler)


@pytest.mark.parametrize(
    "interruption",
    [
        lambda buffer: next(iter(buffer)),
        lambda buffer: buffer.empty(),
        lambda buffer: buffer.load_state_dict(buffer.state_dict()),
        lambda buffer: [buffer.sample() for _ in range(8)],
    ],
    ids=["another iteration", "empty", "load_state_dict", "sampling on into the next update"],
)
def test_a_running_update_is_cut_off_when_its_memory_holds_something_else(interruption):
    buffer = filled(PLAN, sampler=MiniBatchSampler(4, 2))
    iteration = iter(buffer)
    next(iteration)
    interruption(buffer)
    with pytest.raises(RuntimeError, match="cut off"):
        next(iteration)


def test_emptying_the_buffer_after_the_last_mini_batch_cuts_nothing_off():
    buffer = filled(PLAN, sampler=MiniBatchSampler(4))
    for number, _ in enumerate(buffer, start=1):
        if number == 4:
            buffer.empty()
    assert number == 4


# -- the contents of a mini-batch --------------------------------------------------------------


def test_mini_batches_hold_every_root_entry_but_is_init_and_nothing_of_next():
    batch = next(iter(filled(PLAN)))
    assert tensors(batch).keys() == ROOT_KEYS - {"is_init"}


def test_mini_batches_hold_what_was_computed_once_it_is_computed():
    buffer = ours(PLAN, MiniBatchSampler(2))
    batch = next(iter(buffer))
    assert tensors(batch).keys() == ROOT_KEYS - {"is_init"} | {"advantage", "value_target"}
    cells = torch.tensor(cells_of(batch, PLAN)).float().unsqueeze(-1)
    assert torch.equal(batch["advantage"], cells + 0.125)
    assert torch.equal(batch["value_target"], cells - 0.125)


def test_an_update_holds_what_was_computed_before_it_began():
    buffer = filled(PLAN, sampler=MiniBatchSampler(2))
    assert next(iter(buffer)).get("advantage", None) is None
    buffer.storage.derived("advantage").copy_(buffer.window["next", "reward"])
    for batch in buffer:
        assert batch["advantage"].flatten().tolist() == cells_of(batch, PLAN)


@pytest.mark.parametrize("contiguous", [True, False])
@pytest.mark.parametrize("keys", [None, ["observation", "advantage"]])
def test_an_update_holds_what_its_user_set_in_the_window_last(keys, contiguous):
    buffer = filled(PLAN, sampler=MiniBatchSampler(2, keys=keys))
    reward = buffer.window["next", "reward"]

    def check(offset: int) -> None:
        for batch in buffer:
            assert (batch["advantage"].flatten() - offset).tolist() == cells_of(batch, PLAN)

    for offset in (100, 200):
        column = (
            reward + offset if contiguous else (reward + offset).transpose(0, 1).contiguous().transpose(0, 1)
        )
        buffer.window["advantage"] = column
        check(offset)
        column += 50  # and what is changed in place
        check(offset + 50)


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        (["observation"], {"observation"}),
        ([("observation",)], {"observation"}),
        (["observation", "sensors"], {"observation", ("sensors", "camera"), ("sensors", "height")}),
        ([("sensors", "height"), "observation"], {"observation", ("sensors", "height")}),
        ([(("sensors",), "height"), "observation"], {"observation", ("sensors", "height")}),
        (["observation", "is_init"], {"observation", "is_init"}),
        (["observation", "observation"], {"observation"}),
    ],
)
def test_keys_select_entries_and_groups_of_entries(keys, expected):
    buffer = filled(PLAN, sampler=MiniBatchSampler(2, keys=keys))
    batches = list(buffer)
    assert all(tensors(batch).keys() == expected for batch in batches)
    check_update([cells_of(batch, PLAN) for batch in batches], PLAN, buffer.sampler)


@pytest.mark.parametrize("key", ["sensor", ("sensors", "lidar"), ("observation", "x"), "advantage"])
def test_an_unknown_key_is_named_beside_the_ones_that_there_are(key):
    buffer = filled(PLAN, sampler=MiniBatchSampler(2, keys=["observation", key]))
    with pytest.raises(KeyError) as caught:
        next(iter(buffer))
    assert f"no key {key!r}" in caught.value.args[0]
    assert "('sensors', 'camera')" in caught.value.args[0]


@pytest.mark.parametrize("keys", [[], (), "observation"])
def test_keys_must_be_a_sequence_with_something_in_it(keys):
    with pytest.raises(ValueError, match="`keys` must be a sequence of at least one key"):
        MiniBatchSampler(keys=keys)


@pytest.mark.parametrize("key", ["advantage", "observation", ("sensors", "new")])
def test_mini_batches_are_locked(key):
    buffer = filled(PLAN, sampler=MiniBatchSampler(2))
    for batch in [next(iter(buffer)), buffer.sample()]:
        with pytest.raises(RuntimeError, match="lock"):
            batch[key] = torch.zeros(*batch.batch_size, 1)


@pytest.mark.parametrize("reshuffle", [False, True])
def test_what_is_set_in_an_unlocked_mini_batch_is_not_in_the_next_update(reshuffle):
    buffer = filled(PLAN, sampler=MiniBatchSampler(2, 1, reshuffle))
    for batch in buffer:
        with batch.unlock_():
            batch["leftover"] = torch.zeros(batch.batch_size)
    for batch in buffer:
        assert batch.is_locked
        assert tensors(batch).keys() == ROOT_KEYS - {"is_init"}


def _replace(batch):
    batch["observation"] = torch.zeros_like(batch["observation"])


def _replace_below(batch):
    batch["sensors", "camera"] = torch.zeros_like(batch["sensors", "camera"])


def _set_below(batch):
    batch["sensors", "leftover"] = torch.zeros(batch.batch_size)


def _delete(batch):
    del batch["observation"]


def _rename(batch):
    batch.rename_key_("observation", "leftover")


@pytest.mark.parametrize("touch", [_replace, _replace_below, _set_below, _delete, _rename])
@pytest.mark.parametrize("number", [0, 2])
def test_a_mini_batch_that_was_unlocked_and_changed_is_not_handed_out_again(touch, number):
    torch.manual_seed(0)
    clean = [tensors(batch.clone()) for batch in filled(PLAN, sampler=MiniBatchSampler(3))]
    torch.manual_seed(0)
    buffer = filled(PLAN, sampler=MiniBatchSampler(3))
    state = torch.get_rng_state()
    with list(buffer)[number].unlock_() as batch:
        touch(batch)
    torch.set_rng_state(state)
    for batch, before in zip(buffer, clean, strict=True):
        assert batch.is_locked
        assert tensors(batch).keys() == before.keys()
        assert all(torch.equal(value, before[key]) for key, value in tensors(batch).items())


def test_untouched_mini_batches_are_the_same_objects_in_every_update():
    buffer = filled(PLAN, sampler=MiniBatchSampler(3))
    first = list(buffer)
    assert all(again is batch for again, batch in zip(buffer, first, strict=True))


@pytest.mark.parametrize("parts", [2, 5])
def test_another_number_of_mini_batches_holds_from_the_next_update_on(parts):
    sampler = MiniBatchSampler(num_mini_batches=4)
    buffer = filled(PLAN, sampler=sampler)
    before = list(buffer)
    sampler.num_mini_batches = parts
    after = list(buffer)
    assert (len(before), len(after)) == (4, parts)
    assert sum(map(len, after)) == sum(map(len, before))


def test_a_mini_batch_left_unlocked_is_not_handed_out_again():
    buffer = filled(PLAN, sampler=MiniBatchSampler(3))
    list(buffer)[1].unlock_()
    assert all(batch.is_locked for batch in buffer)


def test_the_dtype_of_every_entry_survives_the_shuffle():
    buffer = filled(PLAN)
    dtypes = {key: value.dtype for key, value in tensors(buffer.sample()).items()}
    assert dtypes == {key: buffer.window[key].dtype for key in dtypes}
    assert {torch.uint8, torch.float16} <= set(dtypes.values())


# -- randomness --------------------------------------------------------------------------------


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("reshuffle", [False, True])
def test_buffers_with_equal_generators_agree_whatever_the_global_seed(reshuffle):
    updates = []
    for global_seed in (0, 1):
        torch.manual_seed(global_seed)
        buffer = filled(PLAN, sampler=MiniBatchSampler(4, 2, reshuffle))
        buffer.set_rng(generator(7))
        updates.append([cells_of_update(buffer) for _ in range(3)])
    assert updates[0] == updates[1]


def test_a_generator_given_to_the_constructor_is_the_one_of_set_rng():
    buffers = [filled(PLAN, generator=generator(7)), filled(PLAN)]
    buffers[1].set_rng(generator(7))
    assert cells_of_update(buffers[0]) == cells_of_update(buffers[1])


def test_another_seed_is_another_order():
    orders = [cells_of_update(filled(PLAN, generator=generator(seed))) for seed in range(4)]
    assert len({tuple(order[0]) for order in orders}) == 4


def test_a_generator_of_its_own_leaves_the_global_one_alone():
    buffer = filled(PLAN, generator=generator(7), sampler=MiniBatchSampler(2, 2, reshuffle=True))
    before = torch.get_rng_state()
    list(buffer)
    assert torch.equal(torch.get_rng_state(), before)


def test_without_a_generator_the_global_seed_decides():
    buffer = filled(PLAN, sampler=MiniBatchSampler(4))
    torch.manual_seed(3)
    first = cells_of_update(buffer)
    torch.manual_seed(3)
    assert cells_of_update(buffer) == first


# -- saving ------------------------------------------------------------------------------------


def save_and_load(sampler, other, how, folder):
    if how == "state_dict":
        other.load_state_dict(sampler.state_dict())
    else:
        for _ in range(2):  # into a folder that is not there yet, and over an older state
            sampler.dumps(folder / "new" / "sampler")
        other.loads(folder / "new" / "sampler")


@pytest.mark.parametrize("how", ["state_dict", "dumps"])
@pytest.mark.parametrize("reshuffle", [False, True])
@pytest.mark.parametrize("taken", range(0, 9))
def test_a_loaded_sampler_goes_on_where_the_saved_one_stood(how, reshuffle, taken, tmp_path):
    saved, loaded = (
        filled(PLAN, sampler=MiniBatchSampler(4, 2, reshuffle), generator=generator(seed)) for seed in (7, 8)
    )
    for _ in range(taken):
        saved.sample()
    save_and_load(saved.sampler, loaded.sampler, how, tmp_path)
    assert loaded.sampler.ran_out == saved.sampler.ran_out
    for _ in range(20):
        assert cells_of(loaded.sample(), PLAN) == cells_of(saved.sample(), PLAN)


def test_a_saved_state_does_not_change_when_the_sampler_goes_on():
    buffer = filled(PLAN, sampler=MiniBatchSampler(4, 2, reshuffle=True), generator=generator(7))
    buffer.sample()
    state = buffer.sampler.state_dict()
    expected = [cells_of(buffer.sample(), PLAN) for _ in range(12)]
    buffer.sampler.load_state_dict(state)
    assert [cells_of(buffer.sample(), PLAN) for _ in range(12)] == expected


def test_a_running_update_of_another_length_is_refused():
    buffer = filled(PLAN, sampler=MiniBatchSampler(4, 2))
    buffer.sample()
    with pytest.raises(ValueError, match=r"8 mini-batches, this sampler makes 4"):
        MiniBatchSampler(4, 1).load_state_dict(buffer.sampler.state_dict())


def test_the_state_of_a_generator_needs_a_generator_to_go_to():
    buffer = filled(PLAN, generator=generator(7))
    with pytest.raises(ValueError, match="set_rng"):
        MiniBatchSampler().load_state_dict(buffer.sampler.state_dict())


# -- in a stock ReplayBuffer -------------------------------------------------------------------


def stock_buffer(plan: Plan, sampler: MiniBatchSampler) -> ReplayBuffer:
    storage = LazyTensorStorage(plan.num_steps * plan.num_envs, ndim=2)
    buffer = ReplayBuffer(storage=storage, sampler=sampler, batch_size=1)
    buffer.extend(torch.stack(plan.rows(), 1))
    return buffer


@given(plan=plans(), parts=st.integers(1, 4), epochs=st.integers(1, 3), flags=st.tuples(*[st.booleans()] * 2))
def test_it_covers_the_window_of_a_stock_buffer_too(plan, parts, epochs, flags):
    reshuffle, drop_remainder = flags
    parts = min(parts, plan.num_steps * plan.num_envs)
    buffer = stock_buffer(plan, MiniBatchSampler(parts, epochs, reshuffle, drop_remainder))
    for _ in range(2):
        check_update(cells_of_update(buffer, plan), plan, buffer.sampler)


@pytest.mark.parametrize(("reshuffle", "ways"), [(False, 1), (True, 4)])
def test_in_a_stock_buffer_too_only_reshuffle_deals_the_cells_anew(reshuffle, ways):
    sampler = MiniBatchSampler(5, 4, reshuffle)
    assert different_epochs(stock_buffer(PLAN, sampler), sampler) == ways


def test_in_a_stock_buffer_it_refuses_an_empty_storage_and_one_of_one_dimension():
    sampler = MiniBatchSampler(2)
    with pytest.raises(RuntimeError, match="storage is empty"):
        ReplayBuffer(storage=LazyTensorStorage(15, ndim=2), sampler=sampler, batch_size=1).sample()
    flat = ReplayBuffer(storage=LazyTensorStorage(15), sampler=sampler, batch_size=1)
    flat.extend(torch.cat(PLAN.rows()))
    with pytest.raises(ValueError, match=r"\[T, N\].*ndim=2"):
        flat.sample()
