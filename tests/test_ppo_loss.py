"""RSLPPOLoss against its formula, TorchRL's ClipPPOLoss, and every actor that TorchRL offers it."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from oracles_objectives import default_dtype, losses_by_definition, make_actor, make_critic, vector_normal
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import CompositeDistribution, TensorDictModule, set_composite_lp_aggregate
from torch import nn
from torch.distributions import Categorical, Distribution, Normal, kl_divergence
from torchrl.modules import (
    IndependentNormal,
    NormalParamExtractor,
    OneHotCategorical,
    ProbabilisticActor,
    TanhNormal,
    TruncatedNormal,
    ValueOperator,
)
from torchrl.objectives import ClipPPOLoss

from torchrl_rslstorage import MLPActor, MLPCritic, RSLPPOLoss, normalize_advantage


@pytest.fixture(autouse=True)
def _same_networks_whatever_ran_before():
    torch.manual_seed(0)


LOSSES = ("loss_objective", "loss_critic", "loss_entropy")
DIAGNOSTICS = ("kl", "entropy", "clip_fraction", "explained_variance")


# -- actors, critics, mini-batches -------------------------------------------------------------


def double_net(out_features: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, out_features)).double()


def continuous(distribution: type[Distribution], action_dim: int = 2, **options) -> ProbabilisticActor:
    net = nn.Sequential(double_net(2 * action_dim), NormalParamExtractor())
    return ProbabilisticActor(
        TensorDictModule(net, ["observation"], ["loc", "scale"]),
        in_keys=["loc", "scale"],
        distribution_class=distribution,
        return_log_prob=True,
        **options,
    )


def discrete(distribution: type[Distribution]) -> ProbabilisticActor:
    return ProbabilisticActor(
        TensorDictModule(double_net(4), ["observation"], ["logits"]),
        in_keys=["logits"],
        distribution_class=distribution,
        return_log_prob=True,
    )


def composite(
    steer: type[Distribution] = Normal, gear: type[Distribution] = Categorical
) -> ProbabilisticActor:
    """Two actions at once: a vector of two, whose density may keep its feature dimension, and an index."""

    def parameters(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        loc, log_scale, logits = net(x).split([2, 2, 4], -1)
        return loc, log_scale.exp(), logits

    net = double_net(8)
    module = TensorDictModule(
        net_and(parameters, net),
        ["observation"],
        [("params", "steer", "loc"), ("params", "steer", "scale"), ("params", "gear", "logits")],
    )
    names = {"steer": ("action", "steer"), "gear": ("action", "gear")}
    return ProbabilisticActor(
        module,
        in_keys=["params"],
        distribution_class=CompositeDistribution,
        distribution_kwargs={"distribution_map": {"steer": steer, "gear": gear}, "name_map": names},
        return_log_prob=True,
    )


def net_and(function: Callable, net: nn.Module) -> nn.Module:
    class Wrapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = net

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return function(x)

    return Wrapped()


ACTORS: dict[str, Callable[[], nn.Module]] = {
    "MLPActor": make_actor,
    "MLPActor, log std": lambda: make_actor(std_type="log", init_std=0.6),
    "IndependentNormal": lambda: continuous(IndependentNormal),
    "OneHotCategorical": lambda: discrete(OneHotCategorical),
    "Categorical": lambda: discrete(Categorical),
}
"""Those with exact entropy and KL."""


def torchrl_critic() -> ValueOperator:
    return ValueOperator(double_net(1), ["observation"])


def perturb(module: nn.Module, by: float, seed: int = 0) -> None:
    rng = torch.Generator().manual_seed(seed)
    for parameter in module.parameters():
        noise = torch.randn(parameter.shape, generator=rng, dtype=parameter.dtype)
        parameter.data.add_(by * noise)


def act(actor: nn.Module, critic: nn.Module, size: int = 12, seed: int = 0) -> TensorDict:
    """A mini-batch that both wrote; then their weights move, as after the first steps of an update."""
    torch.manual_seed(seed)
    batch = TensorDict({"observation": torch.randn(size, 3, dtype=torch.float64)}, [size])
    with torch.no_grad():
        critic(actor(batch))
    batch["advantage"] = torch.randn(size, 1, dtype=torch.float64)
    batch["value_target"] = batch["state_value"] + 0.4 * torch.randn(size, 1, dtype=torch.float64)
    perturb(actor, 0.1, seed)
    perturb(critic, 0.2, seed)
    return batch


def gradients(losses: TensorDictBase | dict, parameters) -> list[torch.Tensor]:
    total = sum(losses[name] for name in LOSSES)
    return list(torch.autograd.grad(total, list(parameters), materialize_grads=True))


def close(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and torch.allclose(a, b, rtol=1e-9, atol=1e-11)


# -- the formula -------------------------------------------------------------------------------


@given(
    size=st.integers(2, 12),
    seed=st.integers(0, 1000),
    clip_epsilon=st.sampled_from([0.05, 0.2]),
    clip_value=st.sampled_from([True, False, 0.07]),
    coeffs=st.tuples(st.sampled_from([0.0, 0.5, 1.0]), st.sampled_from([0.0, 0.01, 1.0])),
    normalize=st.booleans(),
    flat=st.booleans(),
)
def test_losses_and_gradients_are_the_formula(size, seed, clip_epsilon, clip_value, coeffs, normalize, flat):
    actor, critic = make_actor(std_type="log"), make_critic()
    batch = act(actor, critic, size, seed)
    if flat:  # [B] is the same as [B, 1]
        for key in ("advantage", "value_target", "state_value"):
            batch[key] = batch[key].squeeze(-1)
        batch["action_log_prob"] = batch["action_log_prob"].unsqueeze(-1)
    with default_dtype(torch.float64):  # in which it keeps its coefficients
        loss = RSLPPOLoss(
            actor,
            critic,
            clip_epsilon=clip_epsilon,
            clip_value=clip_value,
            critic_coeff=coeffs[0],
            entropy_coeff=coeffs[1],
            normalize_advantage=normalize,
        )
    losses = loss(batch)
    expected = losses_by_definition(
        batch,
        actor.mlp(batch["observation"]),
        actor.std,
        critic.mlp(batch["observation"]),
        clip_epsilon=clip_epsilon,
        value_radius={True: clip_epsilon, False: None}.get(clip_value, clip_value),
        critic_coeff=coeffs[0],
        entropy_coeff=coeffs[1],
        normalize=normalize,
    )
    assert list(losses.keys()) == list(loss.out_keys) == [*LOSSES, *DIAGNOSTICS]
    for name, value in losses.items():
        assert torch.allclose(value, expected[name], rtol=1e-9, atol=1e-10), name
        assert value.requires_grad == (name in LOSSES), name
    parameters = [*actor.parameters(), *critic.parameters()]
    for a, b in zip(gradients(losses, parameters), gradients(expected, parameters), strict=True):
        assert torch.allclose(a, b, rtol=1e-8, atol=1e-10)


def test_the_mini_batches_of_the_formula_clip_and_bind():
    """What the test above compares would be empty if no ratio and no value were ever clipped."""
    actor, critic = make_actor(), make_critic()
    batch = act(actor, critic)
    tight, loose = (RSLPPOLoss(actor, critic, clip_epsilon=eps, clip_value=eps)(batch) for eps in (0.05, 9.0))
    assert 0 < tight["clip_fraction"] < 1
    assert loose["clip_fraction"] == 0
    assert tight["loss_objective"] > loose["loss_objective"]
    assert tight["loss_critic"] > loose["loss_critic"]


def test_while_the_weights_have_not_moved_the_kl_is_zero_and_the_objective_the_mean_advantage():
    actor, critic = make_actor(), make_critic()
    weights = [parameter.clone() for parameter in actor.parameters()]
    batch = act(actor, critic)
    for parameter, weight in zip(actor.parameters(), weights, strict=True):
        parameter.data.copy_(weight)
    losses = RSLPPOLoss(actor, critic)(batch)
    assert losses["kl"] == 0
    assert losses["clip_fraction"] == 0
    assert close(losses["loss_objective"], -batch["advantage"].mean())


def test_advantages_are_normalised_within_the_mini_batch():
    actor, critic = make_actor(), make_critic()
    batch = act(actor, critic)
    batch["advantage"] = 5 + 3 * batch["advantage"]
    normalised = batch.copy().set("advantage", normalize_advantage(batch["advantage"]))
    by_loss = RSLPPOLoss(actor, critic, normalize_advantage=True)(batch)
    by_hand = RSLPPOLoss(actor, critic)(normalised)
    assert close(by_loss["loss_objective"], by_hand["loss_objective"])
    assert not close(by_loss["loss_objective"], RSLPPOLoss(actor, critic)(batch)["loss_objective"])


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("functional", [True, False])
def test_a_mini_batch_of_one_sample_is_finite(normalize, functional):
    actor, critic = make_actor(), make_critic()
    batch = act(actor, critic, size=1)
    loss = RSLPPOLoss(actor, critic, normalize_advantage=normalize, functional=functional)
    losses = loss(batch)
    assert all(bool(value.isfinite()) for value in losses.values())
    assert all(bool(grad.isfinite().all()) for grad in gradients(losses, loss.parameters()))


# -- TorchRL's actors --------------------------------------------------------------------------


@pytest.mark.parametrize("name", ACTORS)
@pytest.mark.parametrize("functional", [True, False])
def test_it_agrees_with_torchrls_clip_ppo_loss_on_every_actor(name, functional):
    actor, critic = ACTORS[name](), torchrl_critic()
    batch = act(actor, critic)
    ours = RSLPPOLoss(actor, critic, clip_value=0.25, critic_coeff=0.5, functional=functional)
    theirs = ClipPPOLoss(
        actor,
        critic,
        clip_epsilon=0.2,
        clip_value=0.25,
        critic_coeff=0.5,
        entropy_coeff=0.01,
        loss_critic_type="l2",
        normalize_advantage=False,
        functional=functional,
    )
    a, b = ours(batch), theirs(batch.clone())
    for key in (*LOSSES, "entropy", "clip_fraction"):
        # Both keep coefficients as float32; TorchRL clips the ratio's logarithm.
        assert torch.allclose(a[key], b[key], rtol=1e-6, atol=1e-8), key
    assert torch.allclose(a["explained_variance"], b["explained_variance"].squeeze(), rtol=1e-6)
    for x, y in zip(gradients(a, ours.parameters()), gradients(b, theirs.parameters()), strict=True):
        assert torch.allclose(x, y, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("name", ACTORS)
def test_the_kl_is_exact_against_the_distribution_that_acted(name):
    actor, critic = ACTORS[name](), torchrl_critic()
    batch = act(actor, critic)
    old = actor.build_dist_from_params(batch)
    new = actor.get_dist(batch.select("observation"))
    assert close(RSLPPOLoss(actor, critic)(batch)["kl"], kl_divergence(old, new).mean().detach())


@pytest.mark.parametrize("name", ACTORS)
def test_functional_parameters_give_the_same_losses_and_gradients(name):
    actor, critic = ACTORS[name](), make_critic()
    batch = act(actor, critic)
    plain = RSLPPOLoss(actor, critic)
    a = plain(batch)
    direct = gradients(a, plain.parameters())
    functional = RSLPPOLoss(actor, critic, functional=True)
    b = functional(batch)
    assert all(torch.equal(a[key], b[key]) for key in a.keys())
    for x, y in zip(direct, gradients(b, functional.parameters()), strict=True):
        assert torch.equal(x, y)


def test_without_functional_the_networks_own_parameters_are_used():
    actor, critic = make_actor(), make_critic()
    loss = RSLPPOLoss(actor, critic)
    own = [*actor.parameters(), *critic.parameters()]
    assert all(a is b for a, b in zip(loss.parameters(), own, strict=True))


def test_a_tanh_normal_has_its_exact_kl_and_an_announced_estimate_of_its_entropy():
    actor, critic = continuous(TanhNormal), torchrl_critic()
    batch = act(actor, critic)
    loss = RSLPPOLoss(actor, critic)
    with pytest.warns(
        UserWarning, match="no exact entropy for TanhNormal: it uses the estimate −log π"
    ) as said:
        torch.manual_seed(0)
        losses = loss(batch)
        loss(batch)
    assert len(said) == 1
    dist = actor.get_dist(batch.select("observation"))
    torch.manual_seed(0)
    sample = dist.rsample()
    assert close(losses["entropy"], -dist.log_prob(sample).mean().detach())
    assert close(losses["kl"], kl_divergence(actor.build_dist_from_params(batch), dist).mean().detach())
    through_the_sample = torch.autograd.grad(losses["loss_entropy"], actor.parameters(), retain_graph=True)
    expected = torch.autograd.grad(0.01 * dist.log_prob(sample).mean(), actor.parameters())
    assert any(bool(grad.abs().max() > 0) for grad in expected)
    for a, b in zip(through_the_sample, expected, strict=True):
        assert torch.allclose(a, b, rtol=1e-6, atol=1e-12)


def test_a_distribution_without_a_registered_kl_gets_the_announced_estimator():
    actor = continuous(TruncatedNormal, distribution_kwargs={"low": -1.0, "high": 1.0})
    critic = torchrl_critic()
    batch = act(actor, critic)
    loss = RSLPPOLoss(actor, critic)
    with pytest.warns(
        UserWarning, match="no exact KL for TruncatedNormal: it uses the estimate mean"
    ) as said:
        losses = loss(batch)
        loss(batch)
    assert len(said) == 1
    log_ratio = (
        actor.get_dist(batch.select("observation")).log_prob(batch["action"]) - batch["action_log_prob"]
    )
    assert close(losses["kl"], (log_ratio.exp() - 1 - log_ratio).mean().detach())


@pytest.mark.parametrize("name", ["MLPActor", "IndependentNormal", "OneHotCategorical"])
def test_without_the_parameters_that_acted_the_kl_is_estimated_and_said_so_once(name):
    actor, critic = ACTORS[name](), make_critic()
    batch = act(actor, critic)
    loss = RSLPPOLoss(actor, critic)
    for missing in (["loc", "scale", "logits"], ["scale", "logits"]):
        thin = batch.exclude(*missing)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            losses = loss(thin)
        assert [("holds no parameters" in str(w.message)) for w in said] == [True] * ("loc" in missing)
        dist = actor.get_dist(batch.select("observation"))
        log_ratio = dist.log_prob(batch["action"]) - batch["action_log_prob"]
        assert close(losses["kl"], (log_ratio.exp() - 1 - log_ratio).mean().detach())


def test_the_estimate_of_the_kl_is_unbiased():
    """Over many actions of the old policy it comes to the exact KL."""
    actor, critic = make_actor(), make_critic()
    batch = act(actor, critic, size=20_000)
    loss = RSLPPOLoss(actor, critic)
    exact = loss(batch)["kl"]
    with pytest.warns(UserWarning, match="no exact KL"):
        estimate = loss(batch.exclude("loc", "scale"))["kl"]
    assert abs(float(estimate - exact)) < 0.05 * float(exact)


# -- composite actions -------------------------------------------------------------------------


@pytest.mark.parametrize("aggregate", [True, False])
@pytest.mark.parametrize("steer", [Normal, IndependentNormal])
@pytest.mark.parametrize("size", [12, 2], ids=["B = 12", "B = A"])
def test_the_heads_of_a_composite_action_are_summed(aggregate, steer, size):
    with set_composite_lp_aggregate(aggregate):
        actor, critic = composite(steer), torchrl_critic()
        batch = act(actor, critic, size)
        loss = RSLPPOLoss(actor, critic)
        losses = loss(batch)
    net = actor[0].module.net
    loc, log_scale, logits = net(batch["observation"]).split([2, 2, 4], -1)
    new = (vector_normal(loc, log_scale.exp()), Categorical(logits=logits))
    acted = batch["params"]
    old = (
        vector_normal(acted["steer", "loc"], acted["steer", "scale"]),
        Categorical(logits=acted["gear", "logits"]),
    )
    action = (batch["action", "steer"], batch["action", "gear"])
    ratio = sum(n.log_prob(a) - o.log_prob(a) for n, o, a in zip(new, old, action, strict=True)).exp()
    advantage = batch["advantage"].squeeze(-1)
    expected = -torch.min(advantage * ratio, advantage * ratio.clamp(0.8, 1.2)).mean()
    assert close(losses["loss_objective"], expected)
    assert close(losses["entropy"], sum(head.entropy() for head in new).mean().detach())
    kl = sum(kl_divergence(o, n) for o, n in zip(old, new, strict=True))
    assert close(losses["kl"], kl.mean().detach())


@pytest.mark.parametrize("aggregate", [True, False])
def test_of_a_composite_action_only_the_head_without_a_formula_is_estimated(aggregate):
    with set_composite_lp_aggregate(aggregate):
        actor, critic = composite(TanhNormal), torchrl_critic()
        batch = act(actor, critic)
        loss = RSLPPOLoss(actor, critic)
        with pytest.warns(UserWarning, match="no exact entropy for CompositeDistribution") as said:
            torch.manual_seed(0)
            losses = loss(batch)
        assert len(said) == 1
        steer, gear = actor.get_dist(batch.select("observation")).dists.values()
    torch.manual_seed(0)
    estimate = -steer.log_prob(steer.rsample()) + gear.entropy()
    assert close(losses["entropy"], estimate.mean().detach())


def test_a_composite_of_one_head_works():
    module = TensorDictModule(double_net(4), ["observation"], [("params", "gear", "logits")])
    with set_composite_lp_aggregate(False):
        actor = ProbabilisticActor(
            module,
            in_keys=["params"],
            distribution_class=CompositeDistribution,
            distribution_kwargs={"distribution_map": {"gear": Categorical}},
            return_log_prob=True,
        )
        critic = torchrl_critic()
        batch = act(actor, critic)
        losses = RSLPPOLoss(actor, critic)(batch)
    logits = actor[0].module(batch["observation"])
    assert close(losses["entropy"], Categorical(logits=logits).entropy().mean().detach())


# -- keys --------------------------------------------------------------------------------------


def test_in_keys_are_what_is_read_no_more():
    actor, critic = make_actor(), make_critic(("observation", "privileged"), 5)
    loss = RSLPPOLoss(actor, critic)
    assert loss.in_keys == [
        "observation",
        "privileged",
        "action",
        "action_log_prob",
        "advantage",
        "value_target",
        "loc",
        "scale",
        "state_value",
    ]
    assert "state_value" not in RSLPPOLoss(actor, critic, clip_value=False).in_keys


@pytest.mark.parametrize("name", [*ACTORS, "composite"])
@pytest.mark.parametrize("functional", [True, False])
def test_a_mini_batch_needs_its_in_keys_and_nothing_else(name, functional):
    with set_composite_lp_aggregate(False):
        actor, critic = (ACTORS | {"composite": composite})[name](), torchrl_critic()
        batch = act(actor, critic)
        loss = RSLPPOLoss(actor, critic, functional=functional)
        expected = loss(batch)
        thin = batch.select(*loss.in_keys)
        losses = loss(thin)
        assert all(torch.equal(losses[key], expected[key]) for key in losses.keys())
        parameters = {"loc", "scale", "logits", "params"}
        for key in loss.in_keys:
            lacking = thin.exclude(key)
            if key in parameters:
                with pytest.warns(UserWarning, match="holds no parameters of the distribution that acted"):
                    loss._announced.clear()
                    loss(lacking)
            else:
                with pytest.raises(KeyError, match=str(key[-1] if isinstance(key, tuple) else key)):
                    loss(lacking)


@pytest.mark.parametrize(
    ("key", "hint"),
    [
        ("advantage", "Run RolloutGAE on the buffer"),
        ("value_target", "Run RolloutGAE on the buffer"),
        ("action", "collection policy must write it"),
        ("action_log_prob", "collection policy must write it"),
        ("state_value", "collection policy must write it"),
    ],
)
def test_a_missing_key_is_named_with_who_should_have_written_it(key, hint):
    actor, critic = make_actor(), make_critic()
    batch = act(actor, critic)
    with pytest.raises(KeyError, match=f"RSLPPOLoss needs '{key}', which is not in the mini-batch.* {hint}"):
        RSLPPOLoss(actor, critic)(batch.exclude(key))


def test_a_critic_that_writes_another_key_is_named():
    actor, critic = make_actor(), ValueOperator(double_net(1), ["observation"], out_keys=["v"])
    batch = act(make_actor(), make_critic())
    with pytest.raises(
        KeyError, match=r"The critic writes 'v' but the loss reads 'state_value': call loss\.set"
    ):
        RSLPPOLoss(actor, critic)(batch)
    loss = RSLPPOLoss(actor, critic)
    loss.set_keys(value="v")
    batch.rename_key_("state_value", "v")
    assert loss(batch)["loss_critic"] > 0


@pytest.mark.parametrize("functional", [True, False])
def test_every_key_can_be_another_and_a_nested_one(functional):
    keys = {
        "action_key": ("pi", "a"),
        "log_prob_key": ("pi", "lp"),
        "loc_key": ("pi", "mu"),
        "scale_key": "s",
    }
    renamed, plain = make_actor(**keys), make_actor()
    critic = make_critic()
    torch.manual_seed(0)
    batch = act(plain, make_critic())
    expected = RSLPPOLoss(plain, critic, functional=functional)(batch)
    renamed.load_state_dict(plain.state_dict())
    names = {
        "action": ("pi", "a"),
        "action_log_prob": ("pi", "lp"),
        "loc": ("pi", "mu"),
        "scale": "s",
        "advantage": ("gae", "advantage"),
        "value_target": ("gae", "target"),
        "state_value": ("old", "value"),
    }
    for old, new in names.items():
        batch.rename_key_(old, new)
    other = ValueOperator(critic.mlp, ["observation"], out_keys=[("old", "value")])
    loss = RSLPPOLoss(renamed, other, functional=functional)
    loss.set_keys(advantage=("gae", "advantage"), value_target=("gae", "target"), value=("old", "value"))
    losses = loss(batch.select(*loss.in_keys))
    assert set(loss.in_keys) == {"observation", *names.values()}
    assert all(torch.equal(losses[key], expected[key]) for key in losses.keys())
    with pytest.raises(ValueError, match="not an accepted tensordict key"):
        loss.set_keys(returns="x")


def test_it_can_be_called_with_keyword_arguments():
    actor, critic = make_actor(), make_critic()
    batch = act(actor, critic)
    loss = RSLPPOLoss(actor, critic)
    expected = loss(batch)
    out = loss(**{key: batch[key] for key in loss.in_keys})
    assert len(out) == len(loss.out_keys)
    for name, value in zip(loss.out_keys, out, strict=True):
        assert torch.equal(value, expected[name])
    loss.select_out_keys("loss_objective", "kl")
    objective, kl = loss(**{key: batch[key] for key in loss.in_keys})
    assert torch.equal(objective, expected["loss_objective"])
    assert torch.equal(kl, expected["kl"])


# -- the mini-batch is read, never written -----------------------------------------------------


@pytest.mark.parametrize("name", [*ACTORS, "composite"])
@pytest.mark.parametrize("functional", [True, False])
def test_the_mini_batch_may_be_locked_and_is_left_as_it_was(name, functional):
    with set_composite_lp_aggregate(False):
        actor, critic = (ACTORS | {"composite": composite})[name](), torchrl_critic()
        batch = act(actor, critic)
        before = batch.clone()
        batch.lock_()
        losses = RSLPPOLoss(actor, critic, normalize_advantage=True, functional=functional)(batch)
        gradients(losses, [*actor.parameters(), *critic.parameters()]) if not functional else None
    assert set(batch.keys(True, True)) == set(before.keys(True, True))
    for key, value in before.items(True, True):
        assert torch.equal(batch[key], value)
        assert not batch[key].requires_grad


@pytest.mark.parametrize("key", ["action", "action_log_prob", "advantage", "value_target", "state_value"])
def test_an_entry_that_requires_grad_is_refused(key):
    actor, critic = make_actor(), make_critic()
    batch = act(actor, critic)
    batch[key] = batch[key].clone().requires_grad_()
    with pytest.raises(ValueError, match=f"'{key}' in the mini-batch requires grad: collect under no_grad"):
        RSLPPOLoss(actor, critic)(batch)


# -- shapes ------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", ["advantage", "value_target", "state_value", "action_log_prob"])
@pytest.mark.parametrize("shape", [(12, 2), (12, 12), (12, 1, 1)], ids=str)
def test_a_shape_that_would_broadcast_is_refused_by_name(key, shape):
    actor, critic = make_actor(), make_critic()
    batch = act(actor, critic)
    batch[key] = torch.zeros(shape, dtype=torch.float64)
    with pytest.raises(ValueError, match=f"^'{key}' has shape .* in a mini-batch of batch size") as error:
        RSLPPOLoss(actor, critic)(batch)
    assert f"{shape} in a mini-batch of batch size (12,), expected (12,) or (12, 1)" in str(error.value)


@pytest.mark.parametrize("key", ["advantage", "value_target", "state_value", "action_log_prob"])
def test_a_row_vector_is_refused(key):
    actor, critic = make_actor(), make_critic()
    batch = act(actor, critic).unsqueeze(0).squeeze(0)
    rows = TensorDict({name: value.unsqueeze(0) for name, value in batch.items()}, [1])
    rows[key] = rows[key].reshape(1, 12)
    with pytest.raises(ValueError, match=r"in a mini-batch of batch size \(1,\)"):
        RSLPPOLoss(actor, critic)(rows.set("observation", batch["observation"][:1]))


def test_a_mini_batch_without_a_batch_size_is_refused():
    actor, critic = make_actor(), make_critic()
    batch = act(actor, critic)
    batch.batch_size = []
    with pytest.raises(
        ValueError, match=r"'advantage' has shape \(12, 1\) in a mini-batch of batch size \(\)"
    ):
        RSLPPOLoss(actor, critic)(batch)


@pytest.mark.parametrize("size", [12, 2])
def test_a_density_with_one_number_a_dimension_is_refused(size):
    actor, critic = continuous(Normal), torchrl_critic()
    batch = act(actor, critic, size)
    batch["action_log_prob"] = batch["action_log_prob"].sum(-1)
    with pytest.raises(ValueError, match=r"has shape \(\d+, 2\).* must sum over them .*IndependentNormal"):
        RSLPPOLoss(actor, critic)(batch)


@pytest.mark.parametrize("make", [make_actor, lambda action_dim: continuous(IndependentNormal, action_dim)])
@pytest.mark.parametrize(
    ("action_dim", "shape"), [(1, (12,)), (2, (12, 1)), (2, (12, 3)), (2, (12, 2, 2))], ids=str
)
def test_an_action_of_another_shape_than_the_actors_is_refused(make, action_dim, shape):
    validate = Distribution._validate_args
    Distribution.set_default_validate_args(False)  # as importing TorchRL leaves the process
    try:
        actor, critic = make(action_dim=action_dim), make_critic()
        batch = act(actor, critic)
        batch["action"] = torch.zeros(shape, dtype=torch.float64)
        with pytest.raises(
            ValueError, match=r"'action' has shape .* but the actor's distribution has \(12, \d\)"
        ):
            RSLPPOLoss(actor, critic)(batch)
    finally:
        Distribution.set_default_validate_args(validate)


def test_an_index_action_with_a_trailing_one_is_refused():
    actor, critic = discrete(Categorical), torchrl_critic()
    batch = act(actor, critic)
    batch["action"] = batch["action"].unsqueeze(-1)
    with pytest.raises(ValueError, match=r"(?i)shape|broadcast"):
        RSLPPOLoss(actor, critic)(batch)


def test_a_critic_with_several_values_is_refused():
    actor, critic = make_actor(), ValueOperator(double_net(2), ["observation"])
    batch = act(make_actor(), make_critic())
    with pytest.raises(ValueError, match=r"'state_value' has shape \(12, 2\)"):
        RSLPPOLoss(actor, critic)(batch)


def test_two_batch_dimensions_give_what_their_flattening_gives():
    actor, critic = make_actor(), make_critic()
    batch = act(actor, critic)
    loss = RSLPPOLoss(actor, critic, normalize_advantage=True)
    a, b = loss(batch), loss(batch.reshape(3, 4))
    assert all(close(a[key], b[key]) for key in a.keys())


# -- options and state -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"clip_epsilon": 0.0}, r"`clip_epsilon` must be positive, got 0\.0"),
        ({"clip_value": -0.1}, r"`clip_value` must be a positive radius, .* got -0\.1"),
        ({"clip_value": 0.0}, r"`clip_value` must be a positive radius, .* got 0\.0"),
        ({"critic_coeff": -1.0}, r"`critic_coeff` must be a number of at least 0, got -1\.0"),
        ({"entropy_coeff": {"a": 1.0}}, r"`entropy_coeff` must be a number of at least 0, got \{'a': 1\.0\}"),
        ({"entropy_coeff": math.nan}, r"`entropy_coeff` must be a number of at least 0, got nan"),
    ],
)
def test_options_that_make_no_sense_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        RSLPPOLoss(make_actor(), make_critic(), **options)


def test_an_actor_that_is_no_stochastic_policy_is_refused():
    with pytest.raises(TypeError, match=r"TensorDictModule has no `get_dist`: .* such as MLPActor"):
        RSLPPOLoss(TensorDictModule(double_net(2), ["observation"], ["action"]), make_critic())


def test_coefficients_can_be_scheduled_by_assignment():
    actor, critic = make_actor(), make_critic()
    batch = act(actor, critic)
    loss = RSLPPOLoss(actor, critic, critic_coeff=0.0, entropy_coeff=0.0)
    before = loss(batch)
    assert before["loss_critic"] == before["loss_entropy"] == 0
    loss.critic_coeff, loss.entropy_coeff = 2.0, 0.5
    after = loss(batch)
    assert close(after["loss_entropy"], -0.5 * after["entropy"])
    assert close(after["loss_critic"], 2 * RSLPPOLoss(actor, critic)(batch)["loss_critic"])


@pytest.mark.parametrize("functional", [True, False])
def test_a_state_dict_restores_weights_and_coefficients(functional):
    actor, critic = make_actor(normalize_observations=True), make_critic()
    batch = act(actor, critic)
    actor.update_normalizer(batch)
    options = {"functional": functional}
    loss = RSLPPOLoss(actor, critic, critic_coeff=0.3, entropy_coeff=0.2, clip_value=0.1, **options)
    other = RSLPPOLoss(make_actor(seed=7, normalize_observations=True), make_critic(seed=8), **options)
    assert not torch.equal(other(batch)["loss_critic"], loss(batch)["loss_critic"])
    other.load_state_dict(loss.state_dict())
    a, b = loss(batch), other(batch)
    assert all(torch.equal(a[key], b[key]) for key in a.keys())


def test_an_empty_mini_batch_is_refused():
    actor, critic = MLPActor(["obs"], 3, 2, hidden_dims=(4,)), MLPCritic(["obs"], 3, hidden_dims=(4,))
    with torch.no_grad():
        batch = critic(actor(TensorDict({"obs": torch.randn(4, 3)}, [4])))
    batch["advantage"], batch["value_target"] = torch.randn(4, 1), torch.randn(4, 1)
    with pytest.raises(ValueError, match="mini-batch is empty"):
        RSLPPOLoss(actor, critic)(batch[:0])


@pytest.mark.parametrize("entry", ["state_value", "value_target", "advantage", "action_log_prob"])
def test_a_number_that_is_none_is_seen_in_the_loss(entry: str) -> None:
    actor, critic = make_actor(), make_critic()
    batch = act(actor, critic)
    batch[entry][0] = math.nan
    losses = RSLPPOLoss(actor, critic)(batch)
    name = "loss_critic" if entry in ("state_value", "value_target") else "loss_objective"
    assert losses[name].isnan()


def test_a_subclass_may_add_numbers_and_nested_entries_to_the_terms() -> None:
    class Extended(RSLPPOLoss):
        def terms(self, tensordict: TensorDictBase) -> dict:
            return {**super().terms(tensordict), "beta": 0.5, ("debug", "size"): torch.tensor(12)}

    actor, critic = make_actor(), make_critic()
    losses = Extended(actor, critic)(act(actor, critic))
    assert isinstance(losses["beta"], torch.Tensor)
    assert losses["beta"] == 0.5
    assert losses["debug", "size"] == 12
