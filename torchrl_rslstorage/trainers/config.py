"""The hyper-parameters of PPO, with RSL-RL's names and defaults, and those of AMP beside it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torchrl_rslstorage.objectives.amp import AMPObjective, check_objective


@dataclass
class PPOConfig:
    """PPO's hyper-parameters (names and defaults: rsl_rl 5.5.1, algorithms/ppo.py).

    `RSLPPOTrainer` checks them.

    Examples:
        >>> from torchrl_rslstorage import PPOConfig
        >>> PPOConfig(num_mini_batches=8).num_learning_epochs
        5

        RSL-RL's runner configs are read whole; `RSLRunnerConfig` gives the rest of them.

        >>> runner = {"num_steps_per_env": 24, "save_interval": 50, "policy": {"init_noise_std": 1.0}}
        >>> PPOConfig.from_rsl_rl({**runner, "algorithm": {"gamma": 0.98}}).gamma
        0.98
    """

    num_learning_epochs: int = 5
    """Passes over each window."""
    num_mini_batches: int = 4
    """Mini-batches of one pass."""
    clip_param: float = 0.2
    """Clip range of the probability ratio and of the value."""
    gamma: float = 0.99
    """Discount."""
    lam: float = 0.95
    """Trace decay of GAE."""
    value_loss_coef: float = 1.0
    """Weight of the value loss."""
    entropy_coef: float = 0.01
    """Weight of the entropy bonus."""
    learning_rate: float = 1e-3
    """Adam's learning rate at the start."""
    max_grad_norm: float = 1.0
    """Bound of the gradient norm, of actor and critic separately."""
    use_clipped_value_loss: bool = True
    """Clip the value loss as the surrogate."""
    schedule: Literal["adaptive", "fixed"] = "adaptive"
    """Adapt the learning rate to the KL of each mini-batch, or keep it."""
    desired_kl: float = 0.01
    """Target of the adaptive schedule."""
    normalize_advantage_per_mini_batch: bool = False
    """Normalise advantages in each mini-batch instead of over the window."""
    reshuffle: bool = False
    """Draw a new permutation for each epoch; RSL-RL keeps one."""
    drop_remainder: bool = False
    """Leave out transitions that do not fill mini-batches evenly, as RSL-RL does."""
    time_out: Literal["final_observation", "rsl_rl"] = "final_observation"
    """Bootstrap time-outs from the true final observation, or by RSL-RL's rule V(s_t)."""

    @classmethod
    def from_rsl_rl(cls, source: object) -> PPOConfig:
        """The hyper-parameters of an RSL-RL runner config, which is read whole (`RSLRunnerConfig.read`).

        ``reshuffle``, ``drop_remainder`` and ``time_out``, of which such configs say nothing, keep this
        package's defaults.

        Args:
            source: a dict, the path of a YAML file, or a config class or instance.

        Raises:
            ValueError: a field is unknown or asks for what this package does not do, or the config has
                curiosity or symmetry, which are no hyper-parameters of PPO; the message names the field.
            ImportError: a YAML file, and PyYAML is missing.
        """
        from torchrl_rslstorage.trainers.rsl_rl_config import RSLRunnerConfig  # imports this module

        config = RSLRunnerConfig.read(source)
        config.require_nothing_beside_ppo()
        return config.ppo

    def check(self) -> None:
        """Refuses what cannot be trained with.

        Raises:
            ValueError: a value is outside its range; the message names it.
        """
        at_least_one = ("num_learning_epochs", "num_mini_batches")
        positive = ("clip_param", "learning_rate", "max_grad_norm", "desired_kl")
        not_negative = ("value_loss_coef", "entropy_coef")
        fraction = ("gamma", "lam")
        _check_ranges(
            self, at_least_one=at_least_one, positive=positive, not_negative=not_negative, fraction=fraction
        )


@dataclass
class AMPConfig:
    """The hyper-parameters of adversarial motion priors beside PPO; `AMPTrainer` checks them.

    Examples:
        >>> from torchrl_rslstorage import AMPConfig
        >>> AMPConfig(objective="bce").gradient_penalty_coef
        10.0
    """

    objective: AMPObjective = "lsgan"
    """What the discriminator is trained with, and with it the form of the style reward."""
    style_reward_scale: float = 1.0
    """Factor of the style reward, which is also multiplied by the seconds of one step."""
    task_style_lerp: float = 0.0
    """Weight of the task's reward; the style's has the rest of 1."""
    history_length: int = 100
    """Steps per environment that the discriminator's policy side is drawn from."""
    discriminator_hidden_dims: tuple[int, ...] = (256, 128)
    """Hidden layers of the discriminator."""
    discriminator_learning_rate: float = 1e-4
    """Learning rate of its Adam, which does not adapt."""
    discriminator_max_grad_norm: float = 1.0
    """Bound of its gradient norm."""
    gradient_penalty_coef: float = 10.0
    """Weight of the squared slope on demonstrations."""
    logit_regularization_coef: float = 0.0
    """Weight of the squared last layer."""
    weight_regularization_coef: float = 1e-4
    """Weight of all squared weight matrices."""
    amp_normalization: bool = True
    """Normalise what the discriminator sees by running moments."""

    def __post_init__(self) -> None:
        self.discriminator_hidden_dims = tuple(self.discriminator_hidden_dims)  # JSON has lists

    def check(self) -> None:
        """Refuses what cannot be trained with.

        Raises:
            ValueError: a value is outside its range; the message names it.
        """
        check_objective(self.objective)
        positive = ("discriminator_learning_rate", "discriminator_max_grad_norm", "style_reward_scale")
        not_negative = (
            "gradient_penalty_coef",
            "logit_regularization_coef",
            "weight_regularization_coef",
        )
        _check_ranges(
            self,
            at_least_one=("history_length",),
            positive=positive,
            not_negative=not_negative,
            fraction=("task_style_lerp",),
        )


_MAY_BE_INFINITE = ("clip_param", "desired_kl", "max_grad_norm", "discriminator_max_grad_norm")
"""Bounds, which infinity switches off."""


def _check_ranges(
    config: Any,
    *,
    at_least_one: Sequence[str],
    positive: Sequence[str],
    not_negative: Sequence[str],
    fraction: Sequence[str],
) -> None:
    """Raises a ValueError for the first field that is out of its range."""
    for names, valid, what in (
        (at_least_one, lambda x: x >= 1, "at least 1"),
        (positive, lambda x: x > 0, "positive"),
        (not_negative, lambda x: x >= 0, "zero or more"),
        (fraction, lambda x: 0 <= x <= 1, "between 0 and 1"),
    ):
        for name in names:
            value = getattr(config, name)
            if not valid(value) or (math.isinf(value) and name not in _MAY_BE_INFINITE):
                raise ValueError(f"`{name}` must be {what}, got {value}.")
