"""What the embedded tasks share: episodes of a bounded length, one generator, a state that can be saved."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, TypeVar

import torch
from tensordict.utils import NestedKey
from torch import Tensor

from torchrl_rslstorage.envs.base import BatchedEnv, Leaves

Env = TypeVar("Env", bound="EmbeddedEnv")


class EmbeddedEnv(BatchedEnv):
    """A `BatchedEnv` whose whole state is one named tuple of tensors, the last of them ``step_count [N, 1]``.

    A subclass draws starts (`_draw`), says what is observed (`_observe`) and how a step is made (`advance`).
    The state is replaced, never written to, so that no rollout can hold a tensor that changes later.

    Args:
        num_envs: N.
        max_episode_steps: the length of an episode, after which it is truncated.
        init_at_random_ep_len: start the step counters of the first full reset uniformly in
            ``[0, max_episode_steps)``; every later episode starts at 0. All N would otherwise be in step for
            ever: a window of 24 steps then holds a single phase of the episode, the critic and the
            normaliser chase it, and learning collapses again after it has succeeded.
        device: where the state and every tensor live.

    Raises:
        ValueError: ``num_envs`` or ``max_episode_steps`` is not a positive integer.
    """

    can_save_state = True

    state_type: type[Any]
    """The named tuple."""

    def __init__(
        self,
        num_envs: int,
        *,
        max_episode_steps: int,
        init_at_random_ep_len: bool,
        device: torch.device | str,
    ) -> None:
        if not isinstance(max_episode_steps, int) or max_episode_steps < 1:
            raise ValueError(
                f"`max_episode_steps` must be at least 1, a whole number, got {max_episode_steps}."
            )
        super().__init__(num_envs, device=device)
        self.max_episode_steps = max_episode_steps
        self.partial_first_episodes = init_at_random_ep_len
        self.state: Any = None
        self._first_reset_done = False
        self._generator = torch.Generator(self.device)

    @abstractmethod
    def _draw(self) -> tuple[Tensor, ...]:
        """N starts: every field of the state but its step counters."""

    @abstractmethod
    def _observe(self, state: Any) -> Leaves:
        """What is seen of a state: the leaves of the observation spec."""

    def start(self) -> Leaves:
        """Draws all N anew; their step counters are spread out the first time."""
        drawn = self._draw()
        shape = (self.num_envs, 1)
        if self.partial_first_episodes and not self._first_reset_done:
            step_count = torch.randint(
                self.max_episode_steps, shape, device=self.device, generator=self._generator
            )
        else:
            step_count = torch.zeros(shape, dtype=torch.int64, device=self.device)
        self._first_reset_done = True
        self.state = self.state_type(*drawn, step_count)
        return self._observe(self.state)

    def restart(self, mask: Tensor) -> Leaves:
        """Draws those in ``mask [N, 1]`` anew, their step counters at 0."""
        old = self._current()
        drawn = [torch.where(mask, new, was) for new, was in zip(self._draw(), old, strict=False)]
        self.state = self.state_type(*drawn, old.step_count.masked_fill(mask, 0))
        return self._observe(self.state)

    def after_step(self, next_leaves: Mapping[NestedKey, Tensor]) -> Leaves:
        """Draws those that are done anew.

        On the CPU nothing is drawn in a step that ends no episode, as in TorchRL's own path, which
        then makes the same numbers. Elsewhere that question would be a wait for the device: the
        draw is made in every step.
        """
        done = next_leaves["done"]
        if done.device.type == "cpu" and not done.any():
            return {key: next_leaves[key] for key in self.observation_spec.keys()}
        return self.restart(done)

    def get_extra_state(self) -> dict[str, Any]:
        """All that the next step depends on, as ``state_dict`` carries it under ``_extra_state``."""
        return {
            "state": None if self.state is None else self.state._asdict(),
            "generator": self._generator.get_state(),
            "first_reset_done": self._first_reset_done,
        }

    def set_extra_state(self, state: Mapping[str, Any]) -> None:
        """Continues from what `get_extra_state` returned, to the bit.

        Raises:
            ValueError: the state is that of another number of environments; nothing is changed then.
        """
        loaded = state["state"]
        if loaded is not None:
            for name, value in loaded.items():
                if len(value) != self.num_envs:
                    raise ValueError(
                        f"The saved `{name}` has shape {tuple(value.shape)}, but this environment holds "
                        f"{(self.num_envs, *value.shape[1:])}: build it with `num_envs={len(value)}`."
                    )
            loaded = self.state_type(**{k: v.to(self.device, copy=True) for k, v in loaded.items()})
        self._generator.set_state(state["generator"].cpu())
        self.state = loaded
        self._first_reset_done = bool(state["first_reset_done"])

    def to(self: Env, device: torch.device | str | int) -> Env:
        """Moves the state to ``device``.

        A generator cannot move between kinds of device: a new one is seeded from the old one's seed.
        """
        before = self.device
        super().to(device)
        if self.device != before:
            seed = self._generator.initial_seed()
            self._generator = torch.Generator(self.device).manual_seed(seed)
            if self.state is not None:
                self.state = self.state_type(*(x.to(self.device) for x in self.state))
        return self

    def _set_seed(self, seed: int | None) -> None:
        if seed is None:
            self._generator.seed()
        else:
            self._generator.manual_seed(seed)

    def _current(self) -> Any:
        if self.state is None:
            raise RuntimeError(f"{type(self).__name__} was not started yet: call `reset()` before `step()`.")
        return self.state
