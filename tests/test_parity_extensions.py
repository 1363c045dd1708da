"""One whole update with symmetry or curiosity ends in rsl-rl-lib's weights and reports its numbers.

Both start from the same weights, rollout and permutation, as in test_parity_rsl_rl.py. The intrinsic rewards
are RSL-RL's own, which it adds while it collects; here they are added to the finished window.
"""

from __future__ import annotations

from typing import Any, NamedTuple

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
from rsl_rl.algorithms import PPO
from rsl_rl.extensions import RandomNetworkDistillation as RSLRLDistillation
from tensordict import TensorDict
from torch import Tensor

from torchrl_rslstorage import (
    KLAdaptiveStepper,
    MiniBatchSampler,
    Mirror,
    RandomNetworkDistillation,
    RolloutGAE,
    RSLPPOLoss,
    Symmetry,
    intrinsic_weight,
    rsl_rl_augmentation,
)
from torchrl_rslstorage.objectives.reading import Targets
from torchrl_rslstorage.trainers.curiosity import Curiosity


class Rounded(Problem):
    """Observations that float32 holds exactly: it is what TorchRL's RNDLoss reads."""

    def observe(self) -> TensorDict:
        return super().observe().apply(lambda x: x.float().to(x.dtype))


BOTH = ("observation", "privileged")
PROBLEMS = {
    "24 x 16": Rounded(24, 16),
    "7 x 5, asymmetric, normalised": Rounded(7, 5, normalize_observations=True, critic_groups=BOTH),
}
EXACT = {"gamma": 31 / 32, "lam": 15 / 16}
"""Discounts that float32 holds exactly: RSL-RL rounds them to it, whatever the dtype of everything else."""
TOLERANCE = {torch.float32: 1e-6, torch.float64: 1e-12}
"""Asked for is 1e-5."""

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
EACH_PROBLEM = pytest.mark.parametrize("problem", PROBLEMS.values(), ids=PROBLEMS.keys())

# -- a symmetry, said three times ----------------------------------------------------------------

LEFT_RIGHT = {
    "observation": Mirror([1, 0, 2, 3, 4], [1, 1, -1, -1, 1]),
    "privileged": Mirror([0, 2, 1], [-1, 1, 1]),
    "action": Mirror([1, 0], [1, 1]),
}
FRONT_BACK = {
    "observation": Mirror([0, 1, 4, 3, 2], [-1, -1, 1, 1, 1]),
    "privileged": Mirror.identity(3),
    "action": Mirror([0, 1], [-1, -1]),
}
"""Not the inverse of itself together with the first: the order of copies counts."""


def as_isaac_lab_writes_it(env: Any, obs: TensorDict | None, actions: Tensor | None) -> tuple[Any, Any]:
    """`LEFT_RIGHT` as a user of RSL-RL has it."""
    assert env == "the environment"
    if obs is not None:
        left, mirrored = obs, obs.clone()
        x = obs["observation"]
        mirrored["observation"] = torch.stack([x[:, 1], x[:, 0], -x[:, 2], -x[:, 3], x[:, 4]], 1)
        if "privileged" in obs.keys():
            p = obs["privileged"]
            mirrored["privileged"] = torch.stack([-p[:, 0], p[:, 2], p[:, 1]], 1)
        obs = torch.cat([left, mirrored])
    if actions is not None:
        actions = torch.cat([actions, actions.flip(1)])
    return obs, actions


def as_rsl_rl_has_it(tables: list[dict[str, Mirror]]) -> Any:
    """Tables as RSL-RL's function."""

    def augment(env: Any, obs: TensorDict | None, actions: Tensor | None) -> tuple[Any, Any]:
        if obs is not None:
            images = [
                TensorDict({key: t[key](value) for key, value in obs.items()}, obs.shape) for t in tables
            ]
            obs = torch.cat([obs, *images])
        if actions is not None:
            actions = torch.cat([actions, *(t["action"](actions) for t in tables)])
        return obs, actions

    return augment


class Outcome(NamedTuple):
    """What two updates differ in, and whether they did anything."""

    differences: dict[str, float]
    moved: float
    reported: dict[str, float]


def update_both(
    problem: Problem,
    seed: int,
    dtype: torch.dtype,
    symmetry: Symmetry | None = None,
    rnd: dict[str, Any] | None = None,
    **options: Any,
) -> Outcome:
    """One update by RSL-RL, one by this package."""
    with default_dtype(dtype):
        torch.manual_seed(seed)
        if rnd is not None:
            groups = {"rnd_state": list(BOTH)}
            options["rnd_cfg"] = {**rnd, "num_states": problem.width(BOTH), "obs_groups": groups}
        ppo = rsl_rl_ppo(problem, **EXACT, **options)
        curiosity = None if rnd is None else curiosity_like(ppo, problem, rnd)
        actor, critic = copies_of(ppo, problem)
        before = [tensor.clone() for _, tensor in all_tensors(actor)]
        rollout = rsl_rl_rollout(ppo, problem)

        torch.manual_seed(seed)
        theirs = ppo.update()

        torch.manual_seed(seed)
        sampler = MiniBatchSampler(ppo.num_mini_batches, ppo.num_learning_epochs, drop_remainder=True)
        buffer = in_buffer(rollout, sampler=sampler)
        if curiosity is not None:
            curiosity.reward(buffer)
        per_batch = ppo.normalize_advantage_per_mini_batch
        gae = RolloutGAE(ppo.gamma, ppo.lam, critic, time_out="rsl_rl", normalize=not per_batch)
        loss = RSLPPOLoss(
            actor,
            critic,
            normalize_advantage=per_batch,
            clip_value=ppo.use_clipped_value_loss,
            symmetry=symmetry,
        )
        stepper = KLAdaptiveStepper(actor, critic, schedule=ppo.schedule)
        window = gae(buffer)
        metrics: list[Tensor] = []
        for batch in buffer:
            metrics.append(stepper.update(loss, batch))
            if curiosity is not None:
                curiosity.update(batch)
        for network in (actor, critic, curiosity and curiosity.rnd):
            if network is not None:
                network.update_normalizer(window)

    ours = dict(zip(stepper.metric_names, torch.stack(metrics).mean(0).tolist(), strict=True))
    ours |= {"surrogate": ours["loss_objective"], "value": ours["loss_critic"]}
    out = {"learning rate": abs(float(stepper.learning_rate) - float(ppo.learning_rate))}
    for network, mine, other in (("actor", actor, ppo.actor), ("critic", critic, ppo.critic)):
        for (name, a), (_, b) in zip(all_tensors(mine), all_tensors(other), strict=True):
            out[f"{network} {name}"] = float((a - b.view_as(a)).abs().max())
    if curiosity is not None:
        ours["rnd"] = curiosity.metrics(None)["Loss/rnd"]
        out["weight"] = abs(curiosity.weight - ppo.rnd.weight)
        for (name, a), b in zip(curiosity_tensors(curiosity.rnd), rsl_rl_tensors(ppo), strict=True):
            out[f"rnd {name}"] = float((a - b.view_as(a)).abs().max())
    for name, value in theirs.items():
        out[f"reported {name}"] = abs(ours[name] - value) / max(1.0, abs(value))
    moved = max(float((a - b).abs().max()) for a, (_, b) in zip(before, all_tensors(actor), strict=True))
    return Outcome(out, moved, theirs)


def curiosity_like(ppo: PPO, problem: Problem, rnd: dict[str, Any]) -> Curiosity:
    """This package's with RSL-RL's weights, both with statistics of an earlier iteration."""
    mine = RandomNetworkDistillation(BOTH, problem.width(BOTH), **rnd)
    with torch.no_grad():
        pairs = zip(
            [*mine.predictor.parameters(), *mine.target.parameters()],
            [*ppo.rnd.predictor.parameters(), *ppo.rnd.target.parameters()],
            strict=True,
        )
        for to, source in pairs:
            to.copy_(source)
    earlier = torch.stack([problem.observe() for _ in range(3)]).flatten(0, 1)
    ppo.rnd.update_normalization(earlier)
    mine.update_normalizer(earlier)
    return Curiosity(mine, problem.num_envs)


def curiosity_tensors(rnd: RandomNetworkDistillation) -> list[tuple[str, Tensor]]:
    out = [(f"predictor {name}", p.detach()) for name, p in rnd.predictor.named_parameters()]
    out += [(f"target {name}", p.detach()) for name, p in rnd.target.named_parameters()]
    if rnd.normalizer is not None:
        out += [(f"states {name}", b) for name, b in rnd.normalizer.named_buffers()]
    if rnd.reward_normalizer is not None:
        out += [(f"rewards {name}", b) for name, b in rnd.reward_normalizer.moments.named_buffers()]
    return out


def rsl_rl_tensors(ppo: PPO) -> list[Tensor]:
    rnd = ppo.rnd
    out = [p.detach() for p in (*rnd.predictor.parameters(), *rnd.target.parameters())]
    if rnd.state_normalization:
        out += list(rnd.state_normalizer.buffers())
    if rnd.reward_normalization:
        out += list(rnd.reward_normalizer.emp_norm.buffers())
    return out


def assert_equal(outcome: Outcome, dtype: torch.dtype) -> None:
    wrong = {name: value for name, value in outcome.differences.items() if not value <= TOLERANCE[dtype]}
    assert not wrong
    assert outcome.moved > 1e-3, "an update that changes nothing proves nothing"


def theirs(uses: dict[str, Any], function: Any, env: Any = None) -> dict[str, Any]:
    return {"symmetry_cfg": {"env": env, "data_augmentation_func": function, **uses}}


# -- symmetry ------------------------------------------------------------------------------------

USES = {
    "augmentation": {"use_data_augmentation": True},
    "mirror loss": {"use_mirror_loss": True, "mirror_loss_coeff": 0.7},
    "both": {"use_data_augmentation": True, "use_mirror_loss": True, "mirror_loss_coeff": 0.7},
    "measured only": {},
}
EACH_USE = pytest.mark.parametrize("uses", USES.values(), ids=USES.keys())


@DTYPES
@EACH_USE
@EACH_PROBLEM
@pytest.mark.parametrize("seed", range(2))
def test_an_update_with_symmetry_is_rsl_rls(problem, uses, dtype, seed):
    options = theirs(uses, as_isaac_lab_writes_it, env="the environment")
    outcome = update_both(problem, seed, dtype, Symmetry(LEFT_RIGHT, **uses), **options)
    assert_equal(outcome, dtype)
    assert outcome.reported["symmetry"] > 1e-3


@EACH_USE
def test_several_copies_of_a_mini_batch_are_rsl_rls(uses):
    tables = [LEFT_RIGHT, FRONT_BACK, LEFT_RIGHT]
    options = theirs(uses, as_rsl_rl_has_it(tables))
    for problem in PROBLEMS.values():
        outcome = update_both(problem, 3, torch.float64, Symmetry(tables, **uses), **options)
        assert_equal(outcome, torch.float64)


@EACH_USE
def test_rsl_rls_own_function_goes_through_the_adapter(uses):
    augment = rsl_rl_augmentation(as_isaac_lab_writes_it, env="the environment")
    options = theirs(uses, as_isaac_lab_writes_it, env="the environment")
    for problem in PROBLEMS.values():
        outcome = update_both(problem, 4, torch.float64, Symmetry(augment, **uses), **options)
        assert_equal(outcome, torch.float64)


@pytest.mark.parametrize(
    "options",
    [{"normalize_advantage_per_mini_batch": True}, {"use_clipped_value_loss": False}, {"schedule": "fixed"}],
    ids=str,
)
def test_symmetry_goes_with_every_switch(options):
    options = {**options, **theirs(USES["both"], as_rsl_rl_has_it([LEFT_RIGHT]))}
    symmetry = Symmetry(LEFT_RIGHT, **USES["both"])
    problem = PROBLEMS["7 x 5, asymmetric, normalised"]
    assert_equal(update_both(problem, 5, torch.float64, symmetry, **options), torch.float64)


# -- curiosity -----------------------------------------------------------------------------------

LINEAR = {"mode": "linear", "initial_step": 2, "final_step": 6, "final_value": 0.1}
STEP = {"mode": "step", "final_step": 4, "final_value": 0.25}
RNDS = {
    "plain": {"weight": 0.5, "num_outputs": 1, "predictor_hidden_dims": [-1], "target_hidden_dims": [-1]},
    "states normalised": {
        "weight": 0.5,
        "num_outputs": 4,
        "predictor_hidden_dims": [16, -1],
        "target_hidden_dims": [8],
        "state_normalization": True,
        "learning_rate": 1e-2,
    },
    "rewards normalised, linear schedule": {
        "weight": 0.5,
        "num_outputs": 3,
        "predictor_hidden_dims": [16],
        "target_hidden_dims": [8],
        "activation": "tanh",
        "reward_normalization": True,
        "weight_schedule": LINEAR,
    },
    "everything, step schedule": {
        "weight": 2.0,
        "num_outputs": 3,
        "predictor_hidden_dims": [16],
        "target_hidden_dims": [8],
        "state_normalization": True,
        "reward_normalization": True,
        "weight_schedule": STEP,
    },
}


@DTYPES
@pytest.mark.parametrize("rnd", RNDS.values(), ids=RNDS.keys())
@EACH_PROBLEM
def test_an_update_with_curiosity_is_rsl_rls(problem, rnd, dtype):
    outcome = update_both(problem, 6, dtype, rnd=rnd)
    assert_equal(outcome, dtype)
    assert outcome.reported["rnd"] > 0


def test_curiosity_and_symmetry_go_together_as_rsl_rls_do():
    options = theirs(USES["both"], as_rsl_rl_has_it([LEFT_RIGHT]))
    rnd = RNDS["everything, step schedule"]
    for problem in PROBLEMS.values():
        symmetry = Symmetry(LEFT_RIGHT, **USES["both"])
        assert_equal(update_both(problem, 7, torch.float64, symmetry, rnd, **options), torch.float64)


@pytest.mark.parametrize("schedule", [None, {"mode": "constant"}, LINEAR, STEP], ids=str)
def test_weights_are_rsl_rls_in_every_step(schedule):
    rnd = RSLRLDistillation(2, {"rnd_state": ["x"]}, 1, [4], [4], weight=0.75, weight_schedule=schedule)
    for step in range(1, 10):
        rnd.get_intrinsic_reward(TensorDict({"x": torch.zeros(1, 2)}, [1]))
        assert intrinsic_weight(step, 0.75, schedule) == pytest.approx(rnd.weight, abs=1e-15)


# -- planted faults ------------------------------------------------------------------------------

PROBLEM = PROBLEMS["24 x 16"]
intrinsic_rewards = RandomNetworkDistillation.intrinsic_rewards


def with_gradient(self, dist, action, shape):
    return self._images(TensorDict({"action": dist.mean}, dist.mean.shape[:1])).get(action)


def in_another_order(self, count):
    return Targets(*(x.repeat_interleave(count) for x in self))


SYMMETRY_FAULTS = {
    "a sign of the action": lambda patch: patch.setitem(LEFT_RIGHT, "action", Mirror([1, 0], [1, -1])),
    "a component of the observation": lambda patch: patch.setitem(
        LEFT_RIGHT, "observation", Mirror([1, 0, 3, 2, 4], [1, 1, -1, -1, 1])
    ),
    "targets in another order": lambda patch: patch.setattr(Targets, "repeated", in_another_order),
    "a gradient through the mirrored means": lambda patch: patch.setattr(
        Symmetry, "_image_of", with_gradient
    ),
}


@pytest.mark.parametrize("fault", SYMMETRY_FAULTS.values(), ids=SYMMETRY_FAULTS.keys())
def test_parity_notices_a_fault_of_symmetry(monkeypatch, fault):
    options = theirs(USES["both"], as_rsl_rl_has_it([dict(LEFT_RIGHT), dict(FRONT_BACK)]))
    fault(monkeypatch)
    symmetry = Symmetry([LEFT_RIGHT, FRONT_BACK], **USES["both"])
    assert max(update_both(PROBLEM, 0, torch.float64, symmetry, **options).differences.values()) > 1e-5


def of_this_step(self, buffer):
    return self.rnd.novelty(buffer.window)


def from_step_zero(self, novelty, first_step):
    return intrinsic_rewards(self, novelty, first_step - 1)


CURIOSITY_FAULTS = {
    "none is added": lambda patch: patch.setattr(Curiosity, "reward", lambda self, buffer: None),
    "that of this step": lambda patch: patch.setattr(Curiosity, "_novelty_of_next", of_this_step),
    "steps counted from zero": lambda patch: patch.setattr(
        RandomNetworkDistillation, "intrinsic_rewards", from_step_zero
    ),
    "sums forgotten": lambda patch: patch.setattr("torchrl_rslstorage.modules.novelty._GAMMA", 0.9),
    "part of the mini-batch": lambda patch: patch.setattr(
        Curiosity, "__init__", with_a_part(Curiosity.__init__)
    ),
}


def with_a_part(original):
    def init(self, *args, **options):
        original(self, *args, **options)
        self.loss.update_fraction = 0.25

    return init


@pytest.mark.parametrize("fault", CURIOSITY_FAULTS.values(), ids=CURIOSITY_FAULTS.keys())
def test_parity_notices_a_fault_of_curiosity(monkeypatch, fault):
    fault(monkeypatch)
    outcome = update_both(PROBLEM, 6, torch.float64, rnd=RNDS["rewards normalised, linear schedule"])
    assert max(outcome.differences.values()) > 1e-5
