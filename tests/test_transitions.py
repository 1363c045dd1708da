"""Pairs of states: the next one is what the environment showed, and never another episode's."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from oracles import Plan, filled, plans
from tensordict import TensorDict
from tiny import Simulator

from torchrl_rslstorage import (
    ActorCritic,
    MLPActor,
    MLPCritic,
    RolloutBuffer,
    RolloutCollector,
    transition_pairs,
)

KEYS = ["observation", ("sensors", "height")]


def keeping_all_ends(plan: Plan, rows: list[TensorDict] | None = None) -> RolloutBuffer:
    buffer = RolloutBuffer(plan.num_steps, plan.num_envs)
    buffer.storage.keep_final_observations("done")
    for row in plan.rows() if rows is None else rows:
        buffer.add(row)
    return buffer


def expected_next(plan: Plan, t: int, n: int) -> torch.Tensor:
    """What the plan's environment showed: (t, n, window, 1) at an end, the next row otherwise."""
    ended = (t, n) in plan.terminated | plan.truncated or t == plan.num_steps - 1
    return torch.tensor([t, n, 0, 1] if ended else [t + 1, n, 0, 0]).float()


@given(plan=plans())
def test_every_pair_is_a_state_and_what_the_environment_showed_after_it(plan):
    pairs = transition_pairs(keeping_all_ends(plan), KEYS)
    assert bool(pairs["valid"].all())
    for t in range(plan.num_steps):
        for n in range(plan.num_envs):
            cell = pairs[t, n]
            assert torch.equal(cell["observation"], torch.tensor([t, n, 0, 0]).float())
            assert torch.equal(cell["next", "observation"], expected_next(plan, t, n))
            assert torch.equal(cell["next", "sensors", "height"], expected_next(plan, t, n)[:2].half())


@given(plan=plans())
def test_a_terminated_step_is_not_whole_where_its_final_observation_was_not_kept(plan):
    pairs = transition_pairs(filled(plan), ["observation"])
    for t in range(plan.num_steps):
        for n in range(plan.num_envs):
            terminated_alone = (t, n) in plan.terminated and (t, n) not in plan.truncated
            whole = not terminated_alone or t == plan.num_steps - 1
            assert bool(pairs["valid"][t, n]) is whole
            if whole:
                assert torch.equal(pairs["next", "observation"][t, n], expected_next(plan, t, n))


@given(plan=plans())
def test_an_environment_that_gives_no_next_observation_leaves_ends_and_the_last_row_out(plan):
    rows = [row.exclude(("next", "observation")) for row in plan.rows()]
    valid = transition_pairs(keeping_all_ends(plan, rows), ["observation"])["valid"]
    ends = plan.terminated | plan.truncated
    for t in range(plan.num_steps):
        for n in range(plan.num_envs):
            assert bool(valid[t, n]) is (t < plan.num_steps - 1 and (t, n) not in ends)


def test_nan_stands_for_no_final_observation():
    plan = Plan(3, 2, terminated=frozenset({(1, 0)}), truncated=frozenset({(0, 1)}))
    rows = plan.rows()
    rows[1]["next", "observation"][0] = torch.nan
    rows[2]["next", "observation"][1, 2] = torch.nan
    valid = transition_pairs(keeping_all_ends(plan, rows), ["observation"])["valid"]
    assert valid.tolist() == [[True, True], [False, True], [True, False]]


def test_an_episode_restarted_from_outside_is_not_bridged():
    plan = Plan(3, 2)
    rows = plan.rows()
    rows[2]["is_init"][1] = True
    valid = transition_pairs(keeping_all_ends(plan, rows), ["observation"])["valid"]
    assert valid.tolist() == [[True, True], [True, False], [True, True]]


@pytest.mark.parametrize("in_place", [False, True])
def test_pairs_of_a_collected_window_are_consecutive_steps_of_one_episode(in_place):
    env = Simulator([3, 2, 5, 1], in_place=in_place)
    policy = ActorCritic(MLPActor.for_env(env), MLPCritic.for_env(env))
    buffer = RolloutBuffer(7, 4)
    buffer.storage.keep_final_observations("done")
    RolloutCollector(env, policy, replay_buffer=buffer).rollout()
    pairs = transition_pairs(buffer, ["observation"])
    assert bool(pairs["valid"].all())
    before, after = pairs["observation"], pairs["next", "observation"]
    # (step, environment, episode, sum of the last action)
    assert torch.equal(after[..., 0], before[..., 0] + 1)
    assert torch.equal(after[..., 1:3], before[..., 1:3])
    torch.testing.assert_close(after[..., 3], buffer.window["action"].sum(-1))


def test_pairs_are_not_views_of_the_next_window():
    plan = Plan(3, 2, terminated=frozenset({(1, 0)}))
    buffer = keeping_all_ends(plan)
    pairs = transition_pairs(buffer, ["observation"])
    after = pairs["next", "observation"].clone()
    buffer.empty()
    for row in plan.rows(window=1):
        buffer.add(row)
    assert torch.equal(pairs["next", "observation"], after)


def test_final_observations_of_terminated_steps_change_no_advantage():
    from torchrl_rslstorage import RolloutGAE

    plan = Plan(4, 3, terminated=frozenset({(0, 1), (3, 0)}), truncated=frozenset({(1, 0), (1, 2)}))
    critic = MLPCritic(["observation"], 4)
    windows = [RolloutGAE(0.99, 0.95, critic)(b) for b in (filled(plan), keeping_all_ends(plan))]
    for key in ("advantage", "value_target"):
        torch.testing.assert_close(windows[0][key], windows[1][key])


def test_what_is_kept_cannot_change_once_rows_are_written():
    buffer = filled(Plan(2, 2))
    with pytest.raises(RuntimeError, match="before the first one"):
        buffer.storage.keep_final_observations("done")
    with pytest.raises(ValueError, match="must be one of"):
        buffer.storage.keep_final_observations("terminated")  # pyright: ignore[reportArgumentType]


def test_pairs_are_refused_with_a_reason():
    buffer = filled(Plan(2, 2))
    with pytest.raises(KeyError, match=r"no entry 'amp' in this window. It holds 'observation'"):
        transition_pairs(buffer, ["amp"])
    with pytest.raises(KeyError, match=r"no entry \('next', 'reward'\) in this window"):
        transition_pairs(buffer, [("next", "reward")])
    with pytest.raises(ValueError, match="at least one entry"):
        transition_pairs(buffer, [])
    buffer.empty()
    with pytest.raises(RuntimeError, match="0 of 2 rows"):
        transition_pairs(buffer, ["observation"])


def test_one_key_may_be_named_by_itself():
    buffer = filled(Plan(2, 2))
    alone, listed = (transition_pairs(buffer, keys) for keys in ("observation", ["observation"]))
    assert torch.equal(alone["next", "observation"], listed["next", "observation"])
