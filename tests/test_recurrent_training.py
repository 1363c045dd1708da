"""Recurrent PPO: ratios of one after a rollout, no trace of padding, RSL-RL's parameters after an update."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from oracles_objectives import default_dtype, in_buffer
from rsl_rl.algorithms import PPO
from rsl_rl.models import RNNModel
from rsl_rl.storage import RolloutStorage
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModule, TensorDictSequential
from tensordict.nn.distributions import NormalParamExtractor
from torch import Tensor, nn
from torchrl.collectors import Collector
from torchrl.envs import Compose, InitTracker, TransformedEnv
from torchrl.modules import GRUModule, IndependentNormal, LSTMModule, ProbabilisticActor, ValueOperator

from torchrl_rslstorage import (
    ActorCritic,
    KLAdaptiveStepper,
    MiniBatchSampler,
    MLPActor,
    MLPCritic,
    PendulumEnv,
    PPOConfig,
    RNNActor,
    RNNCritic,
    RolloutBuffer,
    RolloutCollector,
    RolloutGAE,
    RSLPPOLoss,
    RSLPPOTrainer,
    TrajectorySampler,
)

KINDS = pytest.mark.parametrize("rnn_type", ["lstm", "gru"])


def small_networks(
    env: Any, rnn_type: str = "lstm", num_layers: int = 1, **options: Any
) -> tuple[RNNActor, RNNCritic]:
    torch.manual_seed(0)
    shape = {"rnn_type": rnn_type, "rnn_hidden_dim": 8, "rnn_num_layers": num_layers, "hidden_dims": (16,)}
    return RNNActor.for_env(env, **shape, **options), RNNCritic.for_env(env, **shape, **options)


def short_episodes(num_envs: int = 6, seed: int = 0) -> PendulumEnv:
    """Pendulums whose episodes end in the middle of windows, at different times."""
    return PendulumEnv(num_envs, seed=seed, max_episode_steps=7)


def filled(
    rnn_type: str = "lstm", num_mini_batches: int = 3, num_layers: int = 1, **options: Any
) -> tuple[RNNActor, RNNCritic, RolloutBuffer]:
    """One collected window with advantages."""
    env = short_episodes()
    actor, critic = small_networks(env, rnn_type, num_layers, **options)
    buffer = RolloutBuffer(10, 6, sampler=TrajectorySampler(num_mini_batches))
    RolloutCollector(env, ActorCritic(actor, critic), replay_buffer=buffer).rollout()
    RolloutGAE(value_network=critic, normalize=True)(buffer)
    return actor, critic, buffer


# -- the first mini-batch after a rollout ------------------------------------------------------------


@KINDS
@pytest.mark.parametrize("num_layers", [1, 2])
def test_ratios_are_one_after_each_of_three_rollouts(rnn_type: str, num_layers: int) -> None:
    env = short_episodes()
    actor, critic = small_networks(env, rnn_type, num_layers, normalize_observations=True)
    sampler = TrajectorySampler(2)
    buffer = RolloutBuffer(10, 6, sampler=sampler)
    collector = RolloutCollector(env, ActorCritic(actor, critic), replay_buffer=buffer)
    stepper = KLAdaptiveStepper(actor, critic)
    gae, loss = RolloutGAE(value_network=critic), RSLPPOLoss(actor, critic)
    for _ in range(3):
        collector.rollout()
        window = gae(buffer)
        assert window["next", "done"][:-1].any(), "resets in the middle of the window are the point"
        cells = 0
        for batch in list(buffer):
            mask = batch["mask"]
            new = actor.get_dist(batch).log_prob(batch["action"])
            assert ((new - batch["action_log_prob"]).exp() - 1)[mask].abs().max() < 1e-5
            assert (critic.evaluate(batch) - batch["state_value"])[mask].abs().max() < 1e-5
            assert loss(batch)["kl"].abs() < 1e-5
            cells += int(mask.sum())
        assert cells == 60
        for batch in buffer:
            stepper.update(loss, batch)
        for network in (actor, critic):
            network.update_normalizer(window)
        buffer.empty()


# -- padding -----------------------------------------------------------------------------------------


def scalars_and_gradients(loss: RSLPPOLoss, batch: TensorDictBase) -> tuple[dict[str, Tensor], list[Tensor]]:
    loss.zero_grad()
    terms = loss(batch)
    sum(terms[key] for key in terms.keys() if key.startswith("loss_")).backward()
    return dict(terms.items()), [p.grad.clone() for p in loss.parameters()]


def spoilt(batch: TensorDictBase, filling: float) -> TensorDict:
    """A copy whose padding holds ``filling`` in every float, and true in every flag."""
    out = batch.clone().unlock_()
    mask = batch["mask"].clone()
    for key, value in out.items(True, True):
        if key != "mask":
            where = ~mask.view(*mask.shape, *[1] * (value.ndim - 2))
            fill = filling if value.is_floating_point() else True
            out[key] = value.masked_fill(where, fill)
    return out.set("mask", mask)


@pytest.mark.parametrize("filling", [1e3, float("nan")])
@pytest.mark.parametrize("kind", ["lstm", "gru", "feed-forward critic", "torchrl"])
@pytest.mark.parametrize("keep_plan", [True, False])
def test_padding_reaches_no_scalar_and_no_gradient(kind: str, filling: float, keep_plan: bool) -> None:
    if kind == "torchrl":
        actor, critic, buffer = filled_by_torchrl("lstm")
    else:
        actor, critic, buffer = filled(kind if kind == "gru" else "lstm")
    if kind == "feed-forward critic":
        torch.manual_seed(0)
        critic = MLPCritic(["observation"], 3, hidden_dims=(16,))
    loss = RSLPPOLoss(actor, critic, normalize_advantage=True)
    for clean in buffer:
        assert not clean["mask"].all(), "a mini-batch without padding proves nothing"
        dirty = spoilt(clean, filling)
        if keep_plan:
            dirty["mask"].copy_(clean["mask"])
            dirty.set("mask", clean["mask"])
        terms, gradients = scalars_and_gradients(loss, clean)
        their_terms, their_gradients = scalars_and_gradients(loss, dirty)
        for key, value in terms.items():
            assert torch.allclose(their_terms[key], value, rtol=1e-5, atol=1e-6), key
        for a, b in zip(gradients, their_gradients, strict=True):
            assert torch.allclose(a, b, rtol=1e-4, atol=1e-6)


@KINDS
def test_the_loss_is_that_of_the_valid_cells_one_by_one(rnn_type: str) -> None:
    actor, critic, buffer = filled(rnn_type)
    loss = RSLPPOLoss(actor, critic, normalize_advantage=True)
    for batch in buffer:
        terms = loss(batch)
        mask = batch["mask"]
        dist, value = actor.get_dist(batch), critic.evaluate(batch)[mask].squeeze(-1)
        flat = batch.exclude("actor_state", "critic_state")[mask]
        advantage = flat["advantage"].squeeze(-1)
        advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
        ratio = (dist.log_prob(batch["action"])[mask] - flat["action_log_prob"]).exp()
        surrogate = torch.max(-advantage * ratio, -advantage * ratio.clamp(0.8, 1.2)).mean()
        target, old = flat["value_target"].squeeze(-1), flat["state_value"].squeeze(-1)
        near = old + (value - old).clamp(-0.2, 0.2)
        squares = torch.max((value - target).square(), (near - target).square())
        assert terms["loss_objective"].item() == pytest.approx(surrogate.item(), abs=1e-6)
        assert terms["loss_critic"].item() == pytest.approx(squares.mean().item(), rel=1e-5)
        assert terms["entropy"].item() == pytest.approx(dist.entropy()[mask].mean().item(), abs=1e-6)
        explained = 1 - (target - value).var(correction=0) / target.var(correction=0)
        assert terms["explained_variance"].item() == pytest.approx(explained.item(), abs=1e-4)


# -- RSL-RL ------------------------------------------------------------------------------------------


@dataclass
class RecurrentProblem:
    """What RSL-RL and this package are both given."""

    rnn_type: str = "lstm"
    num_steps: int = 9
    num_envs: int = 8
    num_layers: int = 1
    normalize: bool = False
    p_done: float = 0.2


def observe(problem: RecurrentProblem) -> TensorDict:
    return TensorDict({"observation": 2 * torch.randn(problem.num_envs, 5) + 1}, [problem.num_envs])


def rsl_rl_ppo(problem: RecurrentProblem, **options: Any) -> PPO:
    observations = observe(problem)
    groups = {"actor": ["observation"], "critic": ["observation"]}
    network = {
        "hidden_dims": [16], "obs_normalization": problem.normalize, "rnn_type": problem.rnn_type,
        "rnn_hidden_dim": 12, "rnn_num_layers": problem.num_layers,
    }  # fmt: skip
    gaussian = {"class_name": "GaussianDistribution", "init_std": 1.0, "std_type": "scalar"}
    actor = RNNModel(observations, groups, "actor", 2, distribution_cfg=gaussian, **network)
    critic = RNNModel(observations, groups, "critic", 1, **network)
    storage = RolloutStorage("rl", problem.num_envs, problem.num_steps, observations, [2], "cpu")
    return PPO(actor, critic, storage, **options)


def tensors_of(module: Any) -> list[Tensor]:
    """Parameters and statistics of an actor or critic of either side, in one order."""
    rnn = module.core.rnn if hasattr(module, "core") else module.rnn.rnn
    out = [*rnn.parameters(), *module.mlp.parameters()]
    normalizer = getattr(module, "normalizer", None) or getattr(module, "obs_normalizer", None)
    out += [] if normalizer is None else list(normalizer.buffers())
    return [x.detach() for x in (*out, *(p for n, p in module.named_parameters() if "std_param" in n))]


def copies_of(ppo: PPO, problem: RecurrentProblem) -> tuple[RNNActor, RNNCritic]:
    shape = {
        "rnn_type": problem.rnn_type, "rnn_hidden_dim": 12, "rnn_num_layers": problem.num_layers,
        "hidden_dims": (16,), "normalize_observations": problem.normalize,
    }  # fmt: skip
    actor = RNNActor(["observation"], 5, 2, **shape)
    critic = RNNCritic(["observation"], 5, **shape)
    for ours, theirs in ((actor, ppo.actor), (critic, ppo.critic)):
        for to, source in zip(tensors_of(ours), tensors_of(theirs), strict=True):
            to.copy_(source.view_as(to))
    return actor, critic


def states_of(model: RNNModel, problem: RecurrentProblem) -> dict[str, Tensor]:
    state = model.get_hidden_state()
    count = 1 if problem.rnn_type == "gru" else 2
    if state is None:
        state = tuple(torch.zeros(problem.num_layers, problem.num_envs, 12) for _ in range(count))
    state = state if isinstance(state, tuple) else (state,)
    return {name: s.transpose(0, 1).clone() for name, s in zip("hc", state, strict=False)}


@torch.no_grad()
def rsl_rl_rollout(ppo: PPO, problem: RecurrentProblem) -> TensorDict:
    """One window that RSL-RL collects, and the same ``[T, N]`` with states as they stood before each step."""
    observations, rows = observe(problem), []
    done = torch.ones(problem.num_envs, dtype=torch.bool)
    for _ in range(problem.num_steps):
        row = observations.clone().set("is_init", done.unsqueeze(-1))
        row["actor_state"] = states_of(ppo.actor, problem)
        row["critic_state"] = states_of(ppo.critic, problem)
        ppo.act(observations)
        acted = ppo.transition
        mean, std = acted.distribution_params
        row["action"], row["loc"], row["scale"] = acted.actions.clone(), mean.clone(), std.clone()
        row["action_log_prob"] = acted.actions_log_prob.flatten().clone()
        row["state_value"] = acted.values.clone()
        after = {name: states_of(model, problem)
                 for name, model in (("actor_state", ppo.actor), ("critic_state", ppo.critic))}  # fmt: skip
        reward = torch.randn(problem.num_envs)
        done = torch.rand(problem.num_envs) < problem.p_done
        time_out = done & (torch.rand(problem.num_envs) < 0.5)
        observations = observe(problem)
        ppo.process_env_step(observations, reward, done, {"time_outs": time_out})
        after |= {"done": done, "truncated": time_out, "terminated": done & ~time_out, "reward": reward}
        after = {k: v if isinstance(v, dict) else v.unsqueeze(-1) for k, v in after.items()}
        rows.append(row.set("next", observations.clone().update(after)))
    ppo.compute_returns(observations)
    return torch.stack(rows)


PROBLEMS = {
    "LSTM": RecurrentProblem("lstm"),
    "GRU, two layers": RecurrentProblem("gru", num_layers=2),
    "normalised": RecurrentProblem("lstm", num_steps=6, num_envs=12, normalize=True),
    "no episode ends": RecurrentProblem("gru", p_done=0.0),
}


@pytest.mark.parametrize("problem", PROBLEMS.values(), ids=PROBLEMS.keys())
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("per_mini_batch", [False, True])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-9), (torch.float32, 1e-5)])
def test_a_whole_update_ends_in_rsl_rls_parameters(problem, seed, per_mini_batch, dtype, tolerance) -> None:
    with default_dtype(dtype):
        torch.manual_seed(seed)
        ppo = rsl_rl_ppo(
            problem, gamma=31 / 32, lam=15 / 16, normalize_advantage_per_mini_batch=per_mini_batch
        )
        if problem.normalize:
            earlier = torch.cat([observe(problem) for _ in range(4)])
            ppo.actor.update_normalization(earlier)
            ppo.critic.update_normalization(earlier)
        actor, critic = copies_of(ppo, problem)
        before = [x.clone() for x in tensors_of(actor)]
        rollout = rsl_rl_rollout(ppo, problem)
        ppo.update()

        sampler = TrajectorySampler(ppo.num_mini_batches, ppo.num_learning_epochs)
        buffer = in_buffer(rollout, sampler=sampler)
        gae = RolloutGAE(ppo.gamma, ppo.lam, critic, time_out="rsl_rl", normalize=not per_mini_batch)
        loss = RSLPPOLoss(actor, critic, normalize_advantage=per_mini_batch)
        stepper = KLAdaptiveStepper(actor, critic)
        window = gae(buffer)
        for batch in buffer:
            stepper.update(loss, batch)
        for network in (actor, critic):
            network.update_normalizer(window)
    for ours, theirs in ((actor, ppo.actor), (critic, ppo.critic)):
        for a, b in zip(tensors_of(ours), tensors_of(theirs), strict=True):
            assert (a - b.view_as(a)).abs().max() < tolerance
    assert float(stepper.learning_rate) == pytest.approx(float(ppo.learning_rate), rel=1e-9)
    assert max(float((a - b).abs().max()) for a, b in zip(before, tensors_of(actor), strict=True)) > 1e-3


# -- advantages --------------------------------------------------------------------------------------


@KINDS
def test_bootstraps_use_the_state_after_the_step_and_leave_collection_alone(rnn_type: str) -> None:
    env = short_episodes()
    actor, critic = small_networks(env, rnn_type)
    policy = ActorCritic(actor, critic)
    buffer = RolloutBuffer(10, 6)
    collector = RolloutCollector(env, policy, replay_buffer=buffer)
    collector.rollout()
    carried = collector._carrier.clone()
    gae = RolloutGAE(gamma=0.9, lmbda=0.0, value_network=critic)
    window = gae(buffer)
    assert (collector._carrier == carried).all()
    t, n, final = buffer.final_observations
    assert len(t) > 6, "a truncated step must be among them"
    seen = {(int(a), int(b)) for a, b in zip(t, n, strict=True)}
    done = window["next", "done"]
    for i, (row, env_id) in enumerate(zip(t.tolist(), n.tolist(), strict=True)):
        step = final[i : i + 1].select("observation", "critic_state")
        value = critic(step.set("is_init", torch.zeros(1, 1, dtype=torch.bool)))["state_value"]
        delta = window["next", "reward"][row, env_id] + 0.9 * value - window["state_value"][row, env_id]
        assert torch.allclose(window["advantage"][row, env_id], delta[0], atol=1e-6)
    assert seen == {(r, e) for r in range(10) for e in range(6) if done[r, e] or r == 9}


def test_a_recurrent_critic_that_did_not_run_is_named() -> None:
    env = short_episodes()
    actor, critic = small_networks(env)
    buffer = RolloutBuffer(10, 6)
    RolloutCollector(env, actor, replay_buffer=buffer).rollout()
    with pytest.raises(KeyError, match="a recurrent critic must run while it is collected"):
        RolloutGAE(value_network=critic)(buffer)


# -- TorchRL's own modules ---------------------------------------------------------------------------


def torchrl_networks(kind: str) -> tuple[ProbabilisticActor, TensorDictSequential, list[Any]]:
    torch.manual_seed(0)

    def memory(name: str) -> LSTMModule | GRUModule:
        if kind == "lstm":
            states, made = [f"{name}_h", f"{name}_c"], [("next", f"{name}_h"), ("next", f"{name}_c")]
            return LSTMModule(input_size=3, hidden_size=8, in_keys=["observation", *states],
                              out_keys=[f"{name}_features", *made])  # fmt: skip
        return GRUModule(input_size=3, hidden_size=8, in_keys=["observation", f"{name}_h"],
                         out_keys=[f"{name}_features", ("next", f"{name}_h")])  # fmt: skip

    head = nn.Sequential(nn.Linear(8, 2), NormalParamExtractor())
    remember, recall = memory("a"), memory("v")
    params = TensorDictSequential(
        remember, TensorDictModule(head, in_keys=["a_features"], out_keys=["loc", "scale"])
    )
    actor = ProbabilisticActor(
        params, in_keys=["loc", "scale"], distribution_class=IndependentNormal, return_log_prob=True
    )
    critic = TensorDictSequential(recall, ValueOperator(nn.Linear(8, 1), in_keys=["v_features"]))
    return actor, critic, [remember.make_tensordict_primer(), recall.make_tensordict_primer()]


def filled_by_torchrl(kind: str) -> tuple[ProbabilisticActor, TensorDictSequential, RolloutBuffer]:
    actor, critic, primers = torchrl_networks(kind)
    env = TransformedEnv(short_episodes(), Compose(InitTracker(), *primers))
    buffer = RolloutBuffer(10, 6, sampler=TrajectorySampler(3))
    collector = Collector(
        env, TensorDictSequential(actor, critic), replay_buffer=buffer, frames_per_batch=60, total_frames=60,
        auto_register_policy_transforms=False,
    )  # fmt: skip
    for _ in collector:
        pass
    RolloutGAE(value_network=critic, normalize=True)(buffer)
    return actor, critic, buffer


@KINDS
def test_torchrls_own_modules_learn_from_the_mini_batches(rnn_type: str) -> None:
    actor, critic, buffer = filled_by_torchrl(rnn_type)
    loss = RSLPPOLoss(actor, critic)
    stepper = KLAdaptiveStepper(actor, critic)
    for batch in buffer:
        terms = loss(batch)
        assert terms["kl"].abs() < 1e-5
        assert terms["clip_fraction"] == 0
        break
    for batch in buffer:
        assert stepper.update(loss, batch).isfinite().all()


@KINDS
def test_our_networks_collect_through_torchrls_collector(rnn_type: str) -> None:
    actor, critic = small_networks(short_episodes(), rnn_type)
    primers = [actor.make_tensordict_primer(), critic.make_tensordict_primer()]
    env = TransformedEnv(short_episodes(), Compose(InitTracker(), *primers))
    buffer = RolloutBuffer(10, 6, sampler=TrajectorySampler(2))
    collector = Collector(
        env, ActorCritic(actor, critic), replay_buffer=buffer, frames_per_batch=60, total_frames=60,
        auto_register_policy_transforms=False,
    )  # fmt: skip
    for _ in collector:
        pass
    RolloutGAE(value_network=critic)(buffer)
    assert buffer.window["next", "done"].any()
    for batch in buffer:
        assert RSLPPOLoss(actor, critic)(batch)["kl"].abs() < 1e-5


# -- what does not fit -------------------------------------------------------------------------------


def test_a_flat_mini_batch_is_no_food_for_a_recurrent_loss() -> None:
    actor, critic, buffer = filled()
    buffer.set_sampler(MiniBatchSampler(2))
    with pytest.raises(ValueError, match="give the buffer a TrajectorySampler"):
        RSLPPOLoss(actor, critic)(next(iter(buffer)))


def test_trajectories_are_no_food_for_a_feed_forward_loss() -> None:
    _, _, buffer = filled()
    loss = RSLPPOLoss(MLPActor(["observation"], 3, 1), MLPCritic(["observation"], 3))
    with pytest.raises(ValueError, match="give the buffer a MiniBatchSampler"):
        loss(next(iter(buffer)))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda b: b.exclude("actor_state"), KeyError, r"reads \('actor_state', 'h'\), the state with which"),
        (lambda b: b.set("mask", b["mask"][:1].expand(2, -1)), ValueError, r"`mask` must be bool \[L, B\]"),
        (lambda b: b.set("mask", b["mask"].float()), ValueError, r"`mask` must be bool \[L, B\]"),
        (lambda b: b.set("mask", torch.zeros_like(b["mask"])), ValueError, "nothing but padding"),
        (lambda b: b.exclude("advantage"), KeyError, "Run RolloutGAE on the buffer"),
        (lambda b: b.set(("actor_state", "h"), b["actor_state", "h"][..., :3]), ValueError, "has shape"),
    ],
)
def test_mini_batches_that_lack_something_are_named(change, error, message) -> None:
    actor, critic, buffer = filled()
    batch = next(iter(buffer)).clone().unlock_()
    batch.set("mask", batch["mask"].clone())
    if "bool" in message:
        batch = TensorDict(dict(batch.items()), [])
        with pytest.raises((error, RuntimeError)):
            RSLPPOLoss(actor, critic)(change(batch))
        return
    with pytest.raises(error, match=message):
        RSLPPOLoss(actor, critic)(change(batch))


# -- the trainer -------------------------------------------------------------------------------------


def trainer_of(num_envs: int = 6, compile: bool = False, **config: Any) -> RSLPPOTrainer:
    env = short_episodes(num_envs)
    actor, critic = small_networks(env)
    buffer = RolloutBuffer(10, num_envs)
    collector = RolloutCollector(env, ActorCritic(actor, critic), replay_buffer=buffer)
    return RSLPPOTrainer(
        collector, actor, critic, total_frames=30 * num_envs, progress_bar=False, compile=compile,
        config=PPOConfig(**config),
    )  # fmt: skip


@pytest.mark.parametrize("reshuffle", [False, True])
def test_a_recurrent_policy_trains(reshuffle: bool) -> None:
    trainer = trainer_of(reshuffle=reshuffle)
    before = [p.clone() for p in trainer.actor.parameters()]
    trainer.train()
    assert isinstance(trainer.buffer.sampler, TrajectorySampler)
    assert trainer.num_iterations == 3
    assert all(not torch.equal(a, b) for a, b in zip(before, trainer.actor.parameters(), strict=True))
    assert trainer.metrics["Loss/kl"] > 0


def test_more_mini_batches_than_environments_are_refused() -> None:
    with pytest.raises(ValueError, match="holds 3 environments, taken whole by a recurrent policy"):
        trainer_of(num_envs=3, num_mini_batches=4)


def test_dropping_a_remainder_of_environments_is_refused() -> None:
    with pytest.raises(ValueError, match="`drop_remainder` leaves out transitions"):
        trainer_of(drop_remainder=True)


def test_compiling_a_recurrent_policy_says_that_it_does_not() -> None:
    with pytest.warns(UserWarning, match="torch.compile cannot follow recurrent policies"):
        trainer = trainer_of(compile=True)
    trainer.train()
    assert trainer.num_iterations == 3
