"""What goes into a `RolloutStorage`, one step at a time, and what comes out of it, one mini-batch at a time.

The fields and their order are those of rsl-rl-lib 5.5.1, which fills and reads them by name.
"""

from __future__ import annotations

from dataclasses import dataclass

from tensordict import TensorDictBase
from torch import Tensor

HiddenState = Tensor | tuple[Tensor, ...] | None
"""States of a recurrent network, ``[layers, N, H]``: one tensor (GRU), several (LSTM), or none."""


@dataclass
class Transition:
    """One step of all N environments; rsl-rl-lib's algorithms fill it field by field.

    Examples:
        >>> import torch
        >>> from torchrl_rslstorage.rsl_rl import Transition
        >>> transition = Transition()
        >>> transition.rewards = torch.ones(3)
        >>> transition.clear()
        >>> transition.rewards is None
        True
    """

    observations: TensorDictBase | None = None
    """Observation groups ``[N]`` that the action was chosen by."""
    actions: Tensor | None = None
    """``[N, *actions_shape]``."""
    rewards: Tensor | None = None
    """``[N]`` or ``[N, 1]``."""
    dones: Tensor | None = None
    """``[N]`` or ``[N, 1]``, of any dtype: what is not zero ended the episode."""
    values: Tensor | None = None
    """``[N, 1]``, for reinforcement learning."""
    actions_log_prob: Tensor | None = None
    """``[N]`` or ``[N, 1]``, for reinforcement learning."""
    distribution_params: tuple[Tensor, ...] | None = None
    """``[N, *]`` each, for reinforcement learning."""
    privileged_actions: Tensor | None = None
    """The teacher's ``[N, *actions_shape]``, for distillation."""
    hidden_states: tuple[HiddenState, HiddenState] = (None, None)
    """States of actor and critic as they stood before the step."""

    def clear(self) -> None:
        """Sets every field back to nothing."""
        self.__init__()


@dataclass
class Batch:
    """One mini-batch, or one step for distillation; what a kind of training has not got is None.

    Examples:
        >>> import torch
        >>> from torchrl_rslstorage.rsl_rl import Batch
        >>> Batch(actions=torch.zeros(8, 2)).actions.shape
        torch.Size([8, 2])
    """

    observations: TensorDictBase | None = None
    """``[B]``; ``[T, trajectories]`` with zeros behind their ends, for recurrent networks; ``[N]``."""
    actions: Tensor | None = None
    """``[B, *actions_shape]``; for recurrent networks this and what follows is ``[T, environments, *]``."""
    values: Tensor | None = None
    """``[B, 1]``."""
    advantages: Tensor | None = None
    """``[B, 1]``."""
    returns: Tensor | None = None
    """``[B, 1]``."""
    old_actions_log_prob: Tensor | None = None
    """``[B, 1]``."""
    old_distribution_params: tuple[Tensor, ...] | None = None
    """``[B, *]`` each."""
    hidden_states: tuple[HiddenState, HiddenState] = (None, None)
    """States of actor and critic where the trajectories start, ``[layers, trajectories, H]``."""
    masks: Tensor | None = None
    """Which places of the observations hold a step, ``[T, trajectories]`` bool."""
    privileged_actions: Tensor | None = None
    """The teacher's ``[N, *actions_shape]``."""
    dones: Tensor | None = None
    """``[N, 1]`` uint8."""
