"""A simulator with RSL-RL's interface that knows what it should have been recorded as."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor


class Walkers:
    """N points that walk by their actions; RSL-RL's `VecEnv`, resetting within the step that ends an episode.

    The observation group ``policy`` is ``[N, 3]`` (place, steps of this episode, which walker), ``critic``
    ``[N, 4]`` has the velocity besides. Episode of walker n end after ``lengths[n]`` steps by a time-out, or
    as soon as a walker is further than ``limit`` from the origin, which terminates.

    Args:
        lengths: of the episodes, per walker.
        in_place: hand out the same memory in every step, written to by the next one.
        final: the name in ``extras`` under which the observations before the reset are given, if any.
        layout: how rewards and flags are handed out: ``"flat"`` bool ``[N]``, ``"column"`` ``[N, 1]``,
            ``"integer"`` int64 ``[N]``.
        time_outs: whether ``extras`` tells time-outs.
    """

    num_actions = 2
    step_dt = 0.02

    def __init__(
        self,
        lengths: list[int],
        *,
        in_place: bool = False,
        final: str | None = None,
        layout: str = "flat",
        time_outs: bool = True,
        limit: float = 1e9,
        seed: int = 0,
    ) -> None:
        self.num_envs = len(lengths)
        self.lengths = torch.tensor(lengths)
        self.max_episode_length = max(lengths)
        self.device = "cpu"
        self.cfg: dict[str, Any] = {}
        self.in_place, self.final, self.layout, self.limit = in_place, final, layout, limit
        self.has_time_outs = time_outs
        self.generator = torch.Generator().manual_seed(seed)
        self.episode_length_buf = torch.zeros(self.num_envs, dtype=torch.long)
        self.place = torch.zeros(self.num_envs, 2)
        self.velocity = torch.zeros(self.num_envs)
        self.seen: list[Tensor] = []
        self.memory: dict[str, Tensor] = {}
        self._restart(torch.ones(self.num_envs, dtype=torch.bool))

    def _restart(self, mask: Tensor) -> None:
        fresh = torch.rand(self.num_envs, 2, generator=self.generator) - 0.5
        self.place = torch.where(mask.unsqueeze(-1), fresh, self.place)
        self.velocity = self.velocity.masked_fill(mask, 0.0)
        self.episode_length_buf = self.episode_length_buf.masked_fill(mask, 0)

    def _groups(self) -> dict[str, Tensor]:
        n = torch.arange(self.num_envs)
        policy = torch.stack([self.place[:, 0], self.episode_length_buf / 10, n / 10], -1)
        return {"policy": policy, "critic": torch.cat([policy, self.velocity.unsqueeze(-1)], -1)}

    def _memory(self, name: str, value: Tensor) -> Tensor:
        if not self.in_place:
            return value.clone()
        return self.memory.setdefault(name, torch.empty_like(value)).copy_(value)

    def _hand_out(self, groups: dict[str, Tensor]) -> TensorDict:
        entries = {key: self._memory(key, value) for key, value in groups.items()}
        return TensorDict(entries, [self.num_envs])

    @property
    def unwrapped(self) -> Walkers:
        return self

    def get_observations(self) -> TensorDict:
        return self._hand_out(self._groups())

    def step(self, actions: Tensor) -> tuple[TensorDict, Tensor, Tensor, dict]:
        self.seen.append(actions.clone())
        self.velocity = actions.sum(-1)
        self.place = self.place + 0.1 * actions
        self.episode_length_buf = self.episode_length_buf + 1
        rewards = 1.0 - self.place.square().sum(-1)
        fallen = self.place.abs().amax(-1) > self.limit
        time_outs = (self.episode_length_buf >= self.lengths) & ~fallen
        dones = fallen | time_outs
        final = {key: value.clone() for key, value in self._groups().items()}
        self._restart(dones)
        extras: dict[str, Any] = {"log": {"/fallen": fallen.float().mean()}}
        if self.has_time_outs:
            extras["time_outs"] = self._memory("time_outs", self._laid_out(time_outs))
        if self.final is not None and bool(dones.any()):
            extras[self.final] = final
        rewards = rewards.unsqueeze(-1) if self.layout == "column" else rewards
        return (
            self.get_observations(),
            self._memory("rewards", rewards),
            self._memory("dones", self._laid_out(dones)),
            extras,
        )

    def _laid_out(self, flags: Tensor) -> Tensor:
        if self.layout == "column":
            return flags.unsqueeze(-1)
        return flags.long() if self.layout == "integer" else flags


class SeeingWalkers(Walkers):
    """Walkers with a camera besides, ``[N, 1, 8, 8]``."""

    def _groups(self) -> dict[str, Tensor]:
        grid = torch.linspace(-1, 1, 8)
        near = (grid - self.place[:, :1]).square().unsqueeze(-1) + (
            grid - self.place[:, 1:]
        ).square().unsqueeze(-2)
        return {**super()._groups(), "camera": near.unsqueeze(1)}
