"""What the objectives must compute, written from the definitions: sums over cells, no recursion, no tricks.

Everything is in float64. Rollouts are random, with true final observations that are no row of the window.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from hypothesis import strategies as st
from rsl_rl.algorithms import PPO
from rsl_rl.models import MLPModel
from rsl_rl.storage import RolloutStorage
from tensordict import TensorDict, TensorDictBase
from torch import Tensor
from torch.distributions import Independent, Normal, kl_divergence

from torchrl_rslstorage import MLPActor, MLPCritic, RolloutBuffer

# -- random rollouts ---------------------------------------------------------------------------


class Sizes(NamedTuple):
    """A rollout to be: T, N, how often episodes end or are cut off, and what to draw the rest from."""

    num_steps: int
    num_envs: int
    p_terminated: float = 0.2
    p_truncated: float = 0.2
    seed: int = 0


@st.composite
def sizes(draw: st.DrawFn, max_steps: int = 7, max_envs: int = 4) -> Sizes:
    chance = st.sampled_from([0.0, 0.2, 0.7, 1.0])
    return Sizes(
        draw(st.integers(1, max_steps)),
        draw(st.integers(1, max_envs)),
        draw(chance),
        draw(chance),
        draw(st.integers(0, 2**31 - 1)),
    )


DISCOUNTS = st.floats(0.0, 1.0)


def make_critic(
    in_keys: tuple[str, ...] = ("observation",), in_features: int = 3, seed: int = 0
) -> MLPCritic:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return MLPCritic(in_keys, in_features, hidden_dims=(8,), activation="tanh").double()


def make_actor(in_features: int = 3, action_dim: int = 2, seed: int = 1, **options) -> MLPActor:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        actor = MLPActor(["observation"], in_features, action_dim, hidden_dims=(8,), **options)
        return actor.double()


def make_rollout(plan: Sizes, dtype: torch.dtype = torch.float64) -> TensorDict:
    """``[T, N]`` with a full ``next``: the next observation is the next row or, after ``done``, final."""
    T, N = plan.num_steps, plan.num_envs
    rng = torch.Generator().manual_seed(plan.seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=rng, dtype=torch.float64).to(dtype)

    terminated = torch.rand(T, N, 1, generator=rng) < plan.p_terminated
    truncated = torch.rand(T, N, 1, generator=rng) < plan.p_truncated
    done = terminated | truncated
    rows, privileged = normal(T + 1, N, 3), normal(T + 1, N, 2)
    after = {
        "observation": torch.where(done, normal(T, N, 3), rows[1:]),
        "privileged": torch.where(done, normal(T, N, 2), privileged[1:]),
        "reward": normal(T, N, 1),
        "done": done,
        "terminated": terminated,
        "truncated": truncated,
    }
    root = {
        "observation": rows[:-1].clone(),
        "privileged": privileged[:-1].clone(),
        "action": normal(T, N, 2),
    }
    return TensorDict({**root, "next": after}, [T, N])


def with_values(rollout: TensorDict, critic: MLPCritic) -> TensorDict:
    """The rollout as it comes from a policy that writes its values."""
    return rollout.copy().set("state_value", critic.evaluate(rollout).detach())


def in_buffer(rollout: TensorDictBase, **options) -> RolloutBuffer:
    buffer = RolloutBuffer(*rollout.batch_size, **options)
    buffer.extend(rollout, time_dim=0)
    return buffer


# -- advantages --------------------------------------------------------------------------------


def advantages_by_definition(
    rollout: TensorDictBase, value: Tensor, next_value: Tensor, *, gamma: float, lmbda: float
) -> Tensor:
    """``A_t = Σ_k (γλ)^(k−t) δ_k`` over the steps from t to the end of t's trajectory, ``[T, N, 1]``.

    ``δ_k = r_k + γ·V(s'_k)·(1 − terminated_k) − V(s_k)``: what stands under ``next`` is what counts, which
    for a step inside of a trajectory is the next row.
    """
    reward, done = rollout["next", "reward"], rollout["next", "done"]
    alive = (~rollout["next", "terminated"]).double()
    delta = reward + gamma * next_value * alive - value
    T, N = rollout.batch_size
    out = torch.zeros(T, N, 1, dtype=torch.float64)
    for t in range(T):
        for n in range(N):
            for k in range(t, end_of_trajectory(done, t, n) + 1):
                out[t, n] += (gamma * lmbda) ** (k - t) * delta[k, n]
    return out


def end_of_trajectory(done: Tensor, t: int, n: int) -> int:
    """The first step from ``t`` on whose episode is over, or the window's last."""
    steps = range(t, len(done))
    return next((k for k in steps if done[k, n]), steps[-1])


def returns_by_definition(rollout: TensorDictBase, next_value: Tensor, *, gamma: float) -> Tensor:
    """Monte-Carlo: ``Σ_k γ^(k−t) r_k``, plus the discounted value of what follows unless it terminated."""
    reward, done, terminated = (rollout["next", name] for name in ("reward", "done", "terminated"))
    out = torch.zeros_like(reward)
    for t, n in torch.cartesian_prod(*(torch.arange(size) for size in rollout.batch_size)).tolist():
        end = end_of_trajectory(done, t, n)
        for k in range(t, end + 1):
            out[t, n] += gamma ** (k - t) * reward[k, n]
        if not terminated[end, n]:
            out[t, n] += gamma ** (end - t + 1) * next_value[end, n]
    return out


# -- the loss ----------------------------------------------------------------------------------


def losses_by_definition(
    batch: TensorDictBase,
    loc: Tensor,
    scale: Tensor,
    value: Tensor,
    *,
    clip_epsilon: float = 0.2,
    value_radius: float | None = 0.2,
    critic_coeff: float = 1.0,
    entropy_coeff: float = 0.01,
    normalize: bool = False,
) -> dict[str, Tensor]:
    """RSL-RL's terms sample by sample, from ``torch.distributions.Normal`` one action dimension at a time."""
    new, old = Normal(loc, scale), Normal(batch["loc"], batch["scale"])
    advantage = batch["advantage"].flatten()
    if normalize:
        mean = sum(advantage) / len(advantage)
        variance = sum((a - mean) ** 2 for a in advantage) / (len(advantage) - 1)
        advantage = (advantage - mean) / (variance.sqrt() + 1e-8)
    surrogate, critic, clipped = [], [], []
    for b in range(len(batch)):
        ratio = (new.log_prob(batch["action"])[b].sum() - batch["action_log_prob"].flatten()[b]).exp()
        bound = min(max(ratio, 1 - clip_epsilon), 1 + clip_epsilon)
        surrogate.append(-min(advantage[b] * ratio, advantage[b] * bound))
        clipped.append(float(bound != ratio))
        target, v, before = (x.flatten()[b] for x in (batch["value_target"], value, batch["state_value"]))
        error = (v - target) ** 2
        if value_radius is not None:
            near = before + min(max(v - before, -value_radius), value_radius)
            error = max(error, (near - target) ** 2)
        critic.append(error)
    entropy = new.entropy().expand_as(loc).sum(-1).mean()
    target = batch["value_target"].flatten()
    return {
        "loss_objective": torch.stack(surrogate).mean(),
        "loss_critic": critic_coeff * torch.stack(critic).mean(),
        "loss_entropy": -entropy_coeff * entropy,
        "kl": kl_divergence(old, new).sum(-1).mean(),
        "entropy": entropy,
        "clip_fraction": torch.tensor(clipped, dtype=loc.dtype).mean(),
        "explained_variance": 1 - (target - value.flatten()).var(correction=0) / target.var(correction=0),
    }


def vector_normal(loc: Tensor, scale: Tensor) -> Independent:
    return Independent(Normal(loc, scale), 1)


# -- RSL-RL ------------------------------------------------------------------------------------


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """RSL-RL makes all its tensors in the default dtype, and says nothing about others."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


class Problem(NamedTuple):
    """What RSL-RL and this package are both given: sizes, networks, observation groups."""

    num_steps: int
    num_envs: int
    action_dim: int = 2
    hidden_dims: tuple[int, ...] = (32, 32)
    activation: str = "elu"
    std_type: str = "scalar"
    normalize_observations: bool = False
    actor_groups: tuple[str, ...] = ("observation",)
    critic_groups: tuple[str, ...] = ("observation",)

    WIDTHS = {"observation": 5, "privileged": 3}  # noqa: RUF012 - a constant, not a field

    def width(self, groups: tuple[str, ...]) -> int:
        return sum(self.WIDTHS[group] for group in groups)

    def observe(self) -> TensorDict:
        """Observations of one step, from torch's global generator."""
        shape = {group: (self.num_envs, width) for group, width in self.WIDTHS.items()}
        return TensorDict(
            {group: 2 * torch.randn(size) + 1 for group, size in shape.items()}, [self.num_envs]
        )


def rsl_rl_ppo(problem: Problem, **options) -> PPO:
    """RSL-RL's PPO on its own models, as its runner builds it."""
    observations = problem.observe()
    groups = {"actor": list(problem.actor_groups), "critic": list(problem.critic_groups)}
    network = {
        "hidden_dims": list(problem.hidden_dims),
        "activation": problem.activation,
        "obs_normalization": problem.normalize_observations,
    }
    gaussian = {"class_name": "GaussianDistribution", "init_std": 1.0, "std_type": problem.std_type}
    actor = MLPModel(observations, groups, "actor", problem.action_dim, distribution_cfg=gaussian, **network)
    critic = MLPModel(observations, groups, "critic", 1, **network)
    storage = RolloutStorage(
        "rl", problem.num_envs, problem.num_steps, observations, [problem.action_dim], "cpu"
    )
    return PPO(actor, critic, storage, **options)


def copies_of(ppo: PPO, problem: Problem) -> tuple[MLPActor, MLPCritic]:
    """This package's actor and critic with RSL-RL's weights and normalisers."""
    network = {
        "hidden_dims": problem.hidden_dims,
        "activation": problem.activation,
        "normalize_observations": problem.normalize_observations,
    }
    actor = MLPActor(
        problem.actor_groups,
        problem.width(problem.actor_groups),
        problem.action_dim,
        std_type=problem.std_type,
        **network,
    )
    critic = MLPCritic(problem.critic_groups, problem.width(problem.critic_groups), **network)
    for ours, theirs in ((actor, ppo.actor), (critic, ppo.critic)):
        for (_, to), (_, source) in zip(all_tensors(ours), all_tensors(theirs), strict=True):
            to.copy_(source.view_as(to))
    return actor, critic


def all_tensors(module: MLPActor | MLPCritic | MLPModel) -> list[tuple[str, Tensor]]:
    """Parameters and statistics of an actor or critic of either side, in one order."""
    out = [(f"mlp.{name}", tensor) for name, tensor in module.mlp.named_parameters()]
    normalizer = getattr(module, "normalizer", None) or getattr(module, "obs_normalizer", None)
    if normalizer is not None:
        out += [(f"normalizer.{name.strip('_')}", tensor) for name, tensor in normalizer.named_buffers()]
    out += [(name, tensor) for name, tensor in module.named_parameters() if "std_param" in name]
    return [(name, tensor.detach()) for name, tensor in out]


def rsl_rl_rollout(ppo: PPO, problem: Problem, p_done: float = 0.2) -> TensorDict:
    """One window that RSL-RL collects in a random world, and the same as a ``[T, N]`` TensorDict.

    An episode that ends is a time-out half of the time.
    """
    observations, rows = problem.observe(), []
    for _ in range(problem.num_steps):
        ppo.act(observations)
        acted = ppo.transition
        mean, std = acted.distribution_params
        row = observations.clone().update(
            {
                "action": acted.actions.clone(),
                "action_log_prob": acted.actions_log_prob.flatten().clone(),
                "loc": mean.clone(),
                "scale": std.clone(),
                "state_value": acted.values.clone(),
            }
        )
        reward = torch.randn(problem.num_envs)
        done = torch.rand(problem.num_envs) < p_done
        time_out = done & (torch.rand(problem.num_envs) < 0.5)
        observations = problem.observe()
        ppo.process_env_step(observations, reward, done, {"time_outs": time_out})
        flags = {"done": done, "truncated": time_out, "terminated": done & ~time_out, "reward": reward}
        after = observations.clone().update({name: flag.unsqueeze(-1) for name, flag in flags.items()})
        rows.append(row.set("next", after))
    ppo.compute_returns(observations)
    return torch.stack(rows)
