"""Small things to train with: a simulator that counts its own steps, and trainers that take milliseconds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModule, TensorDictSequential
from tensordict.nn.distributions import NormalParamExtractor
from torchrl.data import Binary, Composite, Unbounded
from torchrl.envs import EnvBase
from torchrl.modules import MLP, IndependentNormal, ProbabilisticActor, ValueOperator

from torchrl_rslstorage import (
    ActorCritic,
    MLPActor,
    MLPCritic,
    PendulumEnv,
    PPOConfig,
    RolloutBuffer,
    RolloutCollector,
    RSLPPOTrainer,
)

FLAGS = ("done", "terminated", "truncated")


class Simulator(EnvBase):
    """N environments whose observation is ``(step, environment, episode, sum of the last action)``.

    Episodes of environment n last ``lengths[n]`` steps; even ones terminate, odd ones are cut off. The reward
    is ``100 * episode + step``. With ``in_place`` every tensor that it ever hands out is the same memory,
    written to by each step and each reset, as simulators on a GPU do.

    Args:
        lengths: of the episodes, per environment; a number makes a single environment, without batch size.
        in_place: reuse memory.
        faults: rewards and observations to put in place of the true ones: ``{(key, step, n): value}``, with
            the steps of all episodes counted from 0.
    """

    def __init__(
        self,
        lengths: list[int] | int,
        *,
        in_place: bool = False,
        faults: dict[tuple[str, int, int], float] | None = None,
    ) -> None:
        each = torch.tensor(lengths).unsqueeze(-1)
        batch, column = each.shape[:-1], each.shape
        super().__init__(batch_size=batch)
        self.lengths = each
        self.observation_spec = Composite(observation=Unbounded((*batch, 4)), shape=batch)
        self.action_spec = Unbounded((*batch, 2))
        self.reward_spec = Unbounded(column)
        self.done_spec = Composite({key: Binary(1, column, dtype=torch.bool) for key in FLAGS}, shape=batch)
        self.n = torch.arange(self.lengths.numel()).view(column)
        self.in_place = in_place
        self.faults = faults or {}
        self.is_closed = False
        self.num_steps = 0
        self.step_count = torch.zeros_like(self.lengths)
        self.episode = torch.zeros_like(self.lengths)
        self.acted = torch.zeros(column)
        self.memory: dict[str, torch.Tensor] = {}

    def _hand_out(self, values: dict[str, torch.Tensor]) -> TensorDict:
        for key, value in values.items():
            for (name, step, n), fault in self.faults.items():
                if (name, step + 1) == (key, self.num_steps):
                    value[n] = fault
        if self.in_place:
            for key, value in values.items():
                self.memory.setdefault(key, torch.zeros_like(value)).copy_(value)
            values = {key: self.memory[key] for key in values}
        return TensorDict(values, self.batch_size)

    def _observation(self) -> torch.Tensor:
        return torch.cat([self.step_count, self.n, self.episode, self.acted], -1).float()

    def _step(self, tensordict: TensorDictBase) -> TensorDict:
        self.num_steps += 1
        self.step_count = self.step_count + 1
        self.acted = tensordict["action"].sum(-1, keepdim=True)
        done = self.step_count >= self.lengths
        even = self.n % 2 == 0
        return self._hand_out(
            {
                "observation": self._observation(),
                "reward": (100 * self.episode + self.step_count).float(),
                "done": done,
                "terminated": done & even,
                "truncated": done & ~even,
            }
        )

    def _reset(self, tensordict: TensorDictBase | None = None, **_: Any) -> TensorDict:
        mask = torch.ones_like(self.step_count, dtype=torch.bool)
        if tensordict is not None and "_reset" in tensordict:
            mask = tensordict["_reset"].view_as(mask)
        self.step_count = self.step_count.masked_fill(mask, 0)
        self.episode = self.episode + mask
        return self._hand_out(
            {"observation": self._observation(), **{key: torch.zeros_like(mask) for key in FLAGS}}
        )

    def _set_seed(self, seed: int | None) -> None:
        """Nothing here is random."""


def torchrl_networks(features: int, actions: int) -> tuple[ProbabilisticActor, ValueOperator]:
    """TorchRL's own actor and critic."""
    mean_std = torch.nn.Sequential(MLP(features, 2 * actions, num_cells=[8]), NormalParamExtractor())
    params = ["loc", "scale"]
    actor = ProbabilisticActor(
        TensorDictModule(mean_std, ["observation"], params),
        params,
        distribution_class=IndependentNormal,
        return_log_prob=True,
    )
    return actor, ValueOperator(MLP(features, 1, num_cells=[8]), ["observation"])


def policy_of(env: EnvBase, *, torchrl: bool = False, **kwargs: Any) -> Any:
    """An actor-critic for ``env``: ours, or TorchRL's in sequence."""
    if torchrl:
        features, actions = env.observation_spec["observation"].shape[-1], env.action_spec.shape[-1]
        return TensorDictSequential(*torchrl_networks(features, actions))
    kwargs = {"hidden_dims": (8,), **kwargs}
    return ActorCritic(MLPActor.for_env(env, **kwargs), MLPCritic.for_env(env, **kwargs))


def make_trainer(
    env: EnvBase | None = None,
    *,
    num_steps: int = 4,
    num_iterations: int = 3,
    config: PPOConfig | None = None,
    checkpoint_dir: Path | None = None,
    seed: int = 0,
    normalize_observations: bool = False,
    hidden_dims: tuple[int, ...] = (8,),
    **kwargs: Any,
) -> RSLPPOTrainer:
    """A trainer on ``env`` (four pendulums with episodes of five steps), its networks drawn from ``seed``."""
    torch.manual_seed(seed)
    env = PendulumEnv(4, seed=seed, max_episode_steps=5) if env is None else env
    policy = policy_of(env, hidden_dims=hidden_dims, normalize_observations=normalize_observations)
    num_envs = env.batch_size[0]
    collector = RolloutCollector(env, policy, replay_buffer=RolloutBuffer(num_steps, num_envs))
    return RSLPPOTrainer(
        collector,
        policy.actor,
        policy.critic,
        total_frames=num_iterations * num_steps * num_envs,
        config=config or PPOConfig(num_learning_epochs=2, num_mini_batches=2),
        checkpoint_dir=checkpoint_dir,
        progress_bar=False,
        **kwargs,
    )


def parameters(*modules: torch.nn.Module) -> list[torch.Tensor]:
    """Everything that a module remembers, cloned: parameters and buffers."""
    return [value.detach().clone() for module in modules for value in module.state_dict().values()]


def equal(left: list[torch.Tensor], right: list[torch.Tensor]) -> bool:
    """Equal in every bit."""
    return len(left) == len(right) and all(torch.equal(a, b) for a, b in zip(left, right, strict=True))
