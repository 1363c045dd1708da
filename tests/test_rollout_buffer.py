"""RolloutBuffer: windows, transforms, saving, and how it gets on with TorchRL's own parts."""

from __future__ import annotations

import copy
import multiprocessing
import pickle
from itertools import chain
from pickle import UnpicklingError

import pytest
import torch
from conftest import make_row
from hypothesis import given
from oracles import (
    ROOT_KEYS,
    SIGNALS,
    Plan,
    cells_of,
    check_cannot_be_read,
    check_final_observations,
    check_nothing_of_the_old_window_is_left,
    check_update,
    check_window,
    fill,
    filled,
    plans,
    same,
    tensors,
)
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModule
from torchrl.collectors import Collector, MultiSyncCollector
from torchrl.data import Bounded, Categorical, Composite, Unbounded
from torchrl.data.replay_buffers import RandomSampler, SamplerWithoutReplacement
from torchrl.envs import EnvBase, InitTracker, SerialEnv, StepCounter, Transform, TransformedEnv
from torchrl.envs.libs.gym import GymEnv

from torchrl_rslstorage import MiniBatchSampler, RolloutBuffer, TimeStepSampler, TrajectorySampler

PLAN = Plan(4, 3, terminated=frozenset({(0, 1), (3, 0)}), truncated=frozenset({(1, 0), (1, 2), (3, 2)}))


# -- windows -----------------------------------------------------------------------------------


@given(plan=plans())
def test_after_emptying_nothing_of_the_old_window_can_be_read(plan):
    at_least_two_cells = plan._replace(num_envs=max(plan.num_envs, 2))
    check_nothing_of_the_old_window_is_left(at_least_two_cells)


@pytest.mark.parametrize("num_rows", range(4))
def test_a_window_that_is_not_full_cannot_be_read(num_rows):
    buffer = RolloutBuffer(4, 3)
    for row in PLAN.rows()[:num_rows]:
        buffer.add(row)
    check_cannot_be_read(buffer)
    assert buffer.num_rows == num_rows
    assert len(buffer) == num_rows * 3
    assert buffer.is_full is False


@pytest.mark.parametrize("sampler", [RandomSampler, SamplerWithoutReplacement])
def test_a_window_that_is_not_full_cannot_be_read_by_a_stock_sampler_either(sampler):
    buffer = RolloutBuffer(4, 3, sampler=sampler())
    buffer.add(make_row(0, 3))
    with pytest.raises(RuntimeError, match="1 of 4 rows"):
        buffer.sample(2)


def test_windows_follow_each_other_and_count_on():
    buffer = RolloutBuffer(4, 3)
    for window in range(3):
        fill(buffer, PLAN, window)
        check_window(buffer, PLAN, window)
        check_final_observations(buffer, PLAN, window)
        assert buffer.write_count == (window + 1) * 12
        buffer.empty()
        assert buffer.write_count == (window + 1) * 12
    buffer.empty(empty_write_count=True)
    assert buffer.write_count == 0


def test_the_count_of_transitions_has_64_bits(tmp_path):
    count = 2**33
    buffer = RolloutBuffer(4, 3)
    buffer.writer.load_state_dict({"cursor": 0, "write_count": count})
    fill(buffer, PLAN)
    assert buffer.write_count == count + 12
    buffer.empty()
    assert buffer.write_count == count + 12
    buffer.dumps(tmp_path)
    other = RolloutBuffer(4, 3)
    other.loads(tmp_path)
    assert other.write_count == count + 12


@pytest.mark.parametrize("extend", [False, True])
def test_a_part_filled_window_shows_its_rows_only(extend):
    buffer = RolloutBuffer(4, 3)
    if extend:
        buffer.extend(torch.stack(PLAN.rows()[:2], 1))
    else:
        fill(buffer, PLAN)
        buffer.empty()
        fill_rows(buffer, PLAN.rows(window=1)[:2])
    shown = buffer[:]  # TorchRL shows two-dimensional storages as [N, T']
    assert shown.batch_size == torch.Size([3, 2])
    expected = torch.stack(PLAN.rows(window=0 if extend else 1)[:2], 1)
    assert same(shown["observation"], expected["observation"])
    assert same(buffer["action"], expected["action"])


def fill_rows(buffer: RolloutBuffer, rows: list[TensorDict]) -> None:
    for row in rows:
        buffer.add(row)


def test_a_sampler_with_sizes_of_its_own_refuses_a_batch_size():
    buffer = filled(PLAN, sampler=MiniBatchSampler(3))
    with pytest.raises(ValueError, match=r"MiniBatchSampler\(num_mini_batches=3.*without batch_size"):
        buffer.sample(4)


def test_sampling_with_info_gives_an_empty_dictionary_beside_the_mini_batch():
    batch, info = filled(PLAN).sample(return_info=True)
    assert sorted(cells_of(batch, PLAN)) == list(range(12))
    assert info == {}


def test_next_walks_through_one_update_and_then_says_none():
    buffer = filled(PLAN, sampler=MiniBatchSampler(4, 2))
    for _ in range(2):
        batches = [buffer.next() for _ in range(8)]
        check_update([cells_of(batch, PLAN) for batch in batches], PLAN, buffer.sampler)
        assert buffer.next() is None


# -- transforms --------------------------------------------------------------------------------


class Shift(Transform):
    """Adds 1000 to observations on the way out and 500 on the way in, and leaves a new entry behind."""

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        tensordict["observation"] = tensordict["observation"] + 1000
        tensordict["sensors", "new"] = torch.ones(tensordict.batch_size)
        return tensordict

    def _inv_call(self, tensordict: TensorDictBase) -> TensorDictBase:
        return tensordict.clone(recurse=False).set("observation", tensordict["observation"] + 500)


def test_transforms_see_unlocked_shallow_copies_and_the_window_stays_as_it_is():
    keys = ["observation", "sensors"]
    buffer = filled(PLAN, sampler=MiniBatchSampler(2, 2, keys=keys))
    memory = {batch["sensors", "height"].data_ptr() for batch in buffer}
    buffer.append_transform(Shift())
    for batch in chain(buffer, map(RolloutBuffer.sample, [buffer])):
        assert not batch.is_locked
        batch["sensors", "mine"] = torch.zeros(batch.batch_size)
        assert torch.equal(batch["observation"][:, :2] - 1000, batch["sensors", "height"].float())
        assert batch["sensors", "height"].data_ptr() in memory  # shallow: nothing was copied
    assert (buffer[:]["observation"] >= 1000).all()

    check_window(buffer, PLAN)
    for _ in range(4):
        below = buffer.sampler.next(buffer.storage)
        assert below.is_locked
        assert tensors(below).keys() == {"observation", ("sensors", "camera"), ("sensors", "height")}
        cells_of(below, PLAN)


@pytest.mark.parametrize("extend", [False, True])
def test_what_is_written_goes_through_the_inverse_of_a_transform(extend):
    buffer = RolloutBuffer(4, 3, transform=Shift())
    if extend:
        buffer.extend(torch.stack(PLAN.rows(), 1))
    else:
        fill(buffer, PLAN)
    assert same(buffer.window["observation"] - 500, torch.stack(PLAN.rows())["observation"])


# -- saving ------------------------------------------------------------------------------------


def save_and_load(buffer: RolloutBuffer, other: RolloutBuffer, how: str, folder) -> None:
    if how == "state_dict":
        other.load_state_dict(buffer.state_dict())
    else:
        for _ in range(2):  # into a folder that is not there yet, and over an older state
            buffer.dumps(folder / "new" / "buffer")
        other.loads(folder / "new" / "buffer")


@pytest.mark.parametrize("how", ["state_dict", "dumps"])
@pytest.mark.parametrize("reshuffle", [False, True])
@pytest.mark.parametrize("taken", [0, 1, 3, 4, 7, 8, 9])
def test_a_loaded_buffer_goes_on_as_the_saved_one_does(how, reshuffle, taken, tmp_path):
    saved = filled(
        PLAN, sampler=MiniBatchSampler(4, 2, reshuffle), generator=torch.Generator().manual_seed(7)
    )
    saved.storage.derived("advantage").copy_(saved.window["next", "reward"])
    for _ in range(taken):
        saved.sample()
    loaded = RolloutBuffer(4, 3, sampler=MiniBatchSampler(4, 2, reshuffle))
    save_and_load(saved, loaded, how, tmp_path)

    for _ in range(12):
        mine, theirs = loaded.sample(), saved.sample()
        assert cells_of(mine, PLAN) == cells_of(theirs, PLAN)
        assert same(mine["advantage"], theirs["advantage"])
    for buffer in (saved, loaded):
        buffer.empty()
        fill(buffer, PLAN, window=1)
    check_window(loaded, PLAN, window=1)
    check_final_observations(loaded, PLAN, window=1)
    assert loaded.write_count == saved.write_count == 24
    for mine, theirs in zip(loaded, saved, strict=True):
        assert same(mine["observation"], theirs["observation"])


@pytest.mark.parametrize("how", ["state_dict", "dumps"])
@pytest.mark.parametrize("num_rows", range(4))
def test_a_part_filled_buffer_is_filled_on_after_loading(how, num_rows, tmp_path):
    saved, loaded = RolloutBuffer(4, 3), filled(Plan(4, 3), window=5)
    fill_rows(saved, PLAN.rows()[:num_rows])
    save_and_load(saved, loaded, how, tmp_path)
    assert (loaded.num_rows, loaded.write_count) == (num_rows, num_rows * 3)
    fill_rows(loaded, PLAN.rows()[num_rows:])
    check_window(loaded, PLAN)
    check_final_observations(loaded, PLAN)


class Foreign:
    """Something that only a pickle that runs code can bring back."""


@pytest.mark.parametrize("part", ["buffer", "storage", "sampler"])
def test_loading_runs_no_code(part, tmp_path):
    torch.save({"_storage": Foreign()}, tmp_path / f"{part}.pt")
    buffer = filled(PLAN)
    with pytest.raises(UnpicklingError, match="Weights only load failed"):
        (buffer if part == "buffer" else getattr(buffer, part)).loads(tmp_path)
    check_window(buffer, PLAN)


def test_a_loaded_generator_is_not_the_one_of_the_saved_buffer():
    saved = filled(PLAN, generator=torch.Generator().manual_seed(7), sampler=MiniBatchSampler(2))
    loaded = filled(PLAN, sampler=MiniBatchSampler(2))
    loaded.load_state_dict(saved.state_dict())
    expected = [cells_of(batch, PLAN) for batch in loaded]
    assert [cells_of(batch, PLAN) for batch in saved] == expected


# -- TorchRL's collectors ----------------------------------------------------------------------


class Corridors(EnvBase):
    """N environments with episodes of 2 + n steps: even ones terminate, odd ones are truncated.

    The observation is (episode, step, n, sum of actions); the reward is the action.
    """

    def __init__(self, num_envs: int) -> None:
        super().__init__(batch_size=[num_envs])
        flag = Categorical(2, (num_envs, 1), dtype=torch.bool)
        self.observation_spec = Composite(observation=Unbounded((num_envs, 4)), shape=[num_envs])
        self.action_spec = Bounded(-1.0, 1.0, (num_envs, 1))
        self.reward_spec = Unbounded((num_envs, 1))
        self.done_spec = Composite(
            done=flag.clone(), terminated=flag.clone(), truncated=flag.clone(), shape=[num_envs]
        )
        self.state = torch.zeros(num_envs, 4)
        self.state[:, 0] = -1
        self.state[:, 2] = torch.arange(num_envs)

    def _reset(self, tensordict: TensorDictBase | None) -> TensorDict:
        which = None if tensordict is None else tensordict.get("_reset", None)
        which = torch.ones(self.batch_size, dtype=torch.bool) if which is None else which.squeeze(-1)
        self.state[which, 0] += 1
        self.state[which, 1] = 0
        self.state[which, 3] = 0
        flag = torch.zeros(*self.batch_size, 1, dtype=torch.bool)
        flags = {"done": flag, "terminated": flag.clone(), "truncated": flag.clone()}
        return TensorDict({"observation": self.state.clone(), **flags}, self.batch_size)

    def _step(self, tensordict: TensorDictBase) -> TensorDict:
        action = tensordict["action"]
        self.state[:, 1] += 1
        self.state[:, 3:] += action
        even = self.state[:, 2] % 2 == 0
        over = (self.state[:, 1] >= 2 + self.state[:, 2]).unsqueeze(-1)
        flags = {"terminated": over & even.unsqueeze(-1), "truncated": over & ~even.unsqueeze(-1)}
        return TensorDict(
            {"observation": self.state.clone(), "reward": action.clone(), "done": over, **flags},
            self.batch_size,
        )

    def _set_seed(self, seed: int | None) -> None:
        pass


def noisy(observation: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    action = torch.rand(*observation.shape[:-1], 1) * 2 - 1
    return action, observation.sum(-1)


def policy() -> TensorDictModule:
    return TensorDictModule(noisy, in_keys=["observation"], out_keys=["action", "action_log_prob"])


def corridors() -> TransformedEnv:
    return TransformedEnv(Corridors(3), InitTracker())


def pendulums() -> EnvBase:
    def pendulum() -> EnvBase:
        return TransformedEnv(GymEnv("Pendulum-v1", max_episode_steps=5), StepCounter())

    return SerialEnv(2, pendulum)


def pendulum() -> EnvBase:
    return GymEnv("Pendulum-v1", max_episode_steps=5)


ENVIRONMENTS = {"batched": (corridors, 3), "SerialEnv": (pendulums, 2), "single": (pendulum, 1)}
NUM_STEPS, NUM_WINDOWS = 8, 3


def collector(make_env, num_envs: int, **options) -> Collector:
    made = Collector(
        make_env(),
        policy(),
        frames_per_batch=NUM_STEPS * num_envs,
        total_frames=NUM_STEPS * num_envs * NUM_WINDOWS,
        auto_register_policy_transforms=False,  # torchrl 0.14 warns of its coming default
        **options,
    )
    made.set_seed(0)
    made.reset()
    torch.manual_seed(0)  # last, since building a collector already draws from it
    return made


def check_holds_batch(buffer: RolloutBuffer, batch: TensorDictBase) -> None:
    """The window is the collector's batch ``[N, T]``: its root and its signals; the rest of next sparsely."""
    rows = batch.transpose(0, 1) if batch.ndim == 2 else batch.unsqueeze(1)
    root = tensors(rows.exclude("next", "done", "terminated", "truncated", "collector"))
    assert "observation" in root
    stored = tensors(buffer.window)
    assert stored.keys() == root.keys() | {("next", name) for name in SIGNALS}
    for key, value in stored.items():
        assert same(value, rows[key]), f"{key} is not what the collector yields"

    final = rows["next", "truncated"].squeeze(-1).clone()
    final[-1] = True
    t, n, kept = buffer.final_observations
    assert torch.equal(torch.stack([t, n], -1), final.nonzero())
    assert tensors(kept).keys() == tensors(rows["next"]).keys() & root.keys() - {"is_init"}
    for key, value in tensors(kept).items():
        assert same(value, rows["next", key][final]), f"final {key} is not what stood under next"


@pytest.mark.parametrize("name", ENVIRONMENTS)
@pytest.mark.parametrize("options", [{}, {"extend_buffer": False}], ids=["extend", "add"])
def test_a_stock_collector_fills_the_buffer_with_what_it_would_have_yielded(name, options):
    make_env, num_envs = ENVIRONMENTS[name]
    yielding = collector(make_env, num_envs)
    batches = [batch.clone() for batch in yielding]
    yielding.shutdown()
    assert len(batches) == NUM_WINDOWS
    assert all(batch["next", "done"].any() for batch in batches)

    buffer = RolloutBuffer(NUM_STEPS, num_envs)
    writing = collector(make_env, num_envs, replay_buffer=buffer, **options)
    windows = 0
    for nothing in writing:
        assert nothing is None
        check_holds_batch(buffer, batches[windows])
        windows += 1
        assert buffer.write_count == windows * NUM_STEPS * num_envs
        buffer.empty()
    writing.shutdown()
    assert windows == NUM_WINDOWS


def test_truncated_and_terminated_episodes_both_occur_in_these_environments():
    batches = list(collector(corridors, 3))
    ends = torch.cat(batches, -1)["next"]
    assert ends["terminated"].any()
    assert ends["truncated"].any()


def test_a_collector_that_runs_into_a_full_window_says_so():
    buffer = RolloutBuffer(NUM_STEPS, 3)
    writing = collector(corridors, 3, replay_buffer=buffer)
    with pytest.raises(OverflowError, match=r"holds 8 of 8 rows and 8 more do not fit.*buffer\.empty\(\)"):
        list(writing)


@pytest.mark.slow  # two processes that import torch
def test_batches_of_several_processes_are_extended_by_hand():
    made = MultiSyncCollector(
        [corridors, corridors],
        policy(),
        frames_per_batch=NUM_STEPS * 6,
        total_frames=NUM_STEPS * 6 * 2,
        cat_results=0,
        auto_register_policy_transforms=False,
    )
    made.set_seed(0)
    buffer, windows = RolloutBuffer(NUM_STEPS, 6), 0
    for batch in made:
        assert batch.batch_size == torch.Size([6, NUM_STEPS])
        buffer.extend(batch)
        check_holds_batch(buffer, batch)
        buffer.empty()
        windows += 1
    made.shutdown()
    assert windows == 2


# -- TorchRL's samplers ------------------------------------------------------------------------


def cells_of_stock(batch: TensorDictBase) -> list[int]:
    assert tensors(batch).keys() == ROOT_KEYS | {("next", name) for name in SIGNALS}
    cells = cells_of(batch.exclude("next"), PLAN)
    assert batch["next", "reward"].flatten().tolist() == cells
    return cells


def test_a_stock_random_sampler_draws_cells_of_the_window():
    buffer = filled(PLAN, sampler=RandomSampler())
    seen = [cell for _ in range(50) for cell in cells_of_stock(buffer.sample(5))]
    assert set(seen) == set(range(12))
    batch, info = buffer.sample(5, return_info=True)
    t, n = info["index"]
    assert (t * 3 + n).tolist() == cells_of_stock(batch)


def test_a_stock_sampler_without_replacement_covers_window_after_window():
    buffer = RolloutBuffer(4, 3, sampler=SamplerWithoutReplacement())
    for _ in range(3):
        fill(buffer, PLAN)
        for _ in range(2):
            cells = [cell for _ in range(3) for cell in cells_of_stock(buffer.sample(4))]
            assert sorted(cells) == list(range(12))
        cells_of_stock(buffer.sample(4))  # and is left amid an epoch
        buffer.empty()


def test_a_buffer_can_be_copied_deeply():
    buffer = RolloutBuffer(2, 3)
    buffer.extend(torch.stack(Plan(2, 3).rows(), 1))
    twin = copy.deepcopy(buffer)
    assert len(twin) == len(buffer)
    for mine, theirs in zip(twin.window.values(True, True), buffer.window.values(True, True), strict=True):
        assert torch.equal(mine, theirs)
    buffer.empty()
    assert twin.is_full


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda buffer: pickle.loads(pickle.dumps(buffer))])
@pytest.mark.parametrize("sampler", [MiniBatchSampler(2), TrajectorySampler(2), TimeStepSampler()])
@pytest.mark.parametrize("before", [0, 2, 4, 6])
def test_a_copy_is_written_and_read_by_itself(copied, sampler, before):
    buffer = RolloutBuffer(4, 3, sampler=copy.deepcopy(sampler), generator=torch.Generator().manual_seed(0))
    rows = [*PLAN.rows(), *PLAN.rows(window=1)]

    def write(into, some):
        for row in some:
            if into.is_full:
                list(into)
                into.empty()
            into.add(row)

    write(buffer, rows[:before])
    twin = copied(buffer)
    for each in (buffer, twin):
        write(each, rows[before:])
        check_window(each, PLAN, 1)
        check_final_observations(each, PLAN, 1)
    for mine, theirs in zip(buffer, twin, strict=True):
        assert same_everywhere(mine, theirs)


def same_everywhere(mine: TensorDictBase, theirs: TensorDictBase) -> bool:
    a, b = tensors(mine), tensors(theirs)
    return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)


def test_a_copy_keeps_the_same_final_observations_and_states():
    buffer = RolloutBuffer(4, 3, state_keys=["hidden"])
    buffer.storage.keep_final_observations("done")
    twin = copy.deepcopy(buffer)
    for each in (buffer, twin):
        for row in PLAN.rows():
            each.add(row.set("hidden", torch.zeros(3, 1, 2)))
    assert len(twin.final_observations.t) == len(buffer.final_observations.t) == 6
    assert twin.storage.state_keys == ["hidden"]


def test_a_window_is_not_sent_to_another_process_where_it_would_be_a_copy():
    multiprocessing.context.set_spawning_popen(object())
    try:
        with pytest.raises(RuntimeError, match="cannot be shared between processes"):
            pickle.dumps(filled(PLAN).storage)
    finally:
        multiprocessing.context.set_spawning_popen(None)


def test_a_half_written_row_cannot_be_copied():
    buffer = RolloutBuffer(2, 3)
    buffer.writer.write_root(Plan(2, 3).rows()[0])
    with pytest.raises(RuntimeError, match="Row 0 is half written: close it before the buffer is saved or"):
        copy.deepcopy(buffer)


@pytest.mark.parametrize("data", [{"a": torch.ones(3)}, torch.ones(3), None])
def test_what_is_not_a_tensordict_is_refused_by_name(data):
    for write in (RolloutBuffer(2, 3).add, RolloutBuffer(2, 3).extend):
        with pytest.raises(TypeError, match=f"TensorDicts, got {type(data).__name__}"):
            write(data)
