"""RolloutGAE against the definition, RSL-RL, TorchRL, and the limits of its own two parameters."""

from __future__ import annotations

import math
import re
import warnings

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from oracles_objectives import (
    DISCOUNTS,
    Problem,
    Sizes,
    advantages_by_definition,
    copies_of,
    default_dtype,
    in_buffer,
    make_critic,
    make_rollout,
    returns_by_definition,
    rsl_rl_ppo,
    rsl_rl_rollout,
    sizes,
    with_values,
)
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch.utils._python_dispatch import TorchDispatchMode
from torchrl.objectives.value import GAE

from torchrl_rslstorage import RolloutBuffer, RolloutGAE, normalize_advantage

CRITIC = make_critic()
NAN, INF = math.nan, math.inf
EXACT = st.integers(0, 32).map(lambda k: k / 32)
"""Discounts that float32 holds exactly, which RSL-RL and TorchRL's GAE round them to."""

LONG = Sizes(12, 5)
"""A window in which every kind of step occurs."""


def close(a: torch.Tensor, b: torch.Tensor) -> bool:
    assert a.dtype == b.dtype == torch.float64
    return torch.allclose(a, b, rtol=1e-10, atol=1e-12)


def values(rollout: TensorDict) -> tuple[torch.Tensor, torch.Tensor]:
    """V(s_t) and V(s'_t)."""
    with torch.no_grad():
        return CRITIC.evaluate(rollout), CRITIC.evaluate(rollout["next"])


# -- the definition ----------------------------------------------------------------------------


@given(plan=sizes(), gamma=DISCOUNTS, lmbda=DISCOUNTS)
def test_a_buffers_advantages_are_the_discounted_sums_of_its_deltas(plan, gamma, lmbda):
    rollout = with_values(make_rollout(plan), CRITIC)
    value, next_value = values(rollout)
    window = RolloutGAE(gamma, lmbda, CRITIC)(in_buffer(rollout))
    expected = advantages_by_definition(rollout, value, next_value, gamma=gamma, lmbda=lmbda)
    assert close(window["advantage"], expected)
    assert close(window["value_target"], expected + value)


@given(plan=sizes(), gamma=DISCOUNTS, lmbda=DISCOUNTS, env_major=st.booleans(), stored=st.booleans())
def test_a_tensordicts_advantages_are_the_discounted_sums_of_its_deltas(
    plan, gamma, lmbda, env_major, stored
):
    rollout = make_rollout(plan)
    value, next_value = values(rollout)
    expected = advantages_by_definition(rollout, value, next_value, gamma=gamma, lmbda=lmbda)
    if stored:
        rollout["state_value"], rollout["next", "state_value"] = value, next_value
    gae = RolloutGAE(gamma, lmbda, None if stored else CRITIC)
    if env_major:
        td = rollout.transpose(0, 1).contiguous()
        td.names = [None, "time"]
        out = gae(td)
        assert out is td
        out = out.transpose(0, 1)
    else:
        out = gae(rollout, time_dim=0)
        assert out is rollout
    assert close(out["advantage"], expected)
    assert close(out["value_target"], expected + value)


@given(plan=sizes(), rule=st.sampled_from(["final_observation", "rsl_rl"]))
def test_a_buffer_and_a_tensordict_of_the_same_rollout_get_the_same_advantages(plan, rule):
    rollout = with_values(make_rollout(plan), CRITIC)
    gae = RolloutGAE(0.9, 0.8, CRITIC, time_out=rule, normalize=True)
    assert close(gae(in_buffer(rollout))["advantage"], gae(rollout, time_dim=0)["advantage"])


@pytest.mark.parametrize("given_flags", [["done"], ["done", "terminated"], ["done", "truncated"]])
def test_a_missing_flag_is_done_without_the_other(given_flags):
    rollout = make_rollout(Sizes(8, 4, p_terminated=0.3, p_truncated=0.3))
    flags = rollout["next"]
    flags["terminated"] &= ~flags["truncated"]  # both at once could not be told from one flag
    full = rollout.clone()
    if given_flags == ["done"]:  # an episode that is just over has terminated
        full["next", "terminated"], full["next", "truncated"] = flags["done"], flags["done"] & False
    thin = rollout.exclude(
        *(("next", name) for name in ("terminated", "truncated") if name not in given_flags)
    )
    gae = RolloutGAE(0.9, 0.8, CRITIC)
    assert close(gae(thin, time_dim=0)["advantage"], gae(full, time_dim=0)["advantage"])


@given(plan=sizes())
def test_a_step_that_terminates_and_is_truncated_at_once_is_not_bootstrapped(plan):
    rollout = with_values(make_rollout(plan), CRITIC)
    flags = rollout["next"]
    flags["done"] = flags["terminated"] = flags["truncated"] = torch.ones_like(flags["done"])
    advantage = RolloutGAE(0.9, 0.8, CRITIC)(in_buffer(rollout))["advantage"]
    assert close(advantage, rollout["next", "reward"] - rollout["state_value"])


# -- identities --------------------------------------------------------------------------------


@given(plan=sizes(), gamma=DISCOUNTS)
def test_at_lambda_one_the_value_target_is_the_monte_carlo_return(plan, gamma):
    rollout = with_values(make_rollout(plan), CRITIC)
    expected = returns_by_definition(rollout, values(rollout)[1], gamma=gamma)
    assert close(RolloutGAE(gamma, 1.0, CRITIC)(in_buffer(rollout))["value_target"], expected)


@given(plan=sizes(), gamma=DISCOUNTS)
def test_at_lambda_zero_the_advantage_is_the_td_error(plan, gamma):
    rollout = with_values(make_rollout(plan), CRITIC)
    value, next_value = values(rollout)
    bootstrap = torch.where(rollout["next", "terminated"], 0.0, next_value)
    expected = rollout["next", "reward"] + gamma * bootstrap - value
    assert close(RolloutGAE(gamma, 0.0, CRITIC)(in_buffer(rollout))["advantage"], expected)


@given(plan=sizes(), gamma=EXACT, lmbda=EXACT)
def test_torchrls_gae_gives_the_same_advantages(plan, gamma, lmbda):
    rollout = make_rollout(plan)
    theirs = rollout.transpose(0, 1).contiguous()
    theirs.names = [None, "time"]
    GAE(gamma=gamma, lmbda=lmbda, value_network=CRITIC, deactivate_vmap=True, vectorized=False)(theirs)
    ours = RolloutGAE(gamma, lmbda, CRITIC)(in_buffer(with_values(rollout, CRITIC)))
    assert close(ours["advantage"], theirs["advantage"].transpose(0, 1))
    assert close(ours["value_target"], theirs["value_target"].transpose(0, 1))


# -- RSL-RL ------------------------------------------------------------------------------------


@given(
    shape=st.tuples(st.integers(1, 7), st.integers(1, 4)),
    p_done=st.sampled_from([0.0, 0.3, 1.0]),
    gamma=EXACT,
    lmbda=EXACT,
    normalize=st.booleans(),
)
def test_under_rsl_rls_rule_advantages_and_targets_are_those_of_its_compute_returns(
    shape, p_done, gamma, lmbda, normalize
):
    normalize = normalize and shape != (1, 1)  # where RSL-RL's is NaN
    problem = Problem(*shape)
    with default_dtype(torch.float64):
        ppo = rsl_rl_ppo(problem, gamma=gamma, lam=lmbda, normalize_advantage_per_mini_batch=not normalize)
        _, critic = copies_of(ppo, problem)
        rollout = rsl_rl_rollout(ppo, problem, p_done)
    gae = RolloutGAE(gamma, lmbda, critic, time_out="rsl_rl", normalize=normalize)
    for window in (gae(in_buffer(rollout)), gae(rollout.exclude("state_value"), time_dim=0)):
        # RSL-RL computes A as (A + V) - V, and divides by a std that may be small.
        assert torch.allclose(window["advantage"], ppo.storage.advantages, rtol=1e-9, atol=1e-9)
        assert torch.allclose(window["value_target"], ppo.storage.returns, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("discounts", [(0.99, 0.95), (0.9, 0.8)])
def test_in_float32_advantages_and_targets_are_rsl_rls_to_the_last_bit(seed, discounts):
    torch.manual_seed(seed)
    ppo = rsl_rl_ppo(Problem(9, 4), gamma=discounts[0], lam=discounts[1])
    rollout = rsl_rl_rollout(ppo, Problem(9, 4))
    # A batch of another size may round its values otherwise: only RSL-RL evaluates here.
    after = rollout["next"]
    after["state_value"] = torch.zeros(9, 4, 1)
    after["state_value"][-1] = ppo.critic(after[-1]).detach()
    window = RolloutGAE(*discounts, time_out="rsl_rl", normalize=True)(rollout, time_dim=0)
    assert torch.equal(window["value_target"], ppo.storage.returns)
    assert torch.equal(window["advantage"], ppo.storage.advantages)


def test_rsl_rls_rule_does_not_read_final_observations_of_truncated_steps():
    rollout = with_values(make_rollout(LONG), CRITIC)
    gae = RolloutGAE(0.9, 0.8, CRITIC, time_out="rsl_rl")
    expected = gae(in_buffer(rollout))["advantage"].clone()
    done = rollout["next", "done"]
    rollout["next", "observation"] = torch.where(done, INF, rollout["next", "observation"])
    assert close(gae(in_buffer(rollout))["advantage"], expected)
    assert close(gae(rollout, time_dim=0)["advantage"], expected)


# -- normalisation -----------------------------------------------------------------------------


@given(plan=sizes())
def test_normalised_advantages_have_mean_zero_and_unbiased_std_one_over_the_whole_window(plan):
    rollout = with_values(make_rollout(plan), CRITIC)
    raw = RolloutGAE(0.9, 0.8, CRITIC)(in_buffer(rollout))
    out = RolloutGAE(0.9, 0.8, CRITIC, normalize=True)(in_buffer(rollout))
    assert close(out["value_target"], raw["value_target"]), "targets are those of the raw advantages"
    advantage = raw["advantage"].flatten().tolist()
    if len(advantage) == 1:
        assert out["advantage"].item() == 0.0
        return
    mean = math.fsum(advantage) / len(advantage)
    std = math.sqrt(math.fsum((a - mean) ** 2 for a in advantage) / (len(advantage) - 1))
    expected = torch.tensor([(a - mean) / (std + 1e-8) for a in advantage], dtype=torch.float64)
    assert torch.allclose(out["advantage"].flatten(), expected, rtol=1e-8, atol=1e-10)


def test_normalising_a_constant_or_a_single_advantage_gives_zeros_and_out_may_be_its_input():
    assert torch.equal(normalize_advantage(torch.full((4, 1), 3.0)), torch.zeros(4, 1))
    one = torch.tensor([7.0])
    assert torch.equal(normalize_advantage(one), torch.zeros(1))
    assert one.item() == 7.0
    for x in (torch.tensor([7.0]), torch.tensor([1.0, 2.0, 6.0])):
        expected = normalize_advantage(x)
        assert normalize_advantage(x, out=x) is x
        assert torch.equal(x, expected)


# -- values that the rollout lacks -------------------------------------------------------------


def test_values_that_the_policy_did_not_write_are_filled_in_by_one_pass_over_the_window():
    rollout = make_rollout(LONG)
    sizes_seen = []
    critic = make_critic()
    critic.register_forward_pre_hook(lambda _, args: sizes_seen.append(args[0].numel()))
    buffer = in_buffer(rollout)
    window = RolloutGAE(0.9, 0.8, critic)(buffer)
    assert sizes_seen == [rollout.numel(), len(buffer.final_observations.t)]
    assert close(window["state_value"], values(rollout)[0])
    expected = RolloutGAE(0.9, 0.8, critic)(in_buffer(with_values(rollout, critic)))
    assert close(window["advantage"], expected["advantage"])
    (batch,) = buffer
    assert {"state_value", "advantage", "value_target"} <= set(batch.keys())

    buffer.empty()
    rollout = make_rollout(LONG._replace(seed=1))
    buffer.extend(rollout, time_dim=0)
    again = RolloutGAE(0.9, 0.8, critic)(buffer)["state_value"]
    assert close(again, values(rollout)[0]), "the next window's values are its own"


def test_a_rollout_with_values_is_read_by_the_critic_at_final_observations_only():
    rollout = with_values(make_rollout(LONG), CRITIC)
    sizes_seen = []
    critic = make_critic()
    critic.register_forward_pre_hook(lambda _, args: sizes_seen.append(args[0].numel()))
    buffer = in_buffer(rollout)
    RolloutGAE(0.9, 0.8, critic)(buffer)
    assert sizes_seen == [len(buffer.final_observations.t)]


def test_the_critic_may_read_other_observations_than_the_actor():
    critic = make_critic(("observation", "privileged"), 5)
    rollout = with_values(make_rollout(LONG), critic)
    with torch.no_grad():
        next_value = critic.evaluate(rollout["next"])
    expected = advantages_by_definition(rollout, rollout["state_value"], next_value, gamma=0.9, lmbda=0.8)
    assert close(RolloutGAE(0.9, 0.8, critic)(in_buffer(rollout))["advantage"], expected)


def test_every_key_can_be_another_and_a_nested_one():
    rollout = with_values(make_rollout(LONG), CRITIC)
    expected = RolloutGAE(0.9, 0.8, CRITIC)(rollout.clone(), time_dim=0)
    renamed = rollout.clone()
    renamed["next", "state_value"] = values(rollout)[1]
    names = {"state_value": ("v", "old"), "reward": ("r", "all"), "done": "over"}
    names |= {"terminated": ("end", "hard"), "truncated": ("end", "soft")}
    for old, new in names.items():
        renamed.get("next").rename_key_(old, new)
    renamed.rename_key_("state_value", ("v", "old"))
    gae = RolloutGAE(
        0.9,
        0.8,
        value_key=("v", "old"),
        reward_key=("r", "all"),
        done_key="over",
        terminated_key=("end", "hard"),
        truncated_key=("end", "soft"),
        advantage_key=("gae", "advantage"),
        value_target_key=("gae", "target"),
    )
    out = gae(renamed, time_dim=0)
    assert close(out["gae", "advantage"], expected["advantage"])
    assert close(out["gae", "target"], expected["value_target"])

    gae = RolloutGAE(0.9, 0.8, CRITIC, advantage_key=("gae", "advantage"), value_target_key=("gae", "target"))
    buffer = in_buffer(rollout)
    assert close(gae(buffer)["gae", "advantage"], expected["advantage"])
    (batch,) = buffer
    assert batch["gae", "target"].shape == (60, 1)


# -- environments that give no final observation -----------------------------------------------


@given(plan=sizes(), as_buffer=st.booleans())
def test_where_a_truncated_step_has_no_final_observation_its_own_value_stands_in(plan, as_buffer):
    rollout = with_values(make_rollout(plan), CRITIC)
    value, next_value = values(rollout)
    truncated = rollout["next", "truncated"]
    # Half of them are there: the fallback is for single cells.
    missing = truncated & (torch.arange(plan.num_envs).view(1, -1, 1) % 2 == 0)
    rollout["next", "observation"] = torch.where(missing, NAN, rollout["next", "observation"])
    expected = advantages_by_definition(
        rollout, value, torch.where(missing, value, next_value), gamma=0.9, lmbda=0.8
    )
    gae = RolloutGAE(0.9, 0.8, CRITIC)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(2):
            out = gae(in_buffer(rollout)) if as_buffer else gae(rollout.copy(), time_dim=0)
            assert close(out["advantage"], expected)
    count = int((missing & ~rollout["next", "terminated"]).sum())
    assert [str(warning.message).split(" of this")[0] for warning in said] == (
        [f"{count} truncated step(s)"] if count else []
    ), "said once, with the number of cells, and only where it changes anything"


def test_a_final_observation_that_only_the_actor_reads_may_be_missing():
    critic = make_critic(("privileged",), 2)
    rollout = with_values(make_rollout(LONG), critic)
    expected = RolloutGAE(0.9, 0.8, critic)(in_buffer(rollout))["advantage"].clone()
    rollout["next", "observation"][rollout["next", "truncated"].squeeze(-1)] = NAN
    assert close(RolloutGAE(0.9, 0.8, critic)(in_buffer(rollout))["advantage"], expected)


@pytest.mark.filterwarnings("error")
def test_rsl_rls_rule_by_name_is_not_announced():
    rollout = with_values(make_rollout(LONG), CRITIC)
    rollout["next", "observation"][rollout["next", "truncated"].squeeze(-1)] = NAN
    RolloutGAE(0.9, 0.8, CRITIC, time_out="rsl_rl")(in_buffer(rollout))


# -- NaN and inf -------------------------------------------------------------------------------

QUIET = Sizes(5, 3, p_terminated=0.0, p_truncated=0.0)
"""A window of unfinished episodes."""


def faulty(key, t: int, n: int, bad: float) -> TensorDict:
    """A rollout whose environment ``n`` gave ``bad`` at step ``t``, and what the networks made of it."""
    rollout = make_rollout(QUIET)
    rollout[key][t, n, -1] = bad
    critic = make_critic(("observation", "privileged"), 5)
    rollout = with_values(rollout, critic)
    return rollout.set("action_log_prob", -rollout["observation"].square().sum(-1))


WHERE = [
    (("next", "reward"), 3),
    ("observation", 2),
    ("privileged", 4),
    (("next", "observation"), 4),
    (("next", "privileged"), 4),
]


@pytest.mark.parametrize("as_buffer", [True, False])
@pytest.mark.parametrize(("key", "t"), WHERE)
def test_nan_is_refused_without_being_asked_for(key, t, as_buffer):
    rollout = faulty(key, t, 1, NAN)
    gae = RolloutGAE(0.9, 0.8, make_critic(("observation", "privileged"), 5))
    name = f"'{key}'" if isinstance(key, str) else repr(key)
    with pytest.raises(
        ValueError, match=re.escape(f"{name} is nan at step {t} of environment 1 (1 of 15 cells")
    ):
        gae(in_buffer(rollout)) if as_buffer else gae(rollout, time_dim=0)


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
@pytest.mark.parametrize("as_buffer", [True, False])
@pytest.mark.parametrize(("key", "t"), WHERE)
def test_nan_and_inf_are_refused_by_key_step_and_environment(key, t, bad, as_buffer):
    rollout = faulty(key, t, 1, bad)
    gae = RolloutGAE(0.9, 0.8, make_critic(("observation", "privileged"), 5), check_observations=True)
    with pytest.raises(ValueError, match="are not finite") as error:
        gae(in_buffer(rollout)) if as_buffer else gae(rollout, time_dim=0)
    name = f"'{key}'" if isinstance(key, str) else repr(key)
    assert str(error.value).startswith(f"{name} is {bad} at step {t} of environment 1 (1 of 15 cells")


def test_a_nan_that_only_the_policy_read_shows_in_its_log_probability():
    rollout = faulty("observation", 1, 2, NAN)
    critic = make_critic(("privileged",), 2)
    rollout["state_value"] = critic.evaluate(rollout).detach()
    with pytest.raises(ValueError, match=r"^'observation' is nan at step 1 of environment 2"):
        RolloutGAE(0.9, 0.8, critic)(in_buffer(rollout))


def test_the_first_of_several_faults_is_named_and_all_cells_are_counted():
    rollout = faulty("observation", 3, 0, NAN)
    rollout["next", "reward"][2, 1] = INF
    rollout["privileged"][2, 2] = NAN
    rollout["next", "observation"][4, 1] = NAN
    with pytest.raises(ValueError, match=r"^'privileged' is nan at step 2 of environment 2 \(4 of 15 cells"):
        RolloutGAE(0.9, 0.8, make_critic(("observation", "privileged"), 5))(in_buffer(rollout))


@pytest.mark.parametrize("as_buffer", [True, False])
def test_final_observations_that_are_rightly_missing_are_not_blamed_for_a_fault(as_buffer):
    rollout = with_values(make_rollout(LONG), CRITIC)
    flags = rollout["next"]
    flags["observation"] = torch.where(flags["done"], NAN, flags["observation"])
    flags["reward"][9, 3] = NAN
    gae = RolloutGAE(0.9, 0.8, CRITIC)
    with (
        pytest.warns(UserWarning, match="no final observation"),
        pytest.raises(ValueError, match=r"^\('next', 'reward'\) is nan at step 9 of environment 3 \(1 of 60"),
    ):
        gae(in_buffer(rollout)) if as_buffer else gae(rollout, time_dim=0)


def test_infinity_in_a_final_observation_is_refused():
    rollout = with_values(make_rollout(Sizes(5, 3, p_terminated=0.0, p_truncated=0.0)), CRITIC)
    rollout["next", "truncated"][2, 1] = rollout["next", "done"][2, 1] = True
    rollout["next", "observation"][2, 1, 0] = INF
    critic = make_critic()
    critic.mlp = torch.nn.Linear(3, 1).double()
    with pytest.raises(ValueError, match=r"^\('next', 'observation'\) is inf at step 2 of environment 1"):
        RolloutGAE(0.9, 0.8, critic)(in_buffer(rollout))


def test_whatever_the_keys_are_called_consequences_are_not_blamed():
    rollout = faulty("observation", 3, 0, NAN)
    rollout.rename_key_("state_value", "V").rename_key_("observation", "zz")
    rollout = rollout.select("V", "action_log_prob", "privileged", "zz", "next")
    rollout.get("next").rename_key_("observation", "zz")
    critic = make_critic(("zz", "privileged"), 5)
    critic.out_keys = ["V"]
    critic._value_key = "V"
    gae = RolloutGAE(0.9, 0.8, critic, value_key="V", advantage_key=("a", "b"), value_target_key="c")
    for _ in range(2):  # by the second time, the advantages of the first stand in the window
        buffer = in_buffer(rollout)
        with pytest.raises(ValueError, match=r"^'zz' is nan at step 3 of environment 0"):
            gae(buffer)
        with pytest.raises(ValueError, match=r"^'zz' is nan at step 3 of environment 0"):
            gae(buffer)


def test_a_critic_that_returns_nan_for_finite_observations_is_blamed_itself():
    rollout = with_values(make_rollout(QUIET), CRITIC)
    critic = make_critic()
    critic.mlp[-1].bias.data.fill_(NAN)
    with pytest.raises(ValueError, match="the value network returned NaN or inf"):
        RolloutGAE(0.9, 0.8, critic)(in_buffer(rollout))


def test_finite_advantages_whose_sum_overflows_are_finite():
    rollout = make_rollout(QUIET, torch.float32)
    rollout["state_value"] = torch.zeros(5, 3, 1)
    rollout["next", "reward"].fill_(3e38)
    rollout["next", "state_value"] = torch.zeros(5, 3, 1)
    out = RolloutGAE(0.0, 0.0)(rollout, time_dim=0)
    assert torch.equal(out["advantage"], torch.full((5, 3, 1), 3e38))


# -- wrong input -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"gamma": 1.5}, r"`gamma` must lie in \[0, 1\], got 1.5"),
        ({"lmbda": -0.1}, r"`lmbda` must lie in \[0, 1\], got -0.1"),
        ({"gamma": NAN}, r"`gamma` must lie in \[0, 1\], got nan"),
        ({"time_out": "v_s"}, r"must be one of \('final_observation', 'rsl_rl'\), got 'v_s'"),
    ],
)
def test_parameters_out_of_range_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        RolloutGAE(**options)


def test_a_buffer_without_a_critic_is_refused():
    with pytest.raises(ValueError, match=r"RolloutGAE\(\.\.\., value_network=critic\)"):
        RolloutGAE()(in_buffer(with_values(make_rollout(QUIET), CRITIC)))


def test_a_window_that_is_not_full_is_refused():
    buffer = RolloutBuffer(6, 3)
    buffer.extend(make_rollout(QUIET), time_dim=0)
    with pytest.raises(RuntimeError, match="5 of 6 rows"):
        RolloutGAE(value_network=CRITIC)(buffer)


@pytest.mark.parametrize("as_buffer", [True, False])
def test_rewards_of_another_dtype_than_the_values_are_refused(as_buffer):
    rollout = with_values(make_rollout(QUIET), CRITIC)
    rollout["next", "reward"] = rollout["next", "reward"].float()
    with pytest.raises(ValueError, match="rewards are float32 but the state values float64: cast"):
        RolloutGAE(value_network=CRITIC)(in_buffer(rollout) if as_buffer else rollout)


@pytest.mark.parametrize("as_buffer", [True, False])
def test_a_critic_of_another_dtype_than_the_stored_values_is_refused(as_buffer):
    rollout = with_values(make_rollout(QUIET), CRITIC)
    rollout["next", "reward"] = rollout["next", "reward"].float()
    rollout["state_value"] = rollout["state_value"].float()
    with pytest.raises(ValueError, match="observations are float64 but the state values float32"):
        RolloutGAE(value_network=CRITIC)(in_buffer(rollout) if as_buffer else rollout)


@pytest.mark.parametrize(
    ("key", "shape"),
    [
        ("state_value", (5, 3)),
        ("state_value", (5, 3, 2)),
        (("next", "state_value"), (5, 3)),
        (("next", "reward"), (5, 3)),
        (("next", "reward"), (5, 3, 3)),
        (("next", "done"), (5, 3)),
        (("next", "truncated"), (5, 3)),
        (("next", "terminated"), (5, 3, 4)),
    ],
)
def test_a_shape_that_would_broadcast_is_refused_by_name(key, shape):
    rollout = with_values(make_rollout(QUIET), CRITIC)
    rollout["next", "state_value"] = values(rollout)[1]
    rollout[key] = torch.zeros(shape, dtype=rollout[key].dtype)
    name = key if isinstance(key, str) else key[-1]
    with pytest.raises(
        ValueError, match=rf"{name}.* has shape {re.escape(str(shape))}, expected \(5, 3, 1\)"
    ):
        RolloutGAE()(rollout, time_dim=0)


def test_a_critic_with_several_values_a_state_is_refused():
    critic = TensorDictModule(torch.nn.Linear(3, 2).double(), ["observation"], ["state_value"])
    with pytest.raises(ValueError, match=r"'state_value'` has shape \(15, 2\), expected \(15, 1\)"):
        RolloutGAE(value_network=critic)(in_buffer(make_rollout(QUIET)))


@pytest.mark.parametrize("key", ["next", ("next", "reward"), ("next", "done")])
def test_a_missing_key_of_a_tensordict_is_named(key):
    rollout = make_rollout(QUIET).exclude(key)
    name = key if isinstance(key, str) else key[-1]
    with pytest.raises(KeyError, match=f"reads '{name}', which is not there. It found 'observation'"):
        RolloutGAE(value_network=CRITIC)(rollout, time_dim=0)


def test_missing_values_without_a_critic_are_named():
    with pytest.raises(KeyError, match="There is no 'state_value' and no value_network"):
        RolloutGAE()(make_rollout(QUIET), time_dim=0)


def test_a_reward_key_that_rows_do_not_have_is_named():
    with pytest.raises(KeyError, match=r"reads 'income', which is not there. It found .*'reward'"):
        RolloutGAE(value_network=CRITIC, reward_key="income")(
            in_buffer(with_values(make_rollout(QUIET), CRITIC))
        )


def test_an_observation_that_the_critic_reads_and_the_window_lacks_is_named():
    critic = make_critic(("observation", "map"), 5)
    with pytest.raises(KeyError, match="The value network reads 'map'"):
        RolloutGAE(value_network=critic)(in_buffer(make_rollout(QUIET)))
    rollout = with_values(make_rollout(QUIET), CRITIC).exclude(("next", "observation"))
    with pytest.raises(KeyError, match=r"reads 'observation'.*compact_obs=False"):
        RolloutGAE(value_network=CRITIC)(in_buffer(rollout))


def test_a_critic_that_writes_another_key_is_named():
    critic = TensorDictModule(torch.nn.Linear(3, 1).double(), ["observation"], ["v"])
    with pytest.raises(KeyError, match=r"writes 'v', not 'state_value': pass .*value_key"):
        RolloutGAE(value_network=critic)(in_buffer(make_rollout(QUIET)))


@pytest.mark.parametrize(("shape", "time_dim"), [((15,), None), ((5, 3, 1), None), ((5, 3), 2), ((5, 3), -1)])
def test_other_than_two_batch_dimensions_and_other_time_dimensions_are_refused(shape, time_dim):
    with pytest.raises(ValueError, match=r"two batch dimensions|`time_dim` must be 0 or 1"):
        RolloutGAE()(make_rollout(QUIET).reshape(*shape), time_dim=time_dim)


# -- memory ------------------------------------------------------------------------------------


class NewMemory(TorchDispatchMode):
    """Notes every operation whose result is new memory of at least ``limit`` elements."""

    def __init__(self, limit: int) -> None:
        super().__init__()
        self.limit = limit
        self.found: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        before = {x.untyped_storage().data_ptr() for x in (*args, *kwargs.values()) if torch.is_tensor(x)}
        out = func(*args, **kwargs)
        for x in out if isinstance(out, (tuple, list)) else (out,):
            large = torch.is_tensor(x) and x.numel() >= self.limit
            if large and x.untyped_storage().data_ptr() not in before:
                self.found.append(str(func))
        return out


@pytest.mark.parametrize("rule", ["final_observation", "rsl_rl"])
def test_advantages_are_computed_in_memory_that_all_windows_share(rule):
    plan = Sizes(40, 6, p_terminated=0.05, p_truncated=0.05)
    buffer = in_buffer(with_values(make_rollout(plan), CRITIC))
    gae = RolloutGAE(0.9, 0.8, CRITIC, time_out=rule, normalize=True)
    first = gae(buffer)
    where = {key: first[key].data_ptr() for key in ("advantage", "value_target")}
    buffer.empty()
    buffer.extend(with_values(make_rollout(plan._replace(seed=1)), CRITIC), time_dim=0)
    with NewMemory(limit=40 * 6) as memory:
        second = gae(buffer)
    assert memory.found == [], "a temporary of the window's size was made"
    assert {key: second[key].data_ptr() for key in where} == where


def test_the_spy_on_new_memory_sees_temporaries():
    x = torch.zeros(10)
    with NewMemory(limit=10) as memory:
        x.add_(1)
        x.view(2, 5).mul_(2)
        x[:5] + 1
        x + 1
    assert memory.found == ["aten.add.Tensor"]
