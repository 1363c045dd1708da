"""Mirrors, and the loss on mirrored copies: what is appended, what stays the original's, what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from oracles_objectives import make_actor, make_critic
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import set_composite_lp_aggregate
from test_ppo_loss import composite, continuous, discrete, torchrl_critic
from test_recurrent_training import scalars_and_gradients
from tiny import equal, make_trainer, parameters
from torch import Tensor
from torchrl.modules import OneHotCategorical, TanhNormal

from torchrl_rslstorage import (
    KLAdaptiveStepper,
    Mirror,
    MLPActor,
    MLPCritic,
    PendulumEnv,
    PPOConfig,
    RSLPPOLoss,
    Symmetry,
    rsl_rl_augmentation,
)

PENDULUM = {"observation": Mirror([0, 1, 2], [1, -1, -1]), "action": Mirror([0], [-1])}
"""cos θ, sin θ and θ̇ of the pendulum in the mirror, and its torque."""
BOTH: dict[str, Any] = {"use_data_augmentation": True, "use_mirror_loss": True, "mirror_loss_coeff": 0.5}
USES = pytest.mark.parametrize(
    "uses",
    [BOTH, {"use_data_augmentation": True}, {"use_mirror_loss": True, "mirror_loss_coeff": 0.5}, {}],
    ids=["both", "augmentation", "mirror loss", "measured only"],
)

# -- mirrors -------------------------------------------------------------------------------------


@st.composite
def mirrors(draw: st.DrawFn) -> Mirror:
    width = draw(st.integers(1, 6))
    order = draw(st.permutations(range(width)))
    return Mirror(order, draw(st.lists(st.sampled_from([1, -1]), min_size=width, max_size=width)))


@given(mirror=mirrors(), shape=st.lists(st.integers(1, 3), max_size=3), dtype=st.sampled_from([
    torch.float64, torch.float32, torch.bfloat16, torch.int64,
]))  # fmt: skip
def test_each_component_of_an_image_is_the_one_that_is_seen_there(mirror, shape, dtype):
    width = len(mirror.permutation)
    x = torch.arange(torch.Size([*shape, width]).numel()).view(*shape, width).to(dtype) + 1
    image = mirror(x)
    assert image.dtype is dtype and image.shape == x.shape
    for i, (source, sign) in enumerate(zip(mirror.permutation.tolist(), mirror.signs.tolist(), strict=True)):
        assert torch.equal(image[..., i], x[..., source] * int(sign))


def test_names_make_the_mirror_of_a_quadruped():
    legs = ("FL", "FR", "RL", "RR")
    names = [f"{leg}_{joint}" for joint in ("hip", "thigh") for leg in legs] + ["base_y", "base_x"]
    mirror = Mirror.of_names(names, swap={"FL": "FR", "RL": "RR"}, negate=["*_hip", "base_y"])
    named = dict(zip(names, mirror(torch.arange(1.0, 11.0)).tolist(), strict=True))
    assert named == {
        "FL_hip": -2, "FR_hip": -1, "RL_hip": -4, "RR_hip": -3,
        "FL_thigh": 6, "FR_thigh": 5, "RL_thigh": 8, "RR_thigh": 7,
        "base_y": -9, "base_x": 10,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Mirror([0, 0]), r"every index from 0 to 1 once, got \[0, 0\]"),
        (lambda: Mirror([1, 2]), "every index from 0 to 1 once"),
        (lambda: Mirror([]), "every index"),
        (lambda: Mirror([1, 0], [1]), "`signs` must be 2 numbers 1 or -1"),
        (lambda: Mirror([1, 0], [1, 0.5]), "`signs` must be 2 numbers 1 or -1"),
        (lambda: Mirror.of_names(["L", "L"], {}), "must differ"),
        (lambda: Mirror.of_names(["L_hip"], {"L": "R"}), "'L_hip' mirrors to 'R_hip', which is not in"),
        (lambda: Mirror.of_names(["x"], {}, negate=["y*"]), r"'y\*' in `negate` fits none"),
        (lambda: Mirror([1, 0])(torch.zeros(4, 3)), r"has shape \(4, 3\): its last dimension must be 2"),
        (lambda: Symmetry(PENDULUM, mirror_loss_coeff=-1.0), "`mirror_loss_coeff` must be zero or more"),
        (lambda: Symmetry({}), "`augment` must be mirrors by key"),
        (lambda: Symmetry([]), "`augment` must be mirrors by key"),
        (lambda: Symmetry({"action": [1, 0]}), "`augment` must be mirrors by key"),
        (lambda: Symmetry(None), "`augment` must be mirrors by key"),
        (lambda: Symmetry(PENDULUM, states=[1]), "`states` must be mirrors by key"),
        (
            lambda: Symmetry([PENDULUM, {"action": Mirror([0])}]),
            "All tables of `augment` must mirror the same keys, got 'observation', 'action' and 'action'",
        ),
    ],
)
def test_what_is_no_mirror_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


# -- flat mini-batches ---------------------------------------------------------------------------

VECTORS = {"observation": Mirror([1, 0, 2], [1, 1, -1]), "action": Mirror([1, 0], [1, -1])}


def flat_problem(actor: Any = None, critic: Any = None, size: int = 7) -> tuple[Any, Any, TensorDict]:
    """An update's mini-batch in float64: the networks have moved since it was collected."""
    actor = make_actor() if actor is None else actor
    critic = make_critic() if critic is None else critic
    torch.manual_seed(3)
    seen = {"observation": torch.randn(size, 3).double(), "privileged": torch.randn(size, 2).double()}
    with torch.no_grad():
        batch = critic(actor(TensorDict(seen, [size])))
        for p in (*actor.parameters(), *critic.parameters()):
            p += 0.1 * torch.randn_like(p)
    batch["advantage"], batch["value_target"] = torch.randn(size, 1).double(), torch.randn(size, 1).double()
    return actor, critic, batch


def mirrored(batch: TensorDictBase, table: dict[str, Mirror]) -> TensorDict:
    """A copy of ``batch`` with what ``table`` mirrors."""
    return batch.clone().update({key: mirror(batch[key]) for key, mirror in table.items()})


ACTORS = {
    "MLPActor": make_actor,
    "TanhNormal": lambda: continuous(TanhNormal),
    "OneHotCategorical": lambda: discrete(OneHotCategorical),
}
TURN = {"observation": Mirror([2, 0, 1]), "action": Mirror([1, 0, 3, 2])}


@pytest.mark.parametrize("name", ACTORS)
@pytest.mark.parametrize("functional", [False, True])
@pytest.mark.parametrize("clip_value", [True, False])
@pytest.mark.filterwarnings("ignore:RSLPPOLoss has no exact")
def test_the_loss_is_that_of_the_mini_batch_with_its_copies_appended(name, functional, clip_value):
    actor, critic, batch = flat_problem(ACTORS[name](), torchrl_critic())
    tables = [TURN] if name == "OneHotCategorical" else [VECTORS, {**VECTORS, "action": Mirror([0, 1])}]
    options: dict[str, Any] = {"functional": functional, "clip_value": clip_value}
    torch.manual_seed(0)
    terms = RSLPPOLoss(actor, critic, symmetry=Symmetry(tables, **BOTH), **options)(batch)
    appended = torch.cat([batch, *(mirrored(batch, table) for table in tables)])
    expected = RSLPPOLoss(actor, critic, **options)(appended)
    torch.manual_seed(0)
    alone = RSLPPOLoss(actor, critic, **options)(batch)
    for key in ("loss_objective", "loss_critic"):
        torch.testing.assert_close(terms[key], expected[key])
        assert not torch.isclose(terms[key], alone[key])
    for key in ("loss_entropy", "kl", "entropy", "clip_fraction", "explained_variance"):
        assert torch.equal(terms[key], alone[key]), f"{key} is of the original alone"


def test_the_mirror_loss_is_the_square_of_what_the_policy_and_its_image_differ_in():
    actor, critic, batch = flat_problem()
    symmetry = Symmetry(VECTORS, use_mirror_loss=True, mirror_loss_coeff=0.25)
    loss = RSLPPOLoss(actor, critic, symmetry=symmetry)
    squares = []
    for sample in batch.unbind(0):
        x = sample["observation"]
        left = actor.get_dist(TensorDict({"observation": x[[1, 0, 2]] * torch.tensor([1, 1, -1])}, [])).loc
        right = actor.get_dist(TensorDict({"observation": x}, [])).loc.detach()
        squares += [(left[0] - right[1]) ** 2, (left[1] + right[0]) ** 2]
    expected = torch.stack(squares).mean()
    terms = loss(batch)
    torch.testing.assert_close(terms["symmetry"], expected.detach())
    torch.testing.assert_close(terms["loss_symmetry"], 0.25 * expected)
    parameters = list(actor.mlp.parameters())
    for a, b in zip(
        torch.autograd.grad(terms["loss_symmetry"], parameters),
        torch.autograd.grad(0.25 * expected, parameters),
        strict=True,
    ):
        torch.testing.assert_close(a, b)


@USES
def test_what_is_returned_is_what_out_keys_say_and_only_learned_symmetry_has_a_gradient(uses):
    actor, critic, batch = flat_problem()
    loss = RSLPPOLoss(actor, critic, symmetry=Symmetry(VECTORS, **uses))
    terms = loss(batch)
    assert list(terms.keys()) == loss.out_keys
    assert not terms["symmetry"].requires_grad
    assert ("loss_symmetry" in terms) == uses.get("use_mirror_loss", False)
    scalars_and_gradients(loss, batch)


@USES
def test_an_identity_changes_nothing(uses):
    actor, critic, batch = flat_problem()
    same = {"observation": Mirror.identity(3), "action": Mirror.identity(2)}
    plain, gradients = scalars_and_gradients(RSLPPOLoss(actor, critic), batch)
    terms, theirs = scalars_and_gradients(
        RSLPPOLoss(actor, critic, symmetry=Symmetry([same, same], **uses)), batch
    )
    assert terms.pop("symmetry") == 0
    assert terms.pop("loss_symmetry", 0) == 0
    for key, value in plain.items():
        torch.testing.assert_close(terms[key], value, rtol=1e-15, atol=0)
    for a, b in zip(gradients, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-13, atol=1e-15)


def odd(actor: MLPActor) -> MLPActor:
    """Without biases, and blind for cos θ, a tanh network of what changes its sign changes its own."""
    with torch.no_grad():
        for name, p in actor.mlp.named_parameters():
            if "bias" in name:
                p.zero_()
        actor.mlp[0].weight[:, 0] = 0
    return actor


def test_a_symmetric_policy_has_a_mirror_loss_of_exactly_zero():
    actor, critic = MLPActor(["observation"], 3, 1, hidden_dims=(8, 8), activation="tanh"), make_critic()
    _, _, batch = flat_problem(actor.double(), critic)
    loss = RSLPPOLoss(odd(actor), critic, symmetry=Symmetry(PENDULUM, **BOTH))
    assert loss(batch)["symmetry"] == 0
    with torch.no_grad():
        actor.mlp[0].bias += 0.1
    assert loss(batch)["symmetry"] > 0


def test_a_window_of_two_dimensions_is_its_cells():
    actor, critic, batch = flat_problem(size=6)
    loss = RSLPPOLoss(actor, critic, symmetry=Symmetry([VECTORS, VECTORS], **BOTH))
    expected = loss(batch)
    for key, value in loss(batch.view(2, 3)).items():
        torch.testing.assert_close(value, expected[key])


def test_copies_by_a_function_are_those_by_tables():
    actor, critic, batch = flat_problem()
    expected = RSLPPOLoss(actor, critic, symmetry=Symmetry([VECTORS, PENDULUM | VECTORS], **BOTH))(batch)

    def augment(td: TensorDictBase) -> TensorDictBase:
        image = td.clone().update({key: VECTORS[key](value) for key, value in td.items()})
        return torch.cat([td, image, image])

    for key, value in RSLPPOLoss(actor, critic, symmetry=Symmetry(augment, **BOTH))(batch).items():
        assert torch.equal(value, expected[key])


def test_a_mirror_loss_alone_asks_for_no_mirror_of_what_only_the_critic_sees():
    actor, critic, batch = flat_problem(critic=make_critic(("observation", "privileged"), 5))
    only = Symmetry(VECTORS, use_mirror_loss=True, mirror_loss_coeff=1.0)
    assert RSLPPOLoss(actor, critic, symmetry=only)(batch)["loss_symmetry"] > 0
    with pytest.raises(
        ValueError, match=r"no mirror for 'privileged'.*add it to `augment` \(Mirror.identity"
    ):
        RSLPPOLoss(actor, critic, symmetry=Symmetry(VECTORS, use_data_augmentation=True))


def test_keys_may_be_nested():
    actor, critic = MLPActor([("agent", "obs")], 3, 1), MLPCritic([("agent", "obs")], 3)
    with torch.no_grad():
        batch = critic(actor(TensorDict({"agent": {"obs": torch.randn(5, 3)}}, [5])))
    batch["advantage"], batch["value_target"] = torch.randn(5, 1), torch.randn(5, 1)
    table = {("agent", "obs"): PENDULUM["observation"], "action": PENDULUM["action"]}
    assert RSLPPOLoss(actor, critic, symmetry=Symmetry(table, **BOTH))(batch)["loss_symmetry"] > 0


def test_several_actions_are_refused():
    with set_composite_lp_aggregate(False), pytest.raises(ValueError, match=r"one action vector.*'steer'"):
        RSLPPOLoss(composite(), torchrl_critic(), symmetry=Symmetry(VECTORS))


# -- functions that return something else --------------------------------------------------------


@pytest.mark.parametrize(
    ("augment", "message"),
    [
        (lambda td: None, r"must return a TensorDict \[k·B\], got NoneType"),
        (lambda td: td, r"made 7 samples of 7: it must return the 7 originals, followed by"),
        (lambda td: torch.cat([td, td[:3]]), "made 10 samples of 7"),
        (lambda td: torch.cat([td, td]).exclude("observation"), "was given 'observation' but did not return"),
        (
            lambda td: torch.cat([td, td]).apply(lambda x: x[..., :1]),
            r"made float64 \(14, 1\) of 'observation', expected float64 \(14, 3\)",
        ),
        (
            lambda td: torch.cat([td, td]).float(),
            r"made float32 \(14, 3\) of 'observation', expected float64",
        ),
        (lambda td: torch.cat([-td, td]), "first 7 samples of .* are not those that it was given"),
        (lambda td: torch.cat([-td, -td]), "first 7 samples of .* are not those that it was given"),
        (rsl_rl_augmentation(lambda env, obs, actions: obs), "must return observations and actions, got"),
        (
            rsl_rl_augmentation(lambda env, obs, actions: (torch.cat([obs, obs]), actions)),
            r"as many observations as actions.*got \{'observations': 14, 'actions': 7\}",
        ),
        (
            rsl_rl_augmentation(lambda env, obs, actions: (torch.cat([obs, obs]), None)),
            r"as many observations as actions.*got \{'observations': 14\}",
        ),
    ],
)
def test_a_function_that_returns_something_else_is_told_what_was_expected(augment, message):
    actor, critic, batch = flat_problem()
    with pytest.raises(ValueError, match=message) as refused:
        RSLPPOLoss(actor, critic, symmetry=Symmetry(augment, **BOTH))(batch)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("uses", [BOTH, {"use_mirror_loss": True, "mirror_loss_coeff": 1.0}, {}])
def test_a_function_may_mirror_in_place(uses):
    def negates(td: TensorDictBase) -> TensorDictBase:
        originals = td.clone()
        for value in td.values():
            value.neg_()
        return torch.cat([originals, td])

    def as_rsl_rl(env: Any, obs: Any, actions: Any) -> tuple[Any, Any]:
        both = None if obs is None else negates(obs)
        return both, None if actions is None else torch.cat([actions.clone(), actions.neg_()])

    actor, critic, batch = flat_problem()
    before, expected = batch.clone(), None
    for augment in (lambda td: torch.cat([td, -td]), negates, rsl_rl_augmentation(as_rsl_rl)):
        loss = RSLPPOLoss(actor, critic, symmetry=Symmetry(augment, **uses))
        _, gradients = scalars_and_gradients(loss, batch)
        assert (batch == before).all(), "the mini-batch was written into"
        expected = expected or gradients
        assert equal(gradients, expected)


def test_a_function_must_make_as_many_copies_of_actions_alone():
    def augment(td: TensorDictBase) -> TensorDictBase:
        return torch.cat([td, td, td] if "observation" in td.keys() else [td, td])

    actor, critic, batch = flat_problem()
    with pytest.raises(ValueError, match="makes 1 mirrored copies of actions alone, but 2 of observations"):
        RSLPPOLoss(actor, critic, symmetry=Symmetry(augment, **BOTH))(batch)


def test_a_mirror_of_another_width_names_the_entry():
    actor, critic, batch = flat_problem()
    wrong = {**VECTORS, "observation": Mirror.identity(4)}
    with pytest.raises(ValueError, match=r"mirror of 4 components cannot show 'observation'.*\(7, 3\)"):
        RSLPPOLoss(actor, critic, symmetry=Symmetry(wrong, **BOTH))(batch)


# -- training ------------------------------------------------------------------------------------


@pytest.mark.slow
@USES
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # torch 2.13's own compiler uses it
def test_a_compiled_step_with_symmetry_makes_the_eager_numbers_up_to_rounding(uses):
    def train(compile: bool) -> tuple[list[Tensor], Tensor]:
        actor, critic, batch = flat_problem()
        loss = RSLPPOLoss(actor, critic, symmetry=Symmetry(VECTORS, **uses))
        stepper = KLAdaptiveStepper(actor, critic, compile=compile)
        metrics = torch.stack([stepper.update(loss, batch) for _ in range(4)])
        assert stepper.metric_names == loss.out_keys
        return parameters(actor, critic), metrics

    for eager, compiled in zip(train(False), train(True), strict=True):
        torch.testing.assert_close(compiled, eager, rtol=1e-4, atol=1e-6)


def symmetric_trainer(**options: Any) -> Any:
    return make_trainer(
        PendulumEnv(16, seed=1, max_episode_steps=20),
        num_steps=8,
        num_iterations=6,
        symmetry=Symmetry(PENDULUM, **BOTH),
        **options,
    )


def test_training_with_symmetry_reports_it_and_a_resumed_run_ends_in_the_same_numbers(tmp_path):
    whole = symmetric_trainer()
    whole.train()
    stopped = symmetric_trainer(checkpoint_dir=tmp_path, save_interval=3)
    stopped.total_frames = 3 * 8 * 16
    stopped.train()
    resumed = symmetric_trainer()
    resumed.load_checkpoint(stopped.latest_checkpoint)
    resumed.train()
    assert whole.metrics["Loss/symmetry"] > 0
    timeless = [
        {name: value for name, value in trainer.metrics.items() if not name.startswith("Perf/")}
        for trainer in (whole, resumed)
    ]
    assert timeless[0] == timeless[1]
    assert equal(parameters(whole.actor, whole.critic), parameters(resumed.actor, resumed.critic))


def test_a_mirror_loss_makes_a_policy_more_symmetric_than_none():
    def after(**uses: Any) -> float:
        trainer = make_trainer(
            PendulumEnv(32, seed=1, max_episode_steps=20),
            num_steps=16,
            num_iterations=15,
            config=PPOConfig(num_learning_epochs=4, num_mini_batches=2),
            symmetry=Symmetry(PENDULUM, **uses),
        )
        trainer.train()
        return trainer.metrics["Loss/symmetry"]

    measured = after()
    assert after(use_mirror_loss=True, mirror_loss_coeff=10.0) < 0.1 * measured
