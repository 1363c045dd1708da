"""The step that both environments share: TorchRL's `step_and_maybe_reset`, with no wait for the device."""

from __future__ import annotations

import functools
from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.utils import NestedKey
from torch import Tensor
from torchrl.data import Binary, Composite, Unbounded
from torchrl.envs import EnvBase

Leaves = dict[NestedKey, Tensor]
"""Tensors by key, each ``[N, *]``, owned by whoever receives them."""

_NOT_CARRIED = ("next", "reward", "_reset")
"""What a root hands on to the next one is everything else (TorchRL's `step_mdp`)."""

_CLEARED = ("done", "terminated", "truncated")
"""The done keys, in the order in which every TensorDict of ours carries them."""


class BatchedEnv(EnvBase):
    """A batch of N environments that reset themselves, one TensorDict ``[N]`` in and two out.

    A subclass gives four pieces of tensor maths; this class turns them into the two paths that TorchRL
    knows, which agree:

        step_and_maybe_reset    advance ─► next ─► after_step ─────► root of the next step
        step, then reset        advance ─► next    restart(mask) ──► root of the next step

    The upper one is the lean one, taken by collectors. The lower one is what a `TransformedEnv` around
    the environment takes; TorchRL asks the device there in each step whether anything is done.

    Nothing that is handed out is written to again.

    Args:
        num_envs: N, at least 1.
        device: where every tensor lives.

    Raises:
        ValueError: ``num_envs`` is not a positive integer.
    """

    can_save_state: bool = False
    """Whether ``state_dict`` holds all that the next step depends on."""

    partial_first_episodes: bool = False
    """Whether each environment's first episode starts midway, and is best left out of statistics."""

    def __init__(self, num_envs: int, *, device: torch.device | str = "cpu") -> None:
        if isinstance(num_envs, bool) or not isinstance(num_envs, int) or num_envs < 1:
            raise ValueError(f"`num_envs` must be a positive integer, got {num_envs!r}.")
        super().__init__(device=torch.device(device), batch_size=torch.Size([num_envs]))
        column = torch.Size([num_envs, 1])
        self.reward_spec = Unbounded(column, dtype=torch.float32, device=self.device)
        self.done_spec = Composite(
            {key: Binary(1, column, dtype=torch.bool, device=self.device) for key in _CLEARED},
            shape=self.batch_size,
            device=self.device,
        )

    @property
    def num_envs(self) -> int:
        """The number of environments, N."""
        return self.batch_size[0]

    @abstractmethod
    def start(self) -> Leaves:
        """Resets all N environments and returns their observations."""

    @abstractmethod
    def restart(self, mask: Tensor) -> Leaves:
        """Resets the environments in ``mask [N, 1]`` and returns all N observations."""

    @abstractmethod
    def advance(self, action: Tensor) -> Leaves:
        """Takes one step and returns ``next``: final observations, reward and the three done flags."""

    @abstractmethod
    def after_step(self, next_leaves: Mapping[NestedKey, Tensor]) -> Leaves:
        """Resets what ``next_leaves`` calls done and returns the N observations to act on now."""

    @functools.cached_property
    def is_lean(self) -> bool:
        """Whether a step is still the one written here: a subclass may override TorchRL's own methods."""
        return all(
            getattr(type(self), name) is getattr(BatchedEnv, name)
            for name in ("_step", "_reset", "step", "reset", "step_and_maybe_reset")
        )

    def step_leaves(self, action: Tensor) -> tuple[Leaves, Leaves]:
        """What `step_and_maybe_reset` does, without a TensorDict: ``next``, and the next observations.

        Args:
            action: ``[N, *]``.

        Raises:
            ValueError: the action has another shape than this environment takes.
        """
        next_leaves = self.advance(self._checked(action))
        return next_leaves, self.after_step(next_leaves)

    def step_and_maybe_reset(self, tensordict: TensorDictBase) -> tuple[TensorDictBase, TensorDictBase]:
        """Takes one step, resets what is done, and returns ``(tensordict, next_root)``.

        The semantics are TorchRL's: ``tensordict`` gains ``"next"``, with the observation in which the
        episode really ended; ``next_root`` carries the observations to act on now, cleared done flags
        and whatever else stood at the root. (Of the latter, TorchRL zeroes the rows that reset, unless
        all N reset at once; here they stay, for the policy to write over.) Nothing waits for the device.

        Args:
            tensordict: ``[N]``, with ``action``. What a policy left under ``"next"`` is kept.
        """
        if not self.is_lean or tensordict.batch_size != self.batch_size or "_step" in tensordict:
            # A subclass's own step, a wrong shape, whose error the base class words, or a partial step.
            return super().step_and_maybe_reset(tensordict)
        if tensordict.device != self.device:
            tensordict = tensordict.to(self.device)
        preset = tensordict.get("next") if "next" in tensordict else None
        next_root = tensordict.copy()
        for key in _NOT_CARRIED:
            if key in next_root:
                del next_root[key]

        next_leaves = self.advance(self._checked_action(tensordict))
        next_tensordict = self._tensordict(next_leaves)
        if preset is not None:
            next_tensordict.update(preset.exclude(*next_leaves))
        tensordict.set("next", next_tensordict)

        for key, value in self.after_step(next_leaves).items():
            next_root.set(key, value)
        for key in _CLEARED:
            next_root.set(key, torch.zeros_like(next_leaves[key]))
        return tensordict, next_root

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        return self._tensordict(self.advance(self._checked_action(tensordict)))

    def _reset(self, tensordict: TensorDictBase | None = None, **_: Any) -> TensorDictBase:
        mask = None if tensordict is None else tensordict.get("_reset", None)
        leaves = self.start() if mask is None else self.restart(mask.view(-1, 1))
        flags: Leaves = {
            key: torch.zeros(self.num_envs, 1, dtype=torch.bool, device=self.device) for key in _CLEARED
        }
        return self._tensordict({**leaves, **flags})

    def _tensordict(self, leaves: Leaves) -> TensorDict:
        return TensorDict(leaves, batch_size=self.batch_size, device=self.device)

    def _checked_action(self, tensordict: TensorDictBase) -> Tensor:
        """The action, refused where its shape would broadcast."""
        return self._checked(tensordict.get("action"))

    def _checked(self, action: Tensor) -> Tensor:
        action = action.detach()  # else the state would hold every past step's graph
        if action.shape != self._action_shape:
            raise ValueError(
                f"`action` has shape {tuple(action.shape)}, but this environment takes "
                f"{tuple(self._action_shape)}."
            )
        return action

    @functools.cached_property
    def _action_shape(self) -> torch.Size:
        return self.action_spec.shape  # found through several properties: not in every step
