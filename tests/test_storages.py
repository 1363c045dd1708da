"""RolloutTensorStorage: the layout of a window, its size in bytes, and the table of final observations."""

from __future__ import annotations

import pytest
import torch
from conftest import make_row
from hypothesis import given
from hypothesis import strategies as st
from oracles import (
    ROOT_KEYS,
    Plan,
    check_final_observations,
    check_window,
    column,
    filled,
    plans,
    same,
    tensors,
)
from tensordict import TensorDict

from torchrl_rslstorage import MiniBatchSampler, RolloutBuffer, RolloutTensorStorage
from torchrl_rslstorage.data import final_observations

PLAN = Plan(4, 3, terminated=frozenset({(0, 1), (3, 0)}), truncated=frozenset({(1, 0), (1, 2), (3, 2)}))


# -- layout ------------------------------------------------------------------------------------


@given(plan=plans())
def test_a_window_is_time_major_and_its_time_dimension_has_its_name(plan):
    window = filled(plan).window
    assert window.batch_size == torch.Size([plan.num_steps, plan.num_envs])
    assert window.names == ["time", None]


def test_next_observations_have_no_column():
    buffer = filled(PLAN)
    assert tensors(buffer.window.get("next")).keys() == {"reward", "done", "terminated", "truncated"}


def test_the_window_is_a_view_and_not_a_copy():
    buffer = filled(PLAN)
    buffer.window["observation"].fill_(-1.0)
    assert torch.equal(buffer.window["observation"], torch.full((4, 3, 4), -1.0))
    assert set(buffer.sample()["observation"].flatten().tolist()) == {-1.0}


def test_memory_is_allocated_once_for_all_windows():
    buffer = filled(PLAN)
    before = {key: value.data_ptr() for key, value in tensors(buffer.window).items()}
    batches = [batch["observation"].data_ptr() for batch in buffer]
    buffer.empty()
    for row in PLAN.rows(window=1):
        buffer.add(row)
    assert {key: value.data_ptr() for key, value in tensors(buffer.window).items()} == before
    assert [batch["observation"].data_ptr() for batch in buffer] == batches


def test_an_example_allocates_the_columns_and_writes_nothing():
    buffer = RolloutBuffer(4, 3, example=make_row(7, 3))
    columns = tensors(buffer.storage.columns)
    assert {"observation", ("next", "reward")} < columns.keys()
    assert not any(value.any() for value in columns.values())
    assert buffer.num_rows == 0
    with pytest.raises(RuntimeError, match="holds 0 of 4 rows"):
        _ = buffer.window
    before = {key: value.data_ptr() for key, value in columns.items()}
    for row in PLAN.rows():
        buffer.add(row)
    assert {key: value.data_ptr() for key, value in tensors(buffer.window).items()} == before
    check_window(buffer, PLAN)
    check_final_observations(buffer, PLAN)


@pytest.mark.parametrize("num_rows", range(4))
def test_a_part_filled_window_is_refused_with_both_counts(num_rows):
    buffer = RolloutBuffer(4, 3)
    for row in PLAN.rows()[:num_rows]:
        buffer.add(row)
    with pytest.raises(
        RuntimeError, match=f"{num_rows} of 4 rows .{num_rows * 3} of 12 transitions.*fill it"
    ):
        buffer.storage.window()


@pytest.mark.parametrize(("sizes", "name"), [((0, 3), "num_steps"), ((3, 0), "num_envs")])
def test_a_size_below_one_is_refused_by_name(sizes, name):
    with pytest.raises(ValueError, match=f"`{name}` must be an integer of at least 1, got 0"):
        RolloutTensorStorage(*sizes)
    with pytest.raises(ValueError, match=f"`{name}`"):
        RolloutBuffer(*sizes)


@pytest.mark.parametrize("size", [2.0, True, "2"])
def test_a_size_that_is_no_integer_is_refused(size):
    with pytest.raises(ValueError, match=r"`num_steps` must be an integer"):
        RolloutTensorStorage(size, 3)


# -- bytes -------------------------------------------------------------------------------------


def bytes_of(td: TensorDict) -> int:
    return sum(value.numel() * value.element_size() for value in tensors(td).values())


def allocated(td) -> int:
    """Bytes of the memory that the tensors are views of."""
    memory = {value.untyped_storage().data_ptr(): value.untyped_storage() for value in tensors(td).values()}
    return sum(storage.nbytes() for storage in memory.values())


@given(plan=plans())
def test_nbytes_is_known_before_the_window_is_and_right_after_it(plan):
    without_truncation = plan._replace(truncated=frozenset())
    buffer = RolloutBuffer(plan.num_steps, plan.num_envs)
    expected = buffer.nbytes(make_row(0, plan.num_envs))
    for row in without_truncation.rows():
        buffer.add(row)
    buffer.storage.derived("advantage")
    buffer.storage.derived("value_target")
    assert buffer.nbytes() == expected
    assert allocated(buffer.window) + allocated(buffer.final_observations.observation) == expected
    assert bytes_of(buffer.window) + bytes_of(buffer.final_observations.observation) < expected
    assert RolloutBuffer(*plan[:2], example=make_row(0, plan.num_envs)).nbytes() == expected


def test_asking_for_bytes_allocates_nothing():
    buffer = RolloutBuffer(4, 3)
    buffer.nbytes(make_row(0, 3))
    assert buffer.storage.columns is None
    with pytest.raises(RuntimeError, match=r"buffer\.nbytes\(example\)"):
        buffer.nbytes()


def test_a_window_that_does_not_fit_is_refused_with_the_figure_of_nbytes():
    num_steps, num_envs = 10**7, 10**6  # petabytes: more than an address space of 47 bits holds
    memory = torch.zeros(1)
    example = TensorDict(
        {
            "observation": memory.expand(num_envs, 48),
            "action": memory.expand(num_envs, 2),
            "next": {
                "observation": memory.expand(num_envs, 48),
                "reward": memory.expand(num_envs, 1),
                "done": torch.zeros(1, dtype=torch.bool).expand(num_envs, 1),
            },
        },
        [num_envs],
    )
    figure = RolloutBuffer(num_steps, num_envs).nbytes(example)
    bytes_per_cell = 4 * 48 + 4 * 2 + 4 + 3 + 2 * 4  # observation, action, reward, flags, derived columns
    kept = num_envs + 2 * (num_envs // 8)  # the last row's observations, with room for truncated steps'
    assert figure == (num_steps * num_envs + 1) * bytes_per_cell + kept * 4 * 48
    with pytest.raises(MemoryError) as caught:
        RolloutBuffer(num_steps, num_envs, example=example)
    message = str(caught.value)
    assert f"10000000 steps x 1000000 environments takes {figure:,} bytes" in message
    assert "cpu has not got" in message


# -- derived columns ---------------------------------------------------------------------------


def test_a_derived_column_is_part_of_the_window_until_it_is_emptied():
    buffer = filled(PLAN)
    column = buffer.storage.derived(("returns", "raw"), features=(2, 3), dtype=torch.float64)
    assert column.shape == (4, 3, 2, 3)
    assert column.dtype == torch.float64
    column.fill_(0.5)
    assert torch.equal(buffer.window["returns", "raw"], column)
    buffer.empty()
    for row in PLAN.rows():
        buffer.add(row)
    with pytest.raises(KeyError, match="raw"):
        _ = buffer.window["returns", "raw"]
    assert buffer.storage.derived(("returns", "raw"), features=(2, 3), dtype=torch.float64) is column


def test_a_derived_column_of_another_layout_replaces_the_old_one():
    buffer = filled(PLAN)
    buffer.storage.derived("advantage").fill_(1.0)
    assert buffer.storage.derived("advantage", dtype=torch.float64).dtype == torch.float64
    assert buffer.window["advantage"].dtype == torch.float64


def test_a_derived_column_takes_the_place_of_one_that_its_user_set():
    buffer = filled(PLAN)
    for number in (1.0, 2.0):
        buffer.storage.derived("advantage").fill_(number)
        assert torch.equal(buffer.window["advantage"], torch.full((4, 3, 1), number))
        buffer.window["advantage"] = torch.full((4, 3, 1), -1.0)


@pytest.mark.parametrize("key", ["state_value", ("sensors", "height"), ("observation",), ("next", "reward")])
def test_what_rows_write_cannot_be_computed_into(key):
    buffer = filled(PLAN)
    with pytest.raises(ValueError, match="the rows of this rollout write it"):
        buffer.storage.derived(key)
    check_window(buffer, PLAN)


def test_nothing_can_be_computed_before_anything_is_stored():
    with pytest.raises(RuntimeError, match="write a window before"):
        RolloutBuffer(4, 3).storage.derived("advantage")


# -- the flat view and its shuffled copy -------------------------------------------------------


@given(plan=plans(), data=st.data())
def test_shuffled_picks_the_cells_that_it_is_asked_for(plan, data):
    total = plan.num_steps * plan.num_envs
    cells = data.draw(st.lists(st.integers(0, total - 1), min_size=1, max_size=total))
    shuffled = filled(plan).storage.shuffled(torch.tensor(cells), None)
    assert shuffled.keys() == ROOT_KEYS - {"is_init"}
    for key, value in shuffled.items():
        flat = column(plan.rows(), key).flatten(0, 1)
        assert same(value, torch.stack([flat[cell] for cell in cells]))


# -- final observations ------------------------------------------------------------------------


@pytest.fixture
def accelerator(monkeypatch):
    """Makes a look at a flag as dear as it is on an accelerator, so that candidates wait in line."""
    monkeypatch.setattr(final_observations, "_stalls", lambda flags: True)


def looks(monkeypatch) -> list[int]:
    """Records how many rows each look at the truncation flags takes in."""
    seen: list[int] = []
    keep = final_observations.CellTable._keep
    monkeypatch.setattr(
        final_observations.CellTable,
        "_keep",
        lambda self, rows: (seen.append(len(rows)), keep(self, rows))[1],
    )
    return seen


@given(plan=plans(max_steps=20))
def test_final_observations_are_those_of_truncated_steps_and_of_the_last_row(plan):
    check_final_observations(filled(plan), plan)


@given(plan=plans(max_steps=20))
def test_on_an_accelerator_the_table_is_the_same(plan):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(final_observations, "_stalls", lambda flags: True)
        check_final_observations(filled(plan), plan)


@pytest.mark.parametrize("num_steps", [1, 7, 8, 9, 10, 16, 17, 18])
def test_on_an_accelerator_flags_are_looked_at_once_in_eight_rows(num_steps, accelerator, monkeypatch):
    seen = looks(monkeypatch)
    plan = Plan(num_steps, 2, truncated=frozenset((t, t % 2) for t in range(num_steps)))
    check_final_observations(filled(plan), plan)
    waiting = num_steps - 1  # the last row is kept whole, without a look
    assert seen == [8] * (waiting // 8) + [waiting % 8] * (waiting % 8 > 0)


def test_on_an_accelerator_candidates_that_wait_are_copies(accelerator):
    plan = Plan(6, 2, truncated=frozenset({(0, 1), (3, 0), (4, 0), (4, 1)}))
    buffer, reused = RolloutBuffer(6, 2), make_row(0, 2)
    for row in plan.rows():
        buffer.add(reused.update_(row))
    reused.apply_(torch.Tensor.zero_)
    check_final_observations(buffer, plan)


@pytest.mark.parametrize("waits", [False, True])
def test_the_table_can_be_read_at_any_time(waits, monkeypatch):
    monkeypatch.setattr(final_observations, "_stalls", lambda flags: waits)
    truncated = frozenset({(0, 1), (2, 0), (9, 2), (11, 1)})
    plan = Plan(12, 3, truncated=truncated)
    buffer = RolloutBuffer(12, 3)
    for t, row in enumerate(plan.rows()[:-1]):
        buffer.add(row)
        steps, envs, _ = buffer.final_observations
        expected = sorted(cell for cell in truncated if cell[0] <= t)
        assert list(zip(steps.tolist(), envs.tolist(), strict=True)) == expected
    buffer.add(plan.rows()[-1])
    check_final_observations(buffer, plan)


@pytest.mark.parametrize("waits", [False, True])
def test_candidates_of_an_emptied_window_are_forgotten(waits, monkeypatch):
    monkeypatch.setattr(final_observations, "_stalls", lambda flags: waits)
    plan = Plan(5, 3, truncated=frozenset({(0, 1), (1, 1)}))
    buffer = RolloutBuffer(5, 3)
    for row in plan.rows()[:2]:
        buffer.add(row)
    buffer.empty()
    other = Plan(5, 3, truncated=frozenset({(2, 0)}))
    for row in other.rows(window=1):
        buffer.add(row)
    check_final_observations(buffer, other, window=1)


def test_writing_into_the_places_of_final_observations_changes_no_later_window():
    plan = Plan(num_steps=3, num_envs=2)
    buffer = filled(plan)
    places = buffer.final_observations
    places.t.add_(1)
    places.n.add_(1)
    buffer.empty()
    for row in plan.rows(window=1):
        buffer.add(row)
    check_final_observations(buffer, plan, window=1)


def test_without_next_observations_the_table_knows_the_cells_only():
    buffer = RolloutBuffer(4, 3)
    for row in PLAN.rows():
        buffer.add(row.exclude(("next", "observation"), ("next", "sensors")))
    t, n, observation = buffer.final_observations
    assert list(zip(t.tolist(), n.tolist(), strict=True)) == PLAN.final_cells()
    assert tensors(observation) == {}


@pytest.mark.parametrize("num_later", [1, 5, 40])
def test_what_a_window_keeps_is_its_own_after_one_whose_table_had_to_grow(num_later):
    table = final_observations.CellTable(4, torch.device("cpu"))
    every = torch.ones(4, 1, dtype=torch.bool)
    for window, later in enumerate((40, num_later)):
        table.clear()
        table.record(0, None, {"state": torch.full((4, 2), 1000.0 * window)})
        for t in range(1, later + 1):
            table.record(t, every, {"state": torch.full((4, 2), 1000.0 * window + t)})
        found = table.read()
        expected = 1000.0 * window + torch.arange(later + 1.0).repeat_interleave(4)
        assert found.t.tolist() == [t for t in range(later + 1) for _ in range(4)]
        assert torch.equal(found.observation["state"], expected.unsqueeze(-1).expand(-1, 2))


def test_a_window_may_keep_another_whole_row_than_the_one_before():
    table = final_observations.CellTable(3, torch.device("cpu"))
    for t in (4, 2):
        table.clear()
        table.record(t, None, {"state": torch.full((3, 1), float(t))})
        found = table.read()
        assert found.t.tolist() == [t] * 3
        assert found.observation["state"].flatten().tolist() == [t] * 3


# -- saving ------------------------------------------------------------------------------------


def save_and_load(storage, other, how, folder):
    if how == "state_dict":
        other.load_state_dict(storage.state_dict())
    else:
        for _ in range(2):  # into a folder that is not there yet, and over an older state
            storage.dumps(folder / "new" / "storage")
        other.loads(folder / "new" / "storage")


@pytest.mark.parametrize("how", ["state_dict", "dumps"])
@pytest.mark.parametrize("num_rows", range(5))
def test_a_loaded_storage_holds_what_the_saved_one_held(how, num_rows, tmp_path):
    saved, loaded = RolloutBuffer(4, 3), filled(Plan(4, 3, truncated=frozenset({(0, 0)})), window=1)
    for row in PLAN.rows()[:num_rows]:
        saved.add(row)
    save_and_load(saved.storage, loaded.storage, how, tmp_path)
    loaded.writer.load_state_dict(saved.writer.state_dict())
    assert loaded.storage.num_rows == num_rows
    assert len(loaded.storage) == num_rows * 3
    for row in PLAN.rows()[num_rows:]:
        loaded.add(row)
    check_window(loaded, PLAN)
    check_final_observations(loaded, PLAN)


@pytest.mark.parametrize("how", ["state_dict", "dumps"])
def test_derived_columns_are_saved_with_a_full_window(how, tmp_path):
    saved, loaded = filled(PLAN), RolloutBuffer(4, 3)
    saved.storage.derived("advantage").copy_(saved.window["next", "reward"])
    saved.storage.derived(("returns", "raw"), features=(2,), dtype=torch.float64).fill_(0.5)
    saved.window["mine"] = (
        column(PLAN.rows(), ("next", "reward")).transpose(0, 1).contiguous().transpose(0, 1)
    )
    save_and_load(saved.storage, loaded.storage, how, tmp_path)
    for key in ("advantage", "mine"):
        assert same(loaded.window[key], column(PLAN.rows(), ("next", "reward")))
    assert same(loaded.window["returns", "raw"], torch.full((4, 3, 2), 0.5, dtype=torch.float64))


def test_a_saved_state_does_not_change_with_the_storage():
    buffer = filled(PLAN)
    buffer.storage.derived("advantage").fill_(2.0)
    state = buffer.storage.state_dict()
    buffer.empty()
    for row in Plan(4, 3).rows(window=1):
        buffer.add(row)
    buffer.storage.derived("advantage").fill_(3.0)
    buffer.storage.load_state_dict(state)
    assert torch.equal(buffer.window["advantage"], torch.full((4, 3, 1), 2.0))
    check_final_observations(buffer, PLAN)
    buffer.storage.columns.del_("advantage")
    check_window(buffer, PLAN)


def test_a_window_of_another_size_is_not_loaded():
    state = filled(PLAN).storage.state_dict()
    with pytest.raises(ValueError, match="4 steps x 3 environments, this one is 3 x 4"):
        RolloutTensorStorage(3, 4).load_state_dict(state)


# -- devices -----------------------------------------------------------------------------------


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("env_device", ["cpu", "cuda"])
@pytest.mark.parametrize("buffer_device", ["cpu", "cuda"])
def test_environment_and_buffer_may_live_on_different_devices(env_device, buffer_device):
    buffer = RolloutBuffer(4, 3, device=buffer_device, sampler=MiniBatchSampler(2))
    for row in PLAN.rows():
        buffer.add(row.to(env_device))
    for key, value in tensors(buffer.window).items():
        assert value.device.type == buffer_device
        assert same(value.cpu(), column(PLAN.rows(), key))
    t, n, observation = buffer.final_observations
    assert list(zip(t.tolist(), n.tolist(), strict=True)) == PLAN.final_cells()
    assert observation.device.type == buffer_device
    assert all(batch.device.type == buffer_device for batch in buffer)
