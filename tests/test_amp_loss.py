"""The discriminator's objectives against their formulas in float64, and the rewards that they give."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict

from torchrl_rslstorage import (
    AMPDiscriminator,
    AMPLoss,
    EmpiricalNormalizer,
    StyleReward,
    discriminator_loss,
    lerp_rewards,
    style_reward,
)

OBJECTIVES = ("lsgan", "bce", "wgan")


def pairs(num, features=3, seed=0, offset=0.0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    states = torch.randn(2, num, features, generator=generator, dtype=dtype) + offset
    return TensorDict({"x": states[0], "next": {"x": states[1]}}, [num])


def discriminator(seed=0, **options):
    torch.manual_seed(seed)
    return AMPDiscriminator(["x"], in_features=3, hidden_dims=(16, 8), **options)


def both(num=32, **options):
    return TensorDict({"policy": pairs(num, seed=1, **options), "demonstration": pairs(num, seed=2)})


# -- the objectives ----------------------------------------------------------------------------


def by_hand(policy, demo, objective):
    """The three losses, one logit at a time."""
    if objective == "lsgan":
        real = [(d - 1) ** 2 for d in demo]
        fake = [(d + 1) ** 2 for d in policy]
        return 0.5 * (sum(real) / len(real) + sum(fake) / len(fake))
    if objective == "bce":
        real = [-math.log(1 / (1 + math.exp(-d))) for d in demo]
        fake = [-math.log(1 - 1 / (1 + math.exp(-d))) for d in policy]
        return 0.5 * (sum(real) / len(real) + sum(fake) / len(fake))
    return sum(policy) / len(policy) - sum(demo) / len(demo)


logits = st.lists(st.floats(-8, 8), min_size=1, max_size=6)


@given(policy=logits, demo=logits, objective=st.sampled_from(OBJECTIVES))
def test_the_losses_are_their_formulas(policy, demo, objective):
    tensors = [torch.tensor(x, dtype=torch.float64).unsqueeze(-1) for x in (policy, demo)]
    ours = discriminator_loss(*tensors, objective)
    assert ours.item() == pytest.approx(by_hand(policy, demo, objective), rel=1e-9, abs=1e-9)


def test_bce_stays_finite_for_logits_that_saturate():
    far = torch.tensor([[200.0]])
    assert discriminator_loss(far, -far, "bce").item() == pytest.approx(200.0)


def test_the_rewards_are_their_formulas():
    logit = torch.tensor([-9.0, -1.0, 0.0, 1.0, 2.0, 40.0])
    # max(0, 1 - (D - 1)^2 / 4): 1 at D = 1, 3/4 on both sides of it at a distance of 1, 0 from -1 down
    assert style_reward(logit, "lsgan").tolist() == [0.0, 0.0, 0.75, 1.0, 0.75, 0.0]
    # -log(1 - sigmoid(D)) = log(1 + e^D), cut off at -log 1e-4
    expected = [min(math.log1p(math.exp(d)), -math.log(1e-4)) for d in logit.tolist()]
    assert style_reward(logit, "bce").tolist() == pytest.approx(expected, rel=1e-4)
    assert torch.equal(style_reward(logit, "wgan"), logit)


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_a_better_score_never_earns_less_on_the_policys_side_of_the_target(objective):
    rewards = style_reward(torch.linspace(-5, 1, 50), objective)
    assert bool((rewards.diff() >= 0).all()) and rewards[-1] > rewards[0]


def test_lerp_weighs_the_task():
    style, task = torch.tensor([[1.0]]), torch.tensor([[3.0]])
    assert [lerp_rewards(style, task, w).item() for w in (0.0, 0.25, 1.0)] == [1.0, 1.5, 3.0]
    with pytest.raises(ValueError, match=r"in \[0, 1\], got 1.5"):
        lerp_rewards(style, task, 1.5)
    with pytest.raises(ValueError, match="would broadcast"):
        lerp_rewards(style, task.squeeze(-1), 0.5)


# -- the loss module ---------------------------------------------------------------------------


def test_the_penalty_is_the_mean_squared_slope_on_demonstrations():
    net = discriminator().double()
    batch = both().to(torch.float64)
    terms = AMPLoss(net, gradient_penalty_coeff=7.0)(batch)
    features = net.pair_features(batch["demonstration"])
    jacobian = torch.autograd.functional.jacobian(lambda x: net.score(x).sum(0), features)
    expected = jacobian[0].square().sum(-1).mean()
    torch.testing.assert_close(terms["gradient_penalty"], expected)
    torch.testing.assert_close(terms["loss_gradient_penalty"], 7.0 * expected)


def test_the_penaltys_gradient_reaches_the_weights():
    net = discriminator().double()
    batch = both().to(torch.float64)
    loss = AMPLoss(net, gradient_penalty_coeff=1.0)
    weight = net.trunk[0].weight
    (slope,) = torch.autograd.grad(loss(batch)["loss_gradient_penalty"], weight)
    step = 1e-6
    with torch.no_grad():
        weight[0, 0] += step
        high = loss.terms(batch["policy"], batch["demonstration"])  # no graph, no penalty
    assert high["gradient_penalty"] == 0
    high = loss(batch)["loss_gradient_penalty"].item()
    with torch.no_grad():
        weight[0, 0] -= 2 * step
    low = loss(batch)["loss_gradient_penalty"].item()
    assert slope[0, 0].item() == pytest.approx((high - low) / (2 * step), rel=1e-4, abs=1e-8)


def test_the_regularisers_are_squared_weights():
    net = discriminator()
    terms = AMPLoss(net, logit_coeff=0.5, weight_coeff=0.25)(both())
    last = net.linear.weight.square().sum()
    every = sum(
        net.get_parameter(f"{name}.weight").square().sum() for name in ("trunk.0", "trunk.2", "linear")
    )
    torch.testing.assert_close(terms["loss_logit"], 0.5 * last)
    torch.testing.assert_close(terms["loss_weight"], 0.25 * every)


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_every_objective_learns_to_tell_two_clouds_apart_and_says_so(objective):
    net = discriminator()
    loss = AMPLoss(net, objective=objective, gradient_penalty_coeff=1.0)
    optimizer = torch.optim.Adam(net.parameters(), lr=3e-3)
    batch = both(256, offset=2.0)
    for _ in range(150):
        terms = loss(batch)
        optimizer.zero_grad()
        sum(terms[key] for key in terms.keys() if key.startswith("loss_")).backward()
        optimizer.step()
    assert terms["policy_accuracy"] > 0.85 and terms["demonstration_accuracy"] > 0.85
    assert terms["demonstration_score"] > terms["policy_score"]


def test_an_untrained_discriminator_looks_like_one():
    net = discriminator()
    terms = AMPLoss(net)(TensorDict({"policy": pairs(400), "demonstration": pairs(400)}))
    assert terms["policy_accuracy"].item() + terms["demonstration_accuracy"].item() == pytest.approx(1.0)
    assert terms["policy_score"] == terms["demonstration_score"]


def test_the_sides_may_differ_in_size_and_neither_is_written_to():
    batch = TensorDict({"policy": pairs(5), "demonstration": pairs(9)}).lock_()
    terms = AMPLoss(discriminator())(batch)
    assert set(terms.keys()) == set(AMPLoss(discriminator()).out_keys)
    assert all(value.shape == () for value in terms.values())


def test_the_loss_names_what_it_reads_and_holds_the_discriminators_own_parameters():
    net = discriminator()
    loss = AMPLoss(net)
    sides = ("policy", "demonstration")
    assert loss.in_keys == [key for side in sides for key in ((side, "x"), (side, "next", "x"))]
    assert set(loss.parameters()) == set(net.parameters())


def test_metrics_carry_no_gradient():
    terms = AMPLoss(discriminator(), objective="wgan")(both())
    for key, value in terms.items():
        assert value.requires_grad is key.startswith("loss_"), key


def test_a_loss_is_refused_with_a_reason():
    net = discriminator()
    with pytest.raises(ValueError, match=r"'lsgan', 'bce', 'wgan'.*got 'gan'"):
        AMPLoss(net, objective="gan")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="`logit_coeff` must be at least 0, and finite, got -1"):
        AMPLoss(net, logit_coeff=-1.0)
    with pytest.raises(KeyError, match="'policy' and 'demonstration'; it found 'policy'"):
        AMPLoss(net)(TensorDict({"policy": pairs(4)}))
    with pytest.raises(ValueError, match="no demonstration pairs"):
        AMPLoss(net).terms(pairs(4), pairs(0))
    with pytest.raises(KeyError, match=r"there is no .*next"):
        AMPLoss(net).terms(pairs(4).exclude("next"), pairs(4))
    with pytest.raises(ValueError, match="expects 3 features"):
        AMPLoss(net).terms(pairs(4, features=2), pairs(4))


# -- the discriminator -------------------------------------------------------------------------


def test_both_states_go_through_one_normaliser_fed_with_raw_states():
    net = discriminator()
    raw = pairs(50, offset=5.0).reshape(10, 5)
    net.update_normalizer(raw)
    reference = EmpiricalNormalizer(3)
    reference.update(raw["x"].reshape(-1, 3))
    features = net.pair_features(raw)
    torch.testing.assert_close(features[..., :3], reference(raw["x"]))
    torch.testing.assert_close(features[..., 3:], reference(raw["next", "x"]))


def test_evaluating_moves_no_normaliser():
    net = discriminator()
    before = {key: value.clone() for key, value in net.state_dict().items()}
    AMPLoss(net)(both())
    StyleReward(net)(pairs(8))
    assert all(torch.equal(value, before[key]) for key, value in net.state_dict().items())


def test_a_discriminator_writes_its_logit_and_names_its_keys():
    net = AMPDiscriminator(["x", ("body", "y")], in_features=4, hidden_dims=(8,), logit_key=("amp", "d"))
    assert net.in_keys == ["x", ("body", "y"), ("next", "x"), ("next", "body", "y")]
    state = {"x": torch.zeros(2, 3), "body": {"y": torch.zeros(2, 1)}}
    assert net(TensorDict({**state, "next": state}, [2]))["amp", "d"].shape == (2, 1)


# -- the style reward --------------------------------------------------------------------------


def test_the_reward_is_scaled_by_scale_and_seconds():
    net, some = discriminator(), pairs(6)
    plain = style_reward(net.evaluate(some), "lsgan")
    torch.testing.assert_close(StyleReward(net, scale=3.0, dt=0.02)(some), plain * 0.06)


def test_pairs_that_are_not_whole_earn_nothing_and_reach_no_statistic():
    net, some = discriminator(), pairs(6).set("valid", torch.tensor([True, True, True, True, True, False]))
    some["next", "x"][5] = torch.nan
    reward = StyleReward(net, "wgan", scale=2.0)
    given = reward(some)
    assert given[5] == 0 and bool(given.isfinite().all())
    assert reward.normalizer is not None
    reference = EmpiricalNormalizer(1)
    reference.update(net.evaluate(some[:5]).detach())
    assert torch.equal(reward.normalizer.mean, reference.mean)
    torch.testing.assert_close(given[:5], 2.0 * reference(net.evaluate(some[:5])))


def test_the_moments_of_scores_are_saved():
    net = discriminator()
    one, other = StyleReward(net, "wgan"), StyleReward(net, "wgan")
    one(pairs(20, seed=3))
    other.load_state_dict(one.state_dict())
    assert torch.equal(one(pairs(20, seed=4)), other(pairs(20, seed=4)))
    assert list(StyleReward(net).state_dict()) == []


def test_a_style_reward_is_refused_with_a_reason():
    with pytest.raises(ValueError, match="`dt` must be positive"):
        StyleReward(discriminator(), dt=0.0)
    with pytest.raises(ValueError, match="`scale` must be at least 0"):
        StyleReward(discriminator(), scale=-1.0)


@pytest.mark.parametrize("value", [float("inf"), float("nan"), -1.0])
def test_numbers_that_would_make_every_loss_or_reward_nan_are_refused(value):
    discriminator = AMPDiscriminator(["x"], 2, hidden_dims=(4,))
    for name in ("gradient_penalty_coeff", "logit_coeff", "weight_coeff"):
        with pytest.raises(ValueError, match=f"`{name}` must be at least 0, and finite"):
            AMPLoss(discriminator, **{name: value})
    for name in ("scale", "dt"):
        with pytest.raises(ValueError, match=rf"`{name}` must be .*, and finite"):
            StyleReward(discriminator, **{name: value})
