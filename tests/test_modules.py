"""Actors, critics, their distribution and their normaliser: against torch, TorchRL and rsl-rl-lib."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from oracles_objectives import Sizes, in_buffer, make_actor, make_critic, make_rollout, vector_normal
from rsl_rl import modules as rsl_rl_modules
from tensordict import TensorDict
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch.distributions import kl_divergence
from torchrl.data import Bounded, Categorical, Composite, OneHot, Unbounded
from torchrl.envs import EnvBase
from torchrl.envs.utils import ExplorationType, set_exploration_type
from torchrl.modules import IndependentNormal, NormalParamExtractor, ProbabilisticActor, ValueOperator

from torchrl_rslstorage import (
    ActorCritic,
    DiagonalGaussian,
    EmpiricalNormalizer,
    KLAdaptiveStepper,
    MiniBatchSampler,
    MLPActor,
    MLPCritic,
    RolloutGAE,
    RSLPPOLoss,
)

RANKS = [(), (5,), (4, 3), (2, 3, 4)]
ACTIVATIONS = {
    "elu": torch.nn.functional.elu,
    "relu": torch.relu,
    "selu": torch.selu,
    "celu": torch.celu,
    "leaky_relu": torch.nn.functional.leaky_relu,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "softplus": torch.nn.functional.softplus,
    "gelu": torch.nn.functional.gelu,
    "silu": torch.nn.functional.silu,
    "mish": torch.nn.functional.mish,
    "identity": lambda x: x,
}


def observations(*batch: int, **widths: int) -> TensorDict:
    widths = widths or {"observation": 3}
    return TensorDict({key: torch.randn(*batch, width) for key, width in widths.items()}, batch)


# -- actor and critic --------------------------------------------------------------------------


@pytest.mark.parametrize("batch", RANKS, ids=str)
@pytest.mark.parametrize("std_type", ["scalar", "log"])
def test_an_actor_writes_action_parameters_and_log_probability_for_any_batch(batch, std_type):
    actor = MLPActor(["observation"], 3, 2, std_type=std_type, init_std=0.7)
    td = observations(*batch)
    assert actor(td) is td
    assert set(td.keys()) == {"observation", *actor.out_keys}
    assert td["action"].shape == td["loc"].shape == td["scale"].shape == (*batch, 2)
    assert td["action_log_prob"].shape == batch
    assert torch.equal(td["loc"], actor.mlp(td["observation"]))
    assert torch.allclose(td["scale"], torch.full((*batch, 2), 0.7))
    expected = vector_normal(td["loc"], td["scale"]).log_prob(td["action"])
    assert torch.allclose(td["action_log_prob"], expected, atol=1e-6)


@pytest.mark.parametrize("batch", RANKS, ids=str)
def test_a_critic_writes_one_value_with_a_trailing_one_for_any_batch(batch):
    critic = MLPCritic(["observation"], 3)
    td = observations(*batch)
    assert critic(td) is td
    assert set(td.keys()) == {"observation", "state_value"}
    assert td["state_value"].shape == (*batch, 1)
    assert torch.equal(td["state_value"], critic.evaluate(td))


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_an_activation_is_the_torch_function_of_that_name_between_all_layers(name):
    critic = MLPCritic(["observation"], 3, hidden_dims=(4, 5), activation=name)
    td = observations(6)
    layers = [layer for layer in critic.mlp if isinstance(layer, torch.nn.Linear)]
    assert [layer.out_features for layer in layers] == [4, 5, 1]
    x = td["observation"]
    for layer in layers[:-1]:
        x = ACTIVATIONS[name](layer(x))
    assert torch.allclose(critic.evaluate(td), layers[-1](x), atol=1e-6)


def test_networks_start_from_rsl_rls_weights_for_the_same_seed():
    torch.manual_seed(5)
    theirs = rsl_rl_modules.MLP(3, 2, [8, 8], "elu")
    torch.manual_seed(5)
    ours = MLPActor(["observation"], 3, 2, hidden_dims=(8, 8)).mlp
    assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), theirs.parameters(), strict=True))


def test_observation_groups_are_concatenated_in_the_order_of_the_keys():
    td = observations(5, policy=3, privileged=2)
    td["scan", "heights"] = torch.randn(5, 4)
    actor = MLPActor([("scan", "heights"), "policy"], 7, 2)
    critic = MLPCritic(["privileged", "policy", ("scan", "heights")], 9)
    policy, privileged, heights = td["policy"], td["privileged"], td["scan", "heights"]
    assert torch.equal(actor.get_dist(td).loc, actor.mlp(torch.cat([heights, policy], -1)))
    assert torch.equal(critic.evaluate(td), critic.mlp(torch.cat([privileged, policy, heights], -1)))


def test_an_actor_writes_under_any_keys():
    keys = {
        "action_key": ("pi", "a"),
        "log_prob_key": ("pi", "lp"),
        "loc_key": "mu",
        "scale_key": ("pi", "s"),
    }
    actor = MLPActor(["observation"], 3, 2, **keys)
    td = actor(observations(5))
    assert actor.dist_sample_keys == [("pi", "a")]
    assert actor.log_prob_keys == [("pi", "lp")]
    assert set(td.keys(True, True)) == {"observation", ("pi", "a"), ("pi", "lp"), "mu", ("pi", "s")}
    assert actor.build_dist_from_params(td).log_prob(td["pi", "a"]).equal(td["pi", "lp"])


def test_get_dist_and_evaluate_write_nothing():
    actor, critic, td = MLPActor(["observation"], 3, 2), MLPCritic(["observation"], 3), observations(5)
    td.lock_()
    actor.get_dist(td)
    critic.evaluate(td)
    assert list(td.keys()) == ["observation"]


def test_build_dist_from_params_is_the_distribution_that_acted():
    actor = MLPActor(["observation"], 3, 2)
    td = actor(observations(5))
    old_log_prob = td["action_log_prob"]
    for parameter in actor.parameters():
        parameter.data.add_(0.1)
    assert torch.equal(actor.build_dist_from_params(td).log_prob(td["action"]), old_log_prob)
    for key in ("loc", "scale"):
        with pytest.raises(KeyError, match=f"'{key}' of the distribution that acted is not there"):
            actor.build_dist_from_params(td.exclude(key))


def test_exploration_type_decides_between_a_sample_and_the_mean():
    actor, td = MLPActor(["observation"], 3, 2), observations(1000)
    for kind in (ExplorationType.DETERMINISTIC, ExplorationType.MEAN, ExplorationType.MODE):
        with set_exploration_type(kind):
            actor(td)
        assert torch.equal(td["action"], td["loc"])
    with set_exploration_type(ExplorationType.RANDOM):
        actor(td)
    noise = (td["action"] - td["loc"]).detach()
    assert abs(float(noise.mean())) < 0.1
    assert abs(float(noise.std()) - 1) < 0.1
    torch.manual_seed(0)
    first = actor(td)["action"].clone()
    torch.manual_seed(0)
    assert torch.equal(actor(td)["action"], first)


@pytest.mark.parametrize("std_type", ["scalar", "log"])
@pytest.mark.parametrize(("value", "expected"), [(-1e9, 1e-6), (1e9, 1e6)])
def test_the_std_is_clamped_to_rsl_rls_range(std_type, value, expected):
    actor = MLPActor(["observation"], 3, 2, std_type=std_type)
    actor.std_param.data.fill_(value)
    assert torch.allclose(actor.std, torch.tensor(expected), rtol=1e-4)


@pytest.mark.parametrize("std_type", ["scalar", "log"])
def test_the_std_starts_at_init_std_and_learns_in_its_own_parametrisation(std_type):
    actor = MLPActor(["observation"], 3, 2, std_type=std_type, init_std=0.25).double()
    assert torch.allclose(actor.std, torch.tensor(0.25, dtype=torch.float64), atol=1e-7)
    actor.std.sum().backward()
    slope = 1.0 if std_type == "scalar" else 0.25
    assert torch.allclose(actor.std_param.grad, torch.full((2,), slope, dtype=torch.float64), atol=1e-7)


@pytest.mark.parametrize("in_keys", ["observation", []])
def test_in_keys_must_be_a_list_of_keys(in_keys):
    with pytest.raises(ValueError, match="must be a list of at least one observation key"):
        MLPCritic(in_keys, 3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"activation": "swoosh"}, r"`activation` must be one of \['celu', 'elu', .*got 'swoosh'"),
        ({"std_type": "exp"}, r"`std_type` must be one of \('scalar', 'log'\), got 'exp'"),
        ({"init_std": 0.0}, r"`init_std` must be positive, got 0\.0"),
        ({"init_std": float("nan")}, "`init_std` must be positive, got nan"),
        ({"init_std": float("inf")}, "`init_std` must be positive, got inf"),
        ({"hidden_dims": ()}, r"`hidden_dims` must be positive widths, got \(\)"),
        ({"hidden_dims": (8, 0)}, r"`hidden_dims` must be positive widths, got \(8, 0\)"),
    ],
)
def test_an_actors_wrong_options_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        MLPActor(["observation"], 3, 2, **options)


def test_a_missing_group_is_named_beside_those_that_are_there():
    with pytest.raises(KeyError, match=r"MLPActor reads 'privileged'.* holds 'observation', 'height'"):
        MLPActor(["observation", "privileged"], 5, 2)(observations(4, observation=3, height=1))


@pytest.mark.parametrize("shape", [(4, 2), (4, 4), (4, 2, 3)])
def test_a_group_of_another_width_or_rank_is_named_with_its_shape(shape):
    td = TensorDict({"observation": torch.zeros(shape)}, [4])
    with pytest.raises(ValueError, match="expects 3 features behind batch size") as error:
        MLPCritic(["observation"], 3)(td)
    assert f"'observation' {shape}" in str(error.value)


@pytest.mark.parametrize("dtype", ["float64", "int64", "uint8"])
def test_a_group_of_another_dtype_is_refused_with_the_cast_to_make(dtype):
    td = TensorDict({"observation": torch.zeros(4, 3, dtype=getattr(torch, dtype))}, [4])
    with pytest.raises(
        TypeError, match=f"'observation' is {dtype} but MLPActor's parameters are float32: cast"
    ):
        MLPActor(["observation"], 3, 2)(td)


# -- from an environment -----------------------------------------------------------------------


class SpecEnv(EnvBase):
    """An environment that has specs and nothing behind them."""

    def __init__(self, action_spec, observation_specs):
        super().__init__(batch_size=torch.Size([2]))
        self.observation_spec = Composite(observation_specs, shape=[2])
        self.action_spec = action_spec
        self.reward_spec = Unbounded((2, 1))

    def _reset(self, tensordict, **kwargs):
        raise NotImplementedError

    def _step(self, tensordict):
        raise NotImplementedError

    def _set_seed(self, seed):
        raise NotImplementedError


BOX = Bounded(-1, 1, (2, 3))
VECTOR = Unbounded((2, 4))


def test_sizes_are_read_off_the_environment():
    env = SpecEnv(BOX, {"policy": VECTOR, "privileged": Unbounded((2, 5))})
    actor = MLPActor.for_env(env, ["policy"], hidden_dims=(8,), init_std=0.5)
    critic = MLPCritic.for_env(env, ["policy", "privileged"], hidden_dims=(8,))
    td = ActorCritic(actor, critic)(
        TensorDict({"policy": torch.zeros(2, 4), "privileged": torch.zeros(2, 5)}, [2])
    )
    assert td["action"].shape == (2, 3)
    assert td["scale"][0, 0] == 0.5
    assert td["state_value"].shape == (2, 1)


@pytest.mark.parametrize("network", [MLPActor, MLPCritic])
@pytest.mark.parametrize(
    ("env", "error", "message"),
    [
        (SpecEnv(BOX, {"policy": VECTOR}), KeyError, r"no observation 'observation'\. It has 'policy'"),
        (
            SpecEnv(BOX, {"observation": Unbounded((2, 3, 8, 8))}),
            ValueError,
            r"'observation' has shape \(3, 8, 8\) per environment; an MLP reads vectors",
        ),
        (
            SpecEnv(BOX, {"observation": Unbounded((2,))}),
            ValueError,
            r"'observation' has shape \(\) per environment",
        ),
        (
            SpecEnv(BOX, {"observation": Unbounded((2, 4), dtype=torch.float64)}),
            TypeError,
            "'observation' is float64 but networks are float32: cast the environment",
        ),
        (
            SpecEnv(BOX, {"observation": Unbounded((2, 4), dtype=torch.int64)}),
            TypeError,
            "'observation' is int64 but networks are float32",
        ),
    ],
    ids=["unknown", "image", "scalar", "float64", "int64"],
)
def test_observations_that_an_mlp_cannot_read_are_refused(network, env, error, message):
    with pytest.raises(error, match=message):
        network.for_env(env)


@pytest.mark.parametrize(
    "action_spec",
    [
        OneHot(3, (2, 3)),
        Categorical(3, (2,)),
        Bounded(-1, 1, (2, 3, 3)),
        Bounded(-1, 1, (2,)),
        Bounded(0, 4, (2, 3), dtype=torch.int64),
    ],
    ids=["one-hot", "index", "matrix", "scalar", "integers"],
)
def test_actions_that_a_gaussian_cannot_give_are_refused(action_spec):
    with pytest.raises(ValueError, match="A Gaussian policy acts with real vectors, but this environment's"):
        MLPActor.for_env(SpecEnv(action_spec, {"observation": VECTOR}))


# -- the distribution --------------------------------------------------------------------------


@st.composite
def gaussians(draw: st.DrawFn) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Means ``[*, A]`` and stds ``[A]`` or ``[*, A]`` of two Gaussians, in float64."""
    batch = tuple(draw(st.lists(st.integers(1, 4), max_size=2)))
    width, shared = draw(st.integers(1, 4)), draw(st.booleans())
    rng = torch.Generator().manual_seed(draw(st.integers(0, 2**31 - 1)))

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=rng, dtype=torch.float64)

    scale = (width,) if shared else (*batch, width)
    return normal(*batch, width), normal(*scale).exp(), normal(*batch, width), normal(*scale).exp()


@given(gaussians(), st.integers(0, 100))
def test_a_diagonal_gaussian_is_torchs_independent_normal(parameters, seed):
    loc, scale, loc2, scale2 = parameters
    ours, theirs = DiagonalGaussian(loc, scale), vector_normal(loc, scale.expand_as(loc))
    action = loc2
    assert (ours.batch_shape, ours.event_shape) == (theirs.batch_shape, theirs.event_shape)
    assert torch.allclose(ours.log_prob(action), theirs.log_prob(action), rtol=1e-10, atol=1e-12)
    assert torch.allclose(ours.entropy(), theirs.entropy(), rtol=1e-10, atol=1e-12)
    assert ours.entropy().shape == theirs.entropy().shape
    assert torch.allclose(ours.mean_entropy(), theirs.entropy().mean(), rtol=1e-10, atol=1e-12)
    for name in ("mean", "mode", "stddev", "variance"):
        assert torch.allclose(getattr(ours, name), getattr(theirs, name), rtol=1e-12)
    assert torch.equal(ours.deterministic_sample, theirs.mean)
    kl = kl_divergence(ours, DiagonalGaussian(loc2, scale2))
    expected = kl_divergence(theirs, vector_normal(loc2, scale2.expand_as(loc)))
    assert torch.allclose(kl, expected, rtol=1e-9, atol=1e-10)
    assert torch.equal(kl_divergence(ours, ours), torch.zeros(ours.batch_shape, dtype=torch.float64))
    for draw in ("sample", "rsample"):
        for shape in ((), (3,)):
            torch.manual_seed(seed)
            a = getattr(ours, draw)(shape)
            torch.manual_seed(seed)
            assert torch.equal(a, getattr(theirs, draw)(shape))
    wide = ours.expand((2, *ours.batch_shape))
    assert torch.allclose(wide.log_prob(action), theirs.log_prob(action).expand(2, *ours.batch_shape))


@given(gaussians())
def test_gradients_through_a_diagonal_gaussian_are_those_of_torchs_independent_normal(parameters):
    def gradients(make) -> list[torch.Tensor]:
        loc, scale = parameters[0].clone().requires_grad_(), parameters[1].clone().requires_grad_()
        dist = make(loc, scale)
        torch.manual_seed(0)
        sample = dist.rsample()
        old = make(parameters[2], parameters[3])
        total = sample.square().sum() + dist.log_prob(parameters[2]).sum() + dist.entropy().sum()
        total = total + kl_divergence(old, dist).sum() + dist.log_prob(sample).sum()
        total = total + (dist.mean_entropy() if type(dist) is DiagonalGaussian else dist.entropy().mean())
        return list(torch.autograd.grad(total, [loc, scale]))

    theirs = gradients(lambda loc, scale: vector_normal(loc, scale.expand_as(loc)))
    for a, b in zip(gradients(DiagonalGaussian), theirs, strict=True):
        assert torch.allclose(a, b, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("shape", [(2,), (7, 2)], ids=["shared std", "own std"])
def test_in_float32_log_probabilities_are_torchs_to_the_last_bit(shape):
    torch.manual_seed(0)
    loc, scale, action = torch.randn(7, 2), torch.rand(shape) + 0.1, torch.randn(7, 2)
    expected = torch.distributions.Normal(loc, scale).log_prob(action).sum(-1)
    assert torch.equal(DiagonalGaussian(loc, scale).log_prob(action), expected)


def test_a_sample_has_no_gradient():
    dist = DiagonalGaussian(torch.zeros(2, 3, requires_grad=True), torch.ones(3, requires_grad=True))
    assert not dist.sample().requires_grad
    assert dist.rsample().requires_grad


@pytest.mark.parametrize("shape", [(4,), (4, 3), (1,)])
def test_actions_of_another_width_are_refused_since_they_would_broadcast(shape):
    with pytest.raises(ValueError, match="are no vectors of width 2"):
        DiagonalGaussian(torch.zeros(4, 2), torch.ones(2)).log_prob(torch.zeros(shape))


def test_a_diagonal_gaussian_describes_itself():
    dist = DiagonalGaussian(torch.zeros(4, 2), torch.ones(2))
    assert "DiagonalGaussian" in repr(dist)
    assert dist.support.check(torch.zeros(4, 2)).all()
    for name, constraint in dist.arg_constraints.items():
        assert constraint.check(getattr(dist, name)).all()


# -- the normaliser ----------------------------------------------------------------------------


@given(
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=5),
    scale=st.sampled_from([1e-2, 1.0, 1e3]),
    seed=st.integers(0, 2**31 - 1),
)
def test_the_normaliser_is_rsl_rls_and_has_the_moments_of_all_batches_together(lengths, scale, seed):
    rng = torch.Generator().manual_seed(seed)
    batches = [
        scale * torch.randn(length, 3, generator=rng, dtype=torch.float64) + scale * k
        for k, length in enumerate(lengths)
    ]
    ours, theirs = EmpiricalNormalizer(3).double(), rsl_rl_modules.EmpiricalNormalization(3).double()
    for batch in batches:
        ours.update(batch)
        theirs.update(batch)
    pooled = torch.cat(batches)
    assert ours.count == theirs.count == len(pooled)
    for got, rsl_rl, expected in (
        (ours.mean, theirs.mean, pooled.mean(0)),
        (ours.var, theirs._var[0], pooled.var(0, correction=0)),
        (ours.std, theirs.std, pooled.std(0, correction=0)),
    ):
        assert torch.equal(got, rsl_rl)
        assert torch.allclose(got, expected, rtol=1e-6, atol=1e-7 * scale)
    x = torch.randn(4, 2, 3, generator=rng, dtype=torch.float64)
    assert torch.equal(ours(x), theirs(x))


def test_before_its_first_update_the_normaliser_divides_by_one_plus_eps():
    x = torch.randn(5, 3)
    assert torch.equal(EmpiricalNormalizer(3, eps=0.5)(x), x / 1.5)


def test_the_normaliser_learns_nothing_in_eval_mode_from_no_data_or_through_gradients():
    normalizer = EmpiricalNormalizer(3)
    normalizer.update(torch.randn(5, 3))
    before = {name: value.clone() for name, value in normalizer.state_dict().items()}
    normalizer.eval().update(torch.randn(5, 3))
    normalizer.train().update(torch.zeros(0, 3))
    after = normalizer.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    normalizer.update(torch.randn(5, 3, requires_grad=True))
    assert not any(value.requires_grad for value in normalizer.state_dict().values())


def test_a_normaliser_is_restored_from_its_state_dict():
    normalizer, other = EmpiricalNormalizer(3), EmpiricalNormalizer(3)
    for _ in range(2):
        normalizer.update(torch.randn(5, 3))
    other.load_state_dict(normalizer.state_dict())
    batch = torch.randn(7, 3)
    for x in (normalizer, other):
        x.update(batch)
    assert torch.equal(normalizer(batch), other(batch))


def test_a_network_normalises_its_concatenated_groups_by_the_whole_window():
    critic = MLPCritic(["a", "b"], 5, normalize_observations=True)
    window = observations(6, 4, a=3, b=2)
    critic.update_normalizer(window)
    x = torch.cat([window["a"], window["b"]], -1)
    flat = x.flatten(0, 1)
    expected = (x - flat.mean(0)) / (flat.std(0, correction=0) + 1e-2)
    assert torch.allclose(critic.features(window), expected, atol=1e-5)
    MLPCritic(["a", "b"], 5).update_normalizer(window)  # one without a normaliser has nothing to do


@pytest.mark.parametrize("when", ["after", "before"])
def test_the_first_ratio_of_an_update_is_one_since_the_normaliser_moves_after_it(when):
    torch.manual_seed(0)
    actor = MLPActor(["observation"], 3, 2, hidden_dims=(32, 32), normalize_observations=True)
    critic = MLPCritic(["observation"], 3, hidden_dims=(32, 32), normalize_observations=True)
    policy, loss = ActorCritic(actor, critic), RSLPPOLoss(actor, critic)
    stepper, gae = KLAdaptiveStepper(actor, critic), RolloutGAE(value_network=critic)
    for window in range(3):
        rollout = make_rollout(Sizes(16, 8, seed=window), torch.float32).exclude("action")
        rollout["observation"] += window
        with torch.no_grad():
            acted = torch.stack([policy(row) for row in rollout.unbind(0)])
        buffer = in_buffer(acted, sampler=MiniBatchSampler(4, 2))
        gae(buffer)
        if when == "before":
            actor.update_normalizer(buffer.window)
        for number, batch in enumerate(buffer):
            ratio = (actor.get_dist(batch).log_prob(batch["action"]) - batch["action_log_prob"]).exp()
            worst = float((ratio.detach() - 1).abs().max())
            if number == 0 and when == "after":
                assert worst <= 1e-6
            if number == 0 and when == "before":
                assert worst > 1e-3, "a normaliser that moves before the update does not show"
            if number == 7:
                assert worst > 1e-3, "an update that changes nothing proves nothing"
            stepper.update(loss, batch)
        if when == "after":
            for network in (actor, critic):
                network.update_normalizer(buffer.window)


# -- both together -----------------------------------------------------------------------------


def torchrl_actor() -> ProbabilisticActor:
    net = torch.nn.Sequential(torch.nn.Linear(3, 4), NormalParamExtractor())
    return ProbabilisticActor(
        TensorDictModule(net, ["observation"], ["loc", "scale"]),
        in_keys=["loc", "scale"],
        distribution_class=IndependentNormal,
        return_log_prob=True,
    )


@pytest.mark.parametrize("kind", ["ours", "torchrl"])
def test_actor_critic_is_tensordict_sequential_with_less_overhead(kind):
    if kind == "ours":
        actor, critic = make_actor(), make_critic(("observation", "privileged"), 5)
        td = observations(4, observation=3, privileged=2).double()
    else:
        actor, critic = torchrl_actor(), ValueOperator(torch.nn.Linear(3, 1), ["observation"])
        td = observations(4)
    ours, theirs = ActorCritic(actor, critic), TensorDictSequential(actor, critic)
    assert ours.in_keys == list(theirs.in_keys)
    assert set(ours.out_keys) == set(theirs.out_keys)
    torch.manual_seed(0)
    a = ours(td.clone())
    torch.manual_seed(0)
    b = theirs(td.clone())
    assert set(a.keys()) == set(b.keys())
    assert all(torch.equal(a[key], b[key]) for key in a.keys())
    assert list(ours.parameters()) == [*actor.parameters(), *critic.parameters()]


def test_a_checkpoint_restores_an_actor_with_its_normaliser():
    first = make_actor(normalize_observations=True, std_type="log")
    first.update_normalizer(make_rollout(Sizes(5, 4)))
    first.std_param.data.fill_(math.log(0.3))
    second = make_actor(seed=9, normalize_observations=True, std_type="log")
    second.load_state_dict(first.state_dict())
    td = observations(4).double()
    assert torch.equal(first.get_dist(td).loc, second.get_dist(td).loc)
    assert torch.equal(first.std, second.std)


def test_hooks_see_every_layer_of_a_network_whose_elus_do_not_work_in_place():
    actor = MLPActor(["observation"], 3, 2, hidden_dims=(8, 8))
    x = torch.randn(5, 3)
    expected = actor.mlp(x)
    seen = {}
    for number, layer in enumerate(actor.mlp):
        if isinstance(layer, torch.nn.ELU):
            layer.inplace = False
        layer.register_forward_hook(lambda layer, args, out, number=number: seen.update({number: out}))
        layer.register_full_backward_hook(lambda layer, gradients, out: None)
    result = actor.mlp(x.requires_grad_())
    result.sum().backward()
    assert torch.equal(result, expected)
    assert torch.equal(seen[0], torch.nn.functional.linear(x, actor.mlp[0].weight, actor.mlp[0].bias))
    assert torch.equal(seen[1], torch.nn.functional.elu(seen[0]))
