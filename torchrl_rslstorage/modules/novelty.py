"""Random network distillation: how new an observation is, and what reward that is worth."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from inspect import signature
from typing import Any

import torch
from tensordict import TensorDictBase
from tensordict.utils import NestedKey
from torch import Tensor, nn
from torchrl.envs import EnvBase

from torchrl_rslstorage.modules.heads import Activation, make_mlp
from torchrl_rslstorage.modules.normalizer import EmpiricalNormalizer
from torchrl_rslstorage.modules.observations import ObservationModule, observation_width

_UNTIL = 100_000_000
"""Samples that normalisers learn from, and the discount of the reward's sums (rsl_rl 5.5.1, extensions/rnd.py
and modules/normalization.py)."""
_GAMMA = 0.99


class RandomNetworkDistillation(ObservationModule):
    """Curiosity: how badly a network predicts what a random one makes of an observation.

        novelty(s) = ‖target(s) − predictor(s)‖₂

    The target stays as it was drawn; the predictor learns it where the policy goes, so that what was seen
    often is no longer new. ``RSLPPOTrainer(..., rnd=...)`` trains it with TorchRL's ``RNDLoss`` and adds
    ``weight · novelty`` of the next observation to the reward. Burda et al. 2018, arXiv:1810.12894; Schwarke
    et al. 2023, CoRL; rsl_rl 5.5.1, extensions/rnd.py.

    TorchRL's ``RNDTransform`` is another measure: the mean square instead of the norm, other normalisers
    (which move in every step, between acting and learning), both clipped, and no weight.

    Args:
        in_keys: observation groups, concatenated: RSL-RL's ``rnd_state``.
        in_features: their summed width.
        weight: of the novelty in the reward, at the start, per step. RSL-RL's configs give it per second;
            its runner multiplies it with the environment's ``step_dt``.
        weight_schedule: how the weight changes, as `intrinsic_weight` reads it; None keeps it.
        num_outputs: width of what is predicted.
        predictor_hidden_dims: hidden layers of the predictor; -1 stands for ``in_features``.
        target_hidden_dims: hidden layers of the target.
        activation: name of the activation.
        state_normalization: keep an `EmpiricalNormalizer` before both networks.
        reward_normalization: divide the novelty by the standard deviation of its discounted sums.
        learning_rate: of the predictor's Adam.
        novelty_key: the entry written.

    Raises:
        ValueError: an unknown activation or schedule, a width or a rate that is not positive, a weight that
            is not finite.

    Examples:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from torchrl_rslstorage import RandomNetworkDistillation
        >>> rnd = RandomNetworkDistillation(["observation"], 3, weight=0.1)
        >>> rnd(TensorDict({"observation": torch.zeros(5, 3)}, [5]))["novelty"].shape
        torch.Size([5, 1])
    """

    def __init__(
        self,
        in_keys: Sequence[NestedKey],
        in_features: int,
        *,
        weight: float,
        weight_schedule: Mapping[str, Any] | None = None,
        num_outputs: int = 1,
        predictor_hidden_dims: Sequence[int] = (-1,),
        target_hidden_dims: Sequence[int] = (-1,),
        activation: Activation = "elu",
        state_normalization: bool = False,
        reward_normalization: bool = False,
        learning_rate: float = 1e-3,
        novelty_key: NestedKey = "novelty",
    ) -> None:
        super().__init__(
            in_keys, in_features, out_keys=[novelty_key], normalize_observations=state_normalization
        )
        if not 0 < learning_rate < math.inf:
            raise ValueError(f"`learning_rate` must be positive, got {learning_rate}.")
        if num_outputs < 1:
            raise ValueError(f"`num_outputs` must be at least 1, got {num_outputs}.")
        end = intrinsic_weight(_UNTIL, weight, weight_schedule)  # refuses what it cannot read
        if not (math.isfinite(weight) and math.isfinite(end)):
            raise ValueError(f"`weight` must be finite from start to end, got {weight} and {end}.")
        self.weight = weight
        self.weight_schedule = weight_schedule
        self.learning_rate = learning_rate
        self._novelty_key = novelty_key
        if state_normalization:
            self.normalizer = EmpiricalNormalizer(in_features, until=_UNTIL)
        self.reward_normalizer = _ReturnNormalizer() if reward_normalization else None
        self.predictor, self.target = (
            make_mlp(in_features, num_outputs, [in_features if d == -1 else d for d in dims], activation)
            for dims in (predictor_hidden_dims, target_hidden_dims)
        )
        self.target.requires_grad_(False)

    @classmethod
    def for_env(
        cls, env: EnvBase, in_keys: Sequence[NestedKey] = ("observation",), **kwargs: Any
    ) -> RandomNetworkDistillation:
        """One whose width is read off an environment; raises as `MLPActor.for_env` does."""
        return cls(in_keys, observation_width(env, in_keys), **kwargs)

    def raw(self, tensordict: TensorDictBase) -> Tensor:
        """The observation groups as they are, side by side, ``[*, F]``."""
        return self._concatenate(tensordict)

    def normalize(self, x: Tensor) -> Tensor:
        """``[*, F]`` as both networks read it (TorchRL's ``RNDLoss`` calls this)."""
        x = x.to(self._dtype)
        return x if self.normalizer is None else self.normalizer(x)

    @torch.no_grad()
    def novelty(self, tensordict: TensorDictBase) -> Tensor:
        """How new the observations are, ``[*, 1]``; neither weighted nor normalised."""
        x = self.features(tensordict)
        return torch.linalg.vector_norm(self.target(x) - self.predictor(x), dim=-1, keepdim=True)

    @torch.no_grad()
    def intrinsic_rewards(self, novelty: Tensor, first_step: int) -> tuple[Tensor, float]:
        """The rewards ``[T, N, 1]`` for the novelties of T steps one after the other, and the last weight.

        In training mode the reward's normaliser takes them in, one step after the other.

        Args:
            novelty: ``[T, N, 1]``.
            first_step: the number of the first of them; a run's first is 1.
        """
        if self.reward_normalizer is not None:
            novelty = torch.stack([self.reward_normalizer(row) for row in novelty])
        steps = range(first_step, first_step + len(novelty))
        weights = [intrinsic_weight(step, self.weight, self.weight_schedule) for step in steps]
        return novelty * novelty.new_tensor(weights).view(-1, 1, 1), weights[-1]

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Writes the novelty."""
        return tensordict.set(self._novelty_key, self.novelty(tensordict))


class _ReturnNormalizer(nn.Module):
    """Rewards over the standard deviation of their discounted sums.

        r_t ← r_t / std(R_1 … R_t),     R_t = γ·R_{t−1} + r_t

    The sums run on through the ends of episodes, as RSL-RL's (rsl_rl 5.5.1, modules/normalization.py,
    ``EmpiricalDiscountedVariationNormalization``), which forgets them on resume.
    """

    def __init__(self) -> None:
        super().__init__()
        self.moments = EmpiricalNormalizer(1, until=_UNTIL)
        self._sums: Tensor | None = None

    def forward(self, reward: Tensor) -> Tensor:
        """Normalises the rewards ``[N, 1]`` of one step."""
        if self.training:
            self._sums = reward if self._sums is None else self._sums * _GAMMA + reward
            self.moments.update(self._sums)
        std = self.moments.std
        return torch.where(std > 0, reward / std, reward)

    def get_extra_state(self) -> Tensor | None:
        """The discounted sums; a buffer could not be loaded before their number is known."""
        return None if self._sums is None else self._sums.clone()

    def set_extra_state(self, state: Tensor | None) -> None:
        """Takes them back."""
        self._sums = None if state is None else state.to(self.moments.mean.device, copy=True)


def intrinsic_weight(step: int, weight: float, schedule: Mapping[str, Any] | None) -> float:
    """The weight of the intrinsic reward in an environment step (rsl_rl 5.5.1, extensions/rnd.py).

        constant    w
        step        w before final_step, then v
        linear      w before initial_step, v after final_step, on a straight line between

    Args:
        step: counted from 1.
        weight: w.
        schedule: None, or RSL-RL's dictionary: ``{"mode": "constant"}``, ``{"mode": "step", "final_step": …,
            "final_value": v}``, ``{"mode": "linear", "initial_step": …, "final_step": …, "final_value": v}``.

    Raises:
        ValueError: another mode, or other entries than its.

    Examples:
        >>> from torchrl_rslstorage import intrinsic_weight
        >>> linear = {"mode": "linear", "initial_step": 10, "final_step": 20, "final_value": 0.0}
        >>> [intrinsic_weight(step, 1.0, linear) for step in (1, 15, 30)]
        [1.0, 0.5, 0.0]
    """
    if schedule is None:
        return weight
    options = dict(schedule) if isinstance(schedule, Mapping) else {}
    mode = options.pop("mode", None)
    if mode not in _SCHEDULES:
        raise ValueError(f"`weight_schedule` needs a mode out of {list(_SCHEDULES)}, got {schedule!r}.")
    function = _SCHEDULES[mode]
    expected = list(signature(function).parameters)[2:]
    if sorted(options) != sorted(expected):
        raise ValueError(
            f"The weight schedule '{mode}' takes {expected or 'nothing'}, got {sorted(options) or 'nothing'}."
        )
    return function(step, weight, **options)


def _constant(step: int, weight: float) -> float:
    return weight


def _step(step: int, weight: float, final_step: int, final_value: float) -> float:
    return weight if step < final_step else final_value


def _linear(step: int, weight: float, initial_step: int, final_step: int, final_value: float) -> float:
    if not initial_step < final_step:
        raise ValueError(f"`final_step` must come after `initial_step` {initial_step}, got {final_step}.")
    passed = (step - initial_step) / (final_step - initial_step)
    return weight + (final_value - weight) * min(max(passed, 0.0), 1.0)


_SCHEDULES: dict[str, Callable[..., float]] = {"constant": _constant, "step": _step, "linear": _linear}
