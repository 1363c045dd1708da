"""TrajectorySampler: every environment once per epoch, in padded batches that know their cells."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rsl_rl.storage import RolloutStorage
from tensordict import TensorDict, TensorDictBase
from torch import Tensor
from torchrl.data import LazyTensorStorage, ReplayBuffer

from torchrl_rslstorage import RolloutBuffer, TrajectorySampler


def window_of(done: Tensor, *, states: bool = True) -> TensorDict:
    """``[T, N]`` whose every cell knows its t·N + n, counted from 1; the state is the negative of that."""
    steps, envs = done.shape
    cell = torch.arange(1.0, steps * envs + 1).view(steps, envs, 1)
    flags = {"reward": cell.clone(), "done": done.unsqueeze(-1)}
    row = {"observation": cell.expand(steps, envs, 3).clone(), "cell": cell.squeeze(-1).clone()}
    if states:
        row["memory"] = {"h": -cell.view(steps, envs, 1, 1).expand(steps, envs, 2, 4).clone()}
        flags["memory"] = {"h": torch.zeros(steps, envs, 2, 4)}
    return TensorDict({**row, "next": flags}, [steps, envs])


def buffer_of(done: Tensor, sampler: TrajectorySampler, *, states: bool = True, **options) -> RolloutBuffer:
    buffer = RolloutBuffer(*done.shape, sampler=sampler, **options)
    buffer.extend(window_of(done, states=states), time_dim=0)
    return buffer


def random_done(steps: int, envs: int, rate: float, seed: int = 0) -> Tensor:
    return torch.rand(steps, envs, generator=torch.Generator().manual_seed(seed)) < rate


def cells_of(batch: TensorDictBase) -> list[int]:
    return sorted(batch["cell"][batch["mask"]].int().tolist())


@given(
    st.integers(1, 6),
    st.integers(1, 7),
    st.data(),
    st.sampled_from([0.0, 0.3, 1.0]),
    st.booleans(),
    st.integers(0, 2**31 - 1),
)
def test_every_environment_is_seen_exactly_once_per_epoch(steps, envs, data, rate, reshuffle, seed):
    parts = data.draw(st.integers(1, envs))
    buffer = buffer_of(random_done(steps, envs, rate, seed), TrajectorySampler(parts, 2, reshuffle=reshuffle))
    batches = iter(buffer)
    for _ in range(2):
        seen: list[int] = []
        sizes = []
        for _ in range(parts):
            batch = next(batches)
            cells = cells_of(batch)
            who = {(cell - 1) % envs for cell in cells}
            assert len(cells) == steps * len(who), "an environment comes with all of its steps"
            assert batch["cell"][~batch["mask"]].eq(0).all()
            seen += cells
            sizes.append(len(who))
        assert sorted(seen) == list(range(1, steps * envs + 1))
        assert max(sizes) - min(sizes) <= 1
    assert next(batches, None) is None


@pytest.mark.parametrize(("envs", "parts"), [(5, 2), (2, 2), (1, 1)])
def test_sizes_that_rsl_rl_gets_wrong(envs: int, parts: int):
    buffer = buffer_of(random_done(4, envs, 0.3), TrajectorySampler(parts))
    assert sorted(cell for batch in buffer for cell in cells_of(batch)) == list(range(1, 4 * envs + 1))


def rsl_rl_batches(done: Tensor, parts: int) -> Iterator[RolloutStorage.Batch]:
    """RSL-RL's own generator over the same window and states."""
    steps, envs = done.shape
    window = window_of(done)
    storage = RolloutStorage("rl", envs, steps, window[0].select("observation"), [1], "cpu")
    for t in range(steps):
        transition = RolloutStorage.Transition()
        transition.observations = window[t].select("observation")
        transition.actions = transition.values = torch.zeros(envs, 1)
        transition.rewards = transition.actions_log_prob = torch.zeros(envs)
        transition.dones = done[t]
        transition.distribution_params = (torch.zeros(envs, 1),)
        state = window["memory", "h"][t].transpose(0, 1)
        transition.hidden_states = (state, state)
        storage.add_transition(transition)
    return storage.recurrent_mini_batch_generator(parts, 1)


@given(st.integers(2, 6), st.sampled_from([(4, 2), (6, 3), (2, 1), (4, 4)]), st.integers(0, 2**31 - 1))
def test_trajectories_masks_and_starting_states_are_rsl_rls(steps, sizes, seed):
    envs, parts = sizes
    done = random_done(steps, envs, 0.4, seed)
    ours = iter(buffer_of(done, TrajectorySampler(parts)))
    for theirs in rsl_rl_batches(done, parts):
        batch = next(ours)
        longest = batch.shape[0]
        assert torch.equal(batch["observation"], theirs.observations["observation"][:longest])
        assert torch.equal(batch["mask"], theirs.masks[:longest])
        assert not theirs.masks[longest:].any()
        state = theirs.hidden_states[0]  # [layers, B, H]
        assert torch.equal(batch["memory", "h"][0], state.transpose(0, 1))


@given(st.integers(1, 6), st.integers(1, 5), st.sampled_from([0.0, 0.4, 1.0]), st.integers(0, 2**31 - 1))
def test_states_kept_for_starts_alone_are_those_of_all_steps(steps, envs, rate, seed):
    done = random_done(steps, envs, rate, seed)
    dense = buffer_of(done, TrajectorySampler(1))
    sparse = buffer_of(done, TrajectorySampler(1), state_keys=["memory"])
    assert ("memory", "h") not in sparse.window.keys(True)
    for a, b in zip(dense, sparse, strict=True):
        assert torch.equal(a["memory", "h"][0], b["memory", "h"][0])
        assert b["memory", "h"].shape == (*b.shape, 2, 4)
        assert torch.equal(a["cell"], b["cell"])
    t, n, final = dense.final_observations
    their_t, their_n, their_final = sparse.final_observations
    assert torch.equal(t, their_t)
    assert torch.equal(n, their_n)
    assert (final == their_final).all()


def test_a_mini_batch_cannot_be_written_to_and_is_the_same_object_in_each_epoch():
    buffer = buffer_of(random_done(4, 5, 0.3), TrajectorySampler(2, 3))
    batches = list(buffer)
    assert batches[0] is batches[2] is batches[4]
    assert batches[1] is batches[3]
    with pytest.raises(RuntimeError, match="locked"):
        batches[0]["cell"] = torch.zeros(batches[0].shape)


@pytest.mark.parametrize(("before", "after"), [(0.6, 0.1), (0.1, 0.6)])
def test_the_next_window_leaves_nothing_of_the_one_before(before: float, after: float):
    sampler = TrajectorySampler(2)
    buffer = buffer_of(random_done(6, 4, before), sampler)
    list(buffer)
    buffer.empty()
    buffer.extend(window_of(random_done(6, 4, after, seed=1)), time_dim=0)
    for batch in buffer:
        assert torch.equal(batch["cell"].ne(0), batch["mask"])
        assert torch.equal(batch["memory", "h"][0, :, 0, 0], -batch["cell"][0])


def test_is_init_stands_where_an_episode_starts():
    done = torch.tensor([[False, True], [False, False], [False, False]])
    batch = next(iter(buffer_of(done, TrajectorySampler(1))))
    assert batch["is_init"].squeeze(-1).tolist() == [[False, False, True], [False] * 3, [False] * 3]
    window = window_of(done)
    window["is_init"] = torch.tensor([[True, False], [False, True], [False, False]]).unsqueeze(-1)
    buffer = RolloutBuffer(3, 2, sampler=TrajectorySampler(1))
    buffer.extend(window, time_dim=0)
    assert next(iter(buffer))["is_init"][0].view(-1).tolist() == [True, False, True]


def test_only_the_keys_asked_for_are_padded():
    batch = next(iter(buffer_of(random_done(4, 5, 0.3), TrajectorySampler(2, keys=["cell", "memory"]))))
    assert set(batch.keys(True, True)) == {"cell", ("memory", "h"), "mask", "is_init"}
    with pytest.raises(KeyError, match="There is no key 'cello'"):
        next(iter(buffer_of(random_done(4, 5, 0.3), TrajectorySampler(2, keys=["cello"]))))


def test_reshuffling_deals_other_environments_and_obeys_the_generator():
    done = random_done(3, 8, 0.3)

    def groups(seed: int) -> list[list[int]]:
        buffer = buffer_of(done, TrajectorySampler(2, 2, reshuffle=True))
        buffer.set_rng(torch.Generator().manual_seed(seed))
        return [sorted({(cell - 1) % 8 for cell in cells_of(batch)}) for batch in buffer]

    assert groups(0) == groups(0)
    assert groups(0) != groups(1)
    first = groups(0)
    assert first[:2] != first[2:]


def test_an_update_that_was_saved_goes_on():
    done = random_done(4, 6, 0.3)
    buffer = buffer_of(done, TrajectorySampler(3, 2, reshuffle=True), state_keys=["memory"])
    buffer.set_rng(torch.Generator().manual_seed(3))
    batches = [buffer.sample() for _ in range(2)]
    assert len(batches) == 2
    state = buffer.state_dict()
    rest = [buffer.sample().clone() for _ in range(4)]
    again = RolloutBuffer(4, 6, sampler=TrajectorySampler(3, 2, reshuffle=True), state_keys=["memory"])
    again.load_state_dict(state)
    for theirs in rest:
        ours = again.sample()
        assert torch.equal(ours["cell"], theirs["cell"])
        assert torch.equal(ours["memory", "h"], theirs["memory", "h"])


def test_more_mini_batches_than_environments_are_refused():
    with pytest.raises(ValueError, match="3 mini-batches cannot be cut from 2 environments"):
        next(iter(buffer_of(random_done(4, 2, 0.3), TrajectorySampler(3))))


def test_a_stock_buffer_is_refused():
    stock = ReplayBuffer(storage=LazyTensorStorage(10, ndim=2), sampler=TrajectorySampler(1), batch_size=2)
    stock.extend(TensorDict({"observation": torch.zeros(5, 2)}, [5, 2]))
    with pytest.raises(TypeError, match="takes a RolloutBuffer"):
        stock.sample()


@pytest.mark.parametrize("options", [{"num_mini_batches": 0}, {"num_epochs": 0}, {"keys": []}, {"keys": "a"}])
def test_options_that_make_no_sense_are_refused(options):
    with pytest.raises(ValueError, match="must be"):
        TrajectorySampler(**options)


def test_state_keys_must_be_there():
    buffer = RolloutBuffer(3, 2, state_keys=["memories"])
    with pytest.raises(KeyError, match="There is no key 'memories'"):
        buffer.extend(window_of(random_done(3, 2, 0.3)), time_dim=0)
