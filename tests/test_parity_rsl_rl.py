"""One whole update from the same weights, rollout and permutation ends in rsl-rl-lib's weights.

Whole means RSL-RL's own ``PPO.compute_returns`` and ``PPO.update`` on its own models: 5 epochs of 4
mini-batches, KL-adaptive learning rate, clipping of either network's gradient, observation statistics after
the update. Single updates from identical weights are compared: over several, rounding flips a decision about
the learning rate sooner or later.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from oracles_objectives import (
    Problem,
    all_tensors,
    copies_of,
    default_dtype,
    in_buffer,
    rsl_rl_ppo,
    rsl_rl_rollout,
)

from torchrl_rslstorage import KLAdaptiveStepper, MiniBatchSampler, RolloutGAE, RSLPPOLoss

BOTH = ("observation", "privileged")
SHAPES = {
    "24 x 16": Problem(24, 16),
    "7 x 5, one cell is never seen": Problem(7, 5, action_dim=1, std_type="log", activation="tanh"),
    "10 x 3, asymmetric, normalised": Problem(
        10, 3, action_dim=4, hidden_dims=(16,), normalize_observations=True, critic_groups=BOTH
    ),
}
NOT_DIVISIBLE = SHAPES["7 x 5, one cell is never seen"]
EXACT = {"gamma": 31 / 32, "lam": 15 / 16}
"""Discounts that float32 holds exactly: RSL-RL rounds them to it, whatever the dtype of everything else."""
TOLERANCE = {torch.float32: 1e-6, torch.float64: 1e-12}


class Differences(dict[str, float]):
    """The largest absolute difference of each kind of tensor, and whether the update did anything."""

    learning_rates: tuple[float, float]
    moved: float


def update_both(
    problem: Problem, seed: int, dtype: torch.dtype = torch.float32, **options: Any
) -> Differences:
    """One update by RSL-RL, one by this package; what they differ in afterwards."""
    options = {**EXACT, **options}
    with default_dtype(dtype):
        torch.manual_seed(seed)
        ppo = rsl_rl_ppo(problem, **options)
        if problem.normalize_observations:  # statistics of an earlier iteration
            earlier = torch.stack([problem.observe() for _ in range(4)]).flatten(0, 1)
            ppo.actor.update_normalization(earlier)
            ppo.critic.update_normalization(earlier)
        actor, critic = copies_of(ppo, problem)
        before = [tensor.clone() for _, tensor in all_tensors(actor)]
        rollout = rsl_rl_rollout(ppo, problem)

        torch.manual_seed(seed)
        ppo.update()

        torch.manual_seed(seed)
        sampler = MiniBatchSampler(ppo.num_mini_batches, ppo.num_learning_epochs, drop_remainder=True)
        buffer = in_buffer(rollout, sampler=sampler)
        per_batch = ppo.normalize_advantage_per_mini_batch
        gae = RolloutGAE(ppo.gamma, ppo.lam, critic, time_out="rsl_rl", normalize=not per_batch)
        loss = RSLPPOLoss(
            actor,
            critic,
            clip_epsilon=ppo.clip_param,
            clip_value=ppo.use_clipped_value_loss,
            critic_coeff=ppo.value_loss_coef,
            entropy_coeff=ppo.entropy_coef,
            normalize_advantage=per_batch,
        )
        stepper = KLAdaptiveStepper(
            actor,
            critic,
            learning_rate=options.get("learning_rate", 1e-3),
            max_grad_norm=ppo.max_grad_norm,
            schedule=ppo.schedule,
            desired_kl=ppo.desired_kl,
        )
        window = gae(buffer)
        for batch in buffer:
            stepper.update(loss, batch)
        for network in (actor, critic):
            network.update_normalizer(window)

    out = Differences()
    out.learning_rates = (float(stepper.learning_rate), float(ppo.learning_rate))
    out["learning rate"] = abs(out.learning_rates[0] - out.learning_rates[1])
    for network, ours, theirs in (("actor", actor, ppo.actor), ("critic", critic, ppo.critic)):
        for (name, a), (_, b) in zip(all_tensors(ours), all_tensors(theirs), strict=True):
            out[f"{network} {name}"] = float((a - b.view_as(a)).abs().max())
    out.moved = max(float((a - b).abs().max()) for a, (_, b) in zip(before, all_tensors(actor), strict=True))
    return out


def assert_equal(differences: Differences, dtype: torch.dtype) -> None:
    wrong = {name: value for name, value in differences.items() if not value <= TOLERANCE[dtype]}
    assert not wrong
    assert differences.moved > 1e-3, "an update that changes nothing proves nothing"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
@pytest.mark.parametrize("problem", SHAPES.values(), ids=SHAPES.keys())
@pytest.mark.parametrize("seed", range(3))
def test_a_whole_update_ends_in_rsl_rls_parameters_statistics_and_learning_rate(problem, seed, dtype):
    assert_equal(update_both(problem, seed, dtype), dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
@pytest.mark.parametrize(
    "options",
    [
        {"normalize_advantage_per_mini_batch": True},
        {"schedule": "fixed"},
        {"use_clipped_value_loss": False},
        {"entropy_coef": 0.0},
        {"value_loss_coef": 0.5, "clip_param": 0.1, "max_grad_norm": 0.3},
        {"num_learning_epochs": 2, "num_mini_batches": 3, "learning_rate": 3e-4, "desired_kl": 0.003},
    ],
    ids=str,
)
def test_every_switch_of_rsl_rls_has_its_counterpart(options, dtype):
    assert_equal(update_both(NOT_DIVISIBLE, 11, dtype, **options), dtype)


def test_rsl_rls_default_discounts_in_its_default_dtype():
    assert_equal(update_both(SHAPES["24 x 16"], 12, gamma=0.99, lam=0.95), torch.float32)


def test_the_learning_rate_is_adapted_in_both_directions():
    rates = {
        update_both(NOT_DIVISIBLE, seed, desired_kl=kl).learning_rates
        for seed in (0, 1)
        for kl in (1e-4, 1.0)
    }
    ours = {rate for rate, _ in rates}
    assert min(ours) < 1e-3 < max(ours)


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        (
            "bootstraps",
            lambda m: m.setattr(RolloutGAE, "__init__", _with(RolloutGAE, time_out="final_observation")),
        ),
        ("normalises", lambda m: m.setattr(RolloutGAE, "__init__", _with(RolloutGAE, normalize=False))),
        ("clips values", lambda m: m.setattr(RSLPPOLoss, "__init__", _with(RSLPPOLoss, clip_value=False))),
        ("clips jointly", lambda m: m.setattr(KLAdaptiveStepper, "__init__", _jointly(KLAdaptiveStepper))),
    ],
)
def test_parity_notices_a_switch_that_is_set_otherwise(monkeypatch, name, wrong):
    wrong(monkeypatch)
    differences = update_both(NOT_DIVISIBLE, 0, torch.float64)
    assert max(differences.values()) > 1e-5, f"how ours {name} does not show"


def _with(cls: type, **forced: Any) -> Any:
    original = cls.__init__
    return lambda self, *args, **options: original(self, *args, **{**options, **forced})


def _jointly(cls: type) -> Any:
    original = cls.__init__

    def init(self, *args, **options):
        original(self, *args, **options)
        self.optimizer._norms = [self.optimizer._gradient]

    return init


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
@pytest.mark.parametrize("problem", SHAPES.values(), ids=SHAPES.keys())
def test_a_hundred_seeds_end_in_rsl_rls_parameters(problem, dtype):
    worst: dict[str, float] = {}
    for seed in range(100):
        differences = update_both(problem, seed, dtype)
        assert_equal(differences, dtype)
        worst = {name: max(value, worst.get(name, 0.0)) for name, value in differences.items()}
    print("largest differences over 100 seeds:", {name: f"{value:.1e}" for name, value in worst.items()})
