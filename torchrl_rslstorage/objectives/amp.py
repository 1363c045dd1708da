"""Adversarial motion priors: the discriminator's loss, and the reward that it gives to a policy.

Peng et al. 2021, arXiv:2104.02180. Three objectives, named by what they descend from:

    lsgan   ½·E_M[(D − 1)²] + ½·E_π[(D + 1)²]              r = max(0, 1 − ¼·(D − 1)²)
    bce     ½·E_M[−log σ(D)] + ½·E_π[−log(1 − σ(D))]       r = −log max(1 − σ(D), 1e-4)
    wgan    E_π[D] − E_M[D]                                r = (D − mean D) / (std D + 1e-2)

M are demonstrations, π what the policy did, D the logit of a pair of consecutive states.

Decisions:

- "lsgan" is eq. 6 and 7 of the paper; "bce" is the classic GAN, whose reward is that of GAIL (Ho & Ermon
  2016, arXiv:1606.03476), clamped as IsaacGymEnvs does (learning/amp_continuous.py); "wgan" and its
  standardised reward are WASABI's (Li et al. 2022, arXiv:2206.11693).
- The gradient penalty is zero-centred, on demonstrations alone (eq. 8): c·E_M[‖∇_φ D(φ)‖²], where φ are the
  normalised states. It takes second derivatives through the discriminator.
- IsaacGymEnvs' regularisers: c·‖w‖² of the last layer (logit), c·Σ‖W‖² of all weight matrices.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal, cast, get_args

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.utils import NestedKey
from torch import Tensor, nn
from torch.nn import functional as F
from torchrl.objectives import LossModule

from torchrl_rslstorage.data.leaves import canonical, show_all
from torchrl_rslstorage.modules.discriminator import AMPDiscriminator
from torchrl_rslstorage.modules.normalizer import EmpiricalNormalizer

AMPObjective = Literal["lsgan", "bce", "wgan"]
"""What the discriminator is trained with."""

_LEAST_IMPROBABILITY = 1e-4
"""IsaacGymEnvs, learning/amp_continuous.py: the reward of "bce" is at most −log 1e-4 = 9.2."""
_SIDES = ("policy", "demonstration")
_OUT_KEYS = (
    "loss_discriminator",
    "loss_gradient_penalty",
    "loss_logit",
    "loss_weight",
    "policy_score",
    "demonstration_score",
    "policy_accuracy",
    "demonstration_accuracy",
    "gradient_penalty",
)


class AMPLoss(LossModule):
    """Trains an `AMPDiscriminator` to tell demonstrations from what the policy did.

    The whole loss is the sum of the entries that begin with ``loss_``. Beside them come numbers that show a
    saturated discriminator, without gradient: mean scores and accuracies on either side (0.5 is a
    discriminator that cannot tell, 1.0 one that gives no direction any more) and the raw penalty.

    Args:
        discriminator: scores pairs.
        objective: "lsgan", "bce" or "wgan", see above.
        gradient_penalty_coeff: weight of E_M[‖∇D‖²]; 10 in the paper and in legged_gym's forks.
        logit_coeff: weight of the squared last layer.
        weight_coeff: weight of all squared weight matrices.

    Raises:
        ValueError: an unknown objective or a negative coefficient.
        KeyError: a mini-batch lacks a side, or a side a state.

    Examples:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from torchrl_rslstorage import AMPDiscriminator, AMPLoss
        >>> def pairs():
        ...     return TensorDict({"x": torch.randn(8, 2), "next": {"x": torch.randn(8, 2)}}, [8])
        >>> discriminator = AMPDiscriminator(["x"], in_features=2, hidden_dims=(16,))
        >>> losses = AMPLoss(discriminator)(TensorDict({"policy": pairs(), "demonstration": pairs()}))
        >>> sum(losses[key] for key in losses.keys() if key.startswith("loss_")).backward()
        >>> sorted(key for key in losses.keys() if key.endswith("accuracy"))
        ['demonstration_accuracy', 'policy_accuracy']
    """

    discriminator: AMPDiscriminator

    def __init__(
        self,
        discriminator: AMPDiscriminator,
        *,
        objective: AMPObjective = "lsgan",
        gradient_penalty_coeff: float = 10.0,
        logit_coeff: float = 0.0,
        weight_coeff: float = 0.0,
    ) -> None:
        check_objective(objective)
        coefficients = {
            "gradient_penalty_coeff": gradient_penalty_coeff,
            "logit_coeff": logit_coeff,
            "weight_coeff": weight_coeff,
        }
        for name, coeff in coefficients.items():
            if not 0 <= coeff < math.inf:
                raise ValueError(f"`{name}` must be at least 0, and finite, got {coeff}.")
        super().__init__()
        self.discriminator = discriminator
        sides = [(side, *_parts(key)) for side in _SIDES for key in discriminator.in_keys]
        self.in_keys = cast("Any", sides)  # typed as tuples of one string
        self.out_keys = cast("Any", list(_OUT_KEYS))
        self.objective: AMPObjective = objective
        self.gradient_penalty_coeff = gradient_penalty_coeff
        self.logit_coeff = logit_coeff
        self.weight_coeff = weight_coeff

    @property
    def functional(self) -> Literal[False]:  # pyright: ignore[reportIncompatibleMethodOverride] - always True there
        """False: the discriminator's own parameters are used, as TorchRL's losses ask of each other."""
        return False

    def forward(self, tensordict: TensorDictBase) -> TensorDict:
        """The losses and diagnostics of one mini-batch, all scalars.

        Args:
            tensordict: pairs of states under ``policy`` and ``demonstration``, each ``[B]`` with a B of its
                own; it is not written to.
        """
        sides = [tensordict.get(side, None) for side in _SIDES]
        if any(side is None for side in sides):
            raise KeyError(
                "AMPLoss reads pairs under 'policy' and 'demonstration'; it found "
                f"{show_all(tensordict.keys())}."
            )
        return TensorDict(cast("Any", self.terms(*cast("list[TensorDictBase]", sides))))

    def terms(self, policy: TensorDictBase, demonstration: TensorDictBase) -> dict[str, Tensor]:
        """What `forward` returns, of the two sides' pairs, each ``[B]`` with a B of its own.

        Raises:
            ValueError: a side is empty.
        """
        for side, pairs in zip(_SIDES, (policy, demonstration), strict=True):
            if 0 in pairs.batch_size:
                raise ValueError(f"The mini-batch holds no {side} pairs.")
        discriminator = self.discriminator
        features = discriminator.pair_features(demonstration)
        penalised = self.gradient_penalty_coeff > 0 and torch.is_grad_enabled()
        if penalised:
            features = features.detach().requires_grad_()
        demo = discriminator.score(features)
        score = discriminator.evaluate(policy)
        penalty = _squared_slope(demo, features) if penalised else demo.new_zeros(())
        last = discriminator.linear.weight
        weights = [module.weight for module in discriminator.modules() if isinstance(module, nn.Linear)]
        with torch.no_grad():
            # A critic's scores mean nothing by themselves: half way between both sides stands in for zero.
            middle = (score.mean() + demo.mean()) / 2 if self.objective == "wgan" else 0.0
            policy_accuracy = (score < middle).to(score.dtype).mean()
            demonstration_accuracy = (demo > middle).to(demo.dtype).mean()
        return {
            "loss_discriminator": discriminator_loss(score, demo, self.objective),
            "loss_gradient_penalty": self.gradient_penalty_coeff * penalty,
            "loss_logit": self.logit_coeff * last.square().sum(),
            "loss_weight": self.weight_coeff * torch.stack([w.square().sum() for w in weights]).sum(),
            "policy_score": score.detach().mean(),
            "demonstration_score": demo.detach().mean(),
            "policy_accuracy": policy_accuracy,
            "demonstration_accuracy": demonstration_accuracy,
            "gradient_penalty": penalty.detach(),
        }


def discriminator_loss(policy: Tensor, demonstration: Tensor, objective: AMPObjective) -> Tensor:
    """The loss of logits on both sides, each ``[B, 1]``; the formulas stand in this module's head.

    Raises:
        ValueError: an unknown objective.

    Examples:
        >>> import torch
        >>> from torchrl_rslstorage import discriminator_loss
        >>> discriminator_loss(torch.tensor([[-1.0]]), torch.tensor([[0.0]]), "lsgan")
        tensor(0.5000)
    """
    check_objective(objective)
    if objective == "lsgan":
        return 0.5 * ((demonstration - 1).square().mean() + (policy + 1).square().mean())
    if objective == "bce":
        return 0.5 * (F.softplus(-demonstration).mean() + F.softplus(policy).mean())
    return policy.mean() - demonstration.mean()


def style_reward(logit: Tensor, objective: AMPObjective) -> Tensor:
    """The reward for pairs that the discriminator scores with ``logit``, of the same shape.

    For "wgan" it is the logit itself: `StyleReward` standardises it.

    Raises:
        ValueError: an unknown objective.

    Examples:
        >>> import torch
        >>> from torchrl_rslstorage import style_reward
        >>> style_reward(torch.tensor([1.0, 0.0, -1.0, -5.0]), "lsgan")
        tensor([1.0000, 0.7500, 0.0000, 0.0000])
    """
    check_objective(objective)
    if objective == "lsgan":
        return (1 - 0.25 * (logit - 1).square()).clamp_min(0.0)
    if objective == "bce":
        return F.softplus(logit).clamp_max(-math.log(_LEAST_IMPROBABILITY))  # −log(1 − σ(D)) = log(1 + e^D)
    return logit


def lerp_rewards(style: Tensor, task: Tensor, weight: float) -> Tensor:
    """``weight · task + (1 − weight) · style``: 0 is style alone, 1 the task alone.

    Raises:
        ValueError: the shapes differ, or the weight is not in [0, 1].

    Examples:
        >>> import torch
        >>> from torchrl_rslstorage import lerp_rewards
        >>> lerp_rewards(torch.tensor([[1.0]]), torch.tensor([[3.0]]), 0.25)
        tensor([[1.5000]])
    """
    if not 0.0 <= weight <= 1.0:
        raise ValueError(f"The weight of the task reward must lie in [0, 1], got {weight}.")
    if style.shape != task.shape:
        raise ValueError(
            f"The style reward has shape {tuple(style.shape)} but the task reward {tuple(task.shape)}: they "
            "would broadcast."
        )
    return torch.lerp(style, task, weight)


class StyleReward(nn.Module):
    """What a discriminator gives to a policy for a window of pairs: reward · scale · dt.

    State: for "wgan", the running moments of all scores that `forward` saw in training mode.

    Args:
        discriminator: scores pairs; it is not trained here.
        objective: that of its `AMPLoss`.
        scale: of the reward.
        dt: seconds of one step, so that a second is worth the same at any rate; 1 leaves it out.

    Raises:
        ValueError: an unknown objective, a negative scale, or a ``dt`` that is not positive.

    Examples:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from torchrl_rslstorage import AMPDiscriminator, StyleReward
        >>> pairs = TensorDict({"x": torch.zeros(4, 2), "next": {"x": torch.zeros(4, 2)}}, [4])
        >>> reward = StyleReward(AMPDiscriminator(["x"], in_features=2, hidden_dims=(8,)), scale=2.0, dt=0.05)
        >>> reward(pairs).shape
        torch.Size([4, 1])
    """

    def __init__(
        self,
        discriminator: AMPDiscriminator,
        objective: AMPObjective = "lsgan",
        *,
        scale: float = 1.0,
        dt: float = 1.0,
    ) -> None:
        super().__init__()
        check_objective(objective)
        if not 0 <= scale < math.inf:
            raise ValueError(f"`scale` must be at least 0, and finite, got {scale}.")
        if not 0 < dt < math.inf:
            raise ValueError(f"`dt` must be positive, and finite, in seconds, got {dt}.")
        self._discriminator = (discriminator,)  # not a child: its weights are somebody else's to save
        self.objective: AMPObjective = objective
        self.scale = scale
        self.dt = dt
        self.normalizer = EmpiricalNormalizer(1) if objective == "wgan" else None

    @torch.no_grad()
    def forward(self, pairs: TensorDictBase) -> Tensor:
        """Rewards ``[*, 1]`` of pairs ``[*]``; where their ``valid`` is False it is zero.

        The scores of pairs that are not valid reach no statistic.
        """
        logit = self._discriminator[0].evaluate(pairs)
        valid = pairs.get("valid", None)
        if self.normalizer is not None:
            flat = logit.reshape(-1, 1)
            self.normalizer.update(flat if valid is None else flat[valid.reshape(-1)])
            logit = self.normalizer(logit)
        reward = style_reward(logit, self.objective) * (self.scale * self.dt)
        return reward if valid is None else reward.masked_fill(~valid.unsqueeze(-1), 0.0)


def check_objective(objective: str) -> None:
    """Refuses an unknown objective.

    Raises:
        ValueError: it is none of those that `AMPObjective` lists.
    """
    if objective not in get_args(AMPObjective):
        raise ValueError(f"`objective` must be one of {get_args(AMPObjective)}, got {objective!r}.")


def _parts(key: NestedKey) -> tuple[str, ...]:
    name = canonical(key)
    return (name,) if isinstance(name, str) else name


def _squared_slope(score: Tensor, features: Tensor) -> Tensor:
    """E[‖∇_φ D(φ)‖²] of scores ``[B, 1]`` at ``features`` ``[B, 2F]``, itself differentiable."""
    (slope,) = torch.autograd.grad(score.sum(), features, create_graph=True)
    return slope.square().sum(-1).mean()


def total_loss(terms: Mapping[str, Tensor]) -> Tensor:
    """The sum of the entries that begin with ``loss_``."""
    return torch.stack([value for name, value in terms.items() if name.startswith("loss_")]).sum()
