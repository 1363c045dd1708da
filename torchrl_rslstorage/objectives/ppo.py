"""RSL-RL's PPO objective as a TorchRL loss module."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModuleBase, dispatch
from tensordict.utils import NestedKey
from torch import Tensor
from torch.distributions import Distribution
from torchrl.objectives import PPOLoss

from torchrl_rslstorage.data.leaves import show
from torchrl_rslstorage.modules.mlp import MLPActor, MLPCritic
from torchrl_rslstorage.objectives.divergence import (
    estimated_kl,
    exact_entropy,
    exact_kl,
    log_prob,
    sampled_entropy,
    summed,
)
from torchrl_rslstorage.objectives.returns import normalize_advantage


class RSLPPOLoss(PPOLoss):
    """Clipped surrogate, clipped value loss and entropy bonus, as RSL-RL has them (rsl_rl 5.5.1).

        r = exp(log π(a|s) − log π_old(a|s))
        loss_objective = mean max(−A·r, −A·clip(r, 1 − ε, 1 + ε))
        loss_critic    = c_v · mean max((V − R)², (V_old + clip(V − V_old, ±ε) − R)²)
        loss_entropy   = −c_e · mean H(π)

    The whole loss is the sum of the three. Schulman et al. 2017, arXiv:1707.06347; rsl_rl 5.5.1,
    algorithms/ppo.py, ``PPO.update``. Beside them come ``kl`` (KL(π_old ‖ π), for the adaptive learning
    rate), ``entropy``, ``clip_fraction`` and ``explained_variance``, all without gradient.

    Log-probabilities are ``[B]``, values and advantages ``[B, 1]`` or ``[B]``; whatever would broadcast to
    ``[B, B]`` is refused. The KL and the entropy are exact where ``torch.distributions`` knows them; else
    estimators stand in, and a warning says so once.

    Args:
        actor_network: anything with ``get_dist`` and ``build_dist_from_params``: `MLPActor`, TorchRL's
            ``ProbabilisticActor``.
        critic_network: writes the state value: `MLPCritic`, TorchRL's ``ValueOperator``.
        clip_epsilon: ε of the surrogate, and of the value clip.
        clip_value: clip the value loss: ``True`` with ε, a float with that radius, ``False`` not at all.
        critic_coeff: c_v.
        entropy_coeff: c_e.
        normalize_advantage: normalise the advantages of each mini-batch, ``(A − mean) / (std + 1e-8)``.
        functional: hold parameters functionally, as TorchRL's losses do by default. Off: the networks'
            own parameters are used, at less overhead.

    Raises:
        KeyError: a mini-batch lacks a key.
        ValueError: a shape that would broadcast.

    Examples:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from torchrl_rslstorage import MLPActor, MLPCritic, RSLPPOLoss
        >>> actor, critic = MLPActor(["obs"], 3, 2), MLPCritic(["obs"], 3)
        >>> batch = critic(actor(TensorDict({"obs": torch.randn(8, 3)}, [8]))).detach()
        >>> batch["advantage"], batch["value_target"] = torch.randn(8, 1), torch.randn(8, 1)
        >>> losses = RSLPPOLoss(actor, critic)(batch)
        >>> sum(losses[key] for key in losses.keys() if key.startswith("loss_")).backward()
        >>> bool(losses["kl"] == 0)
        True
    """

    @dataclass
    class _AcceptedKeys(PPOLoss._AcceptedKeys):
        """The keys that ``set_keys`` takes: PPOLoss's own."""

    default_keys = _AcceptedKeys
    tensor_keys: _AcceptedKeys
    actor_network: Any
    critic_network: Any

    def __init__(
        self,
        actor_network: TensorDictModuleBase,
        critic_network: TensorDictModuleBase,
        *,
        clip_epsilon: float = 0.2,
        clip_value: bool | float = True,
        critic_coeff: float = 1.0,
        entropy_coeff: float = 0.01,
        normalize_advantage: bool = False,
        functional: bool = False,
    ) -> None:
        if clip_epsilon <= 0:
            raise ValueError(f"`clip_epsilon` must be positive, got {clip_epsilon}.")
        for method in ("get_dist", "build_dist_from_params"):
            if not hasattr(actor_network, method):
                raise TypeError(
                    f"{type(actor_network).__name__} has no `{method}`: the actor must be a stochastic "
                    "policy such as MLPActor or TorchRL's ProbabilisticActor."
                )
        radius = (clip_epsilon if clip_value else None) if isinstance(clip_value, bool) else clip_value
        super().__init__(
            actor_network,
            critic_network,
            entropy_coeff=entropy_coeff,
            critic_coeff=critic_coeff,
            loss_critic_type="l2",
            normalize_advantage=normalize_advantage,
            clip_value=radius,
            functional=functional,
        )
        self.clip_epsilon = float(clip_epsilon)
        self._announced: set[str] = set()

    def _set_in_keys(self) -> None:
        keys = self.tensor_keys
        names: list[NestedKey] = [
            *self.actor_network.in_keys,
            *self.critic_network.in_keys,
            *_as_list(keys.action),
            *_as_list(keys.sample_log_prob),
            keys.advantage,
            keys.value_target,
            *self._dist_keys(),
        ]
        if self.clip_value is not None:
            names.append(keys.value)
        self._in_keys = list(dict.fromkeys(names))

    def _dist_keys(self) -> list[NestedKey]:
        """Where the actor's distribution parameters stand, for the KL."""
        actor = self.actor_network
        sampled = {*_as_list(self.tensor_keys.action), *_as_list(self.tensor_keys.sample_log_prob)}
        if isinstance(actor, MLPActor):
            return [key for key in actor.out_keys if key not in sampled]
        last = actor[-1] if hasattr(actor, "__getitem__") else actor
        return [key for key in getattr(last, "in_keys", []) if key not in actor.in_keys]

    @property
    def out_keys(self) -> list[NestedKey]:
        """The entries of the TensorDict that `forward` returns."""
        if self._out_keys is None:
            self._out_keys = [
                "loss_objective",
                "loss_critic",
                "loss_entropy",
                "kl",
                "entropy",
                "clip_fraction",
                "explained_variance",
            ]
        return self._out_keys

    @out_keys.setter
    def out_keys(self, values: list[NestedKey]) -> None:
        self._out_keys = values

    @dispatch
    def forward(self, tensordict: TensorDictBase) -> TensorDict:
        """The losses and diagnostics of one mini-batch, all scalars.

        Args:
            tensordict: batch size ``[B]``, with the keys of ``in_keys``; it is not written to.
        """
        keys = self.tensor_keys
        shape = tensordict.batch_size
        advantage = _flat(self._get(tensordict, keys.advantage), keys.advantage, shape)
        value_target = _flat(self._get(tensordict, keys.value_target), keys.value_target, shape)
        old_log_prob = _flat(self._get(tensordict, keys.sample_log_prob), keys.sample_log_prob, shape)
        if self.normalize_advantage:
            advantage = normalize_advantage(advantage)

        dist = self._dist(tensordict)
        action = self._get(tensordict, keys.action, combine=False)
        new_log_prob = _flat(log_prob(dist, action), keys.sample_log_prob, shape)
        log_ratio = new_log_prob - old_log_prob
        ratio = log_ratio.exp()
        clipped = ratio.clamp(1 - self.clip_epsilon, 1 + self.clip_epsilon)
        loss_objective = torch.max(-advantage * ratio, -advantage * clipped).mean()

        value = _flat(self._value(tensordict), keys.value, shape)
        loss_critic = self._value_loss(tensordict, value, value_target, shape)
        entropy = self._entropy(dist)
        with torch.no_grad():
            kl = self._kl(tensordict, dist, log_ratio)
            clip_fraction = (clipped != ratio).to(ratio.dtype).mean()
            unexplained = (value_target - value).var(correction=0)
            explained = 1 - unexplained / value_target.var(correction=0)
        return TensorDict(
            {
                "loss_objective": loss_objective,
                "loss_critic": self.critic_coeff * loss_critic,
                "loss_entropy": -self.entropy_coeff * entropy,
                "kl": kl,
                "entropy": entropy.detach(),
                "clip_fraction": clip_fraction,
                "explained_variance": explained,
            }
        )

    # -- the networks ----------------------------------------------------------------------------

    def _dist(self, td: TensorDictBase) -> Distribution:
        actor = self.actor_network
        if isinstance(actor, MLPActor) and not self.functional:
            return actor.get_dist(td)
        # Other actors write their parameters into what they read.
        inputs = td.select(*actor.in_keys, strict=False)
        if not self.functional:
            return actor.get_dist(inputs)
        with self.actor_network_params.to_module(actor, preserve_module_state=False):
            return actor.get_dist(inputs)

    def _value(self, td: TensorDictBase) -> Tensor:
        critic = self.critic_network
        if isinstance(critic, MLPCritic) and not self.functional:
            return critic.evaluate(td)
        inputs = td.select(*critic.in_keys, strict=False)
        if not self.functional:
            return critic(inputs).get(self.tensor_keys.value)
        with self.critic_network_params.to_module(critic, preserve_module_state=False):
            return critic(inputs).get(self.tensor_keys.value)

    # -- the terms -------------------------------------------------------------------------------

    def _value_loss(self, td: TensorDictBase, value: Tensor, target: Tensor, shape: torch.Size) -> Tensor:
        square = (value - target).square()
        radius = self.clip_value
        if radius is None:
            return square.mean()
        key = self.tensor_keys.value
        old = _flat(self._get(td, key), key, shape)
        clipped = old + (value - old).clamp(-radius, radius)
        return torch.max(square, (clipped - target).square()).mean()

    def _entropy(self, dist: Distribution) -> Tensor:
        entropy = exact_entropy(dist)
        if entropy is None:
            self._announce("entropy", dist, "the estimate −log π(a) of one sample")
            entropy = sampled_entropy(dist)
        return entropy.mean()

    def _kl(self, td: TensorDictBase, dist: Distribution, log_ratio: Tensor) -> Tensor:
        try:
            old = self.actor_network.build_dist_from_params(td)
        except KeyError:
            self._announce(
                "KL",
                dist,
                "the estimate mean(r − 1 − log r), since the mini-batch holds no parameters of the "
                "distribution that acted",
            )
            return estimated_kl(log_ratio).mean()
        kl = exact_kl(old, dist)
        if kl is None:
            self._announce("KL", dist, "the estimate mean(r − 1 − log r)")
            kl = estimated_kl(log_ratio)
        return kl.mean()

    def _announce(self, what: str, dist: Distribution, stand_in: str) -> None:
        if what not in self._announced:
            self._announced.add(what)
            warnings.warn(
                f"RSLPPOLoss has no exact {what} for {type(dist).__name__}: it uses {stand_in}.",
                UserWarning,
                stacklevel=4,
            )

    # -- reading a mini-batch --------------------------------------------------------------------

    def _get(self, td: TensorDictBase, key: Any, *, combine: bool = True) -> Any:
        names = _as_list(key)
        found = [td.get(name, None) for name in names]
        for name, value in zip(names, found, strict=True):
            if value is None:
                hint = (
                    " Run RolloutGAE on the buffer before its mini-batches."
                    if name in (self.tensor_keys.advantage, self.tensor_keys.value_target)
                    else " The collection policy must write it (ActorCritic(actor, critic) does)."
                )
                raise KeyError(f"RSLPPOLoss needs {show(name)}, which is not in the mini-batch.{hint}")
            if isinstance(value, Tensor) and value.requires_grad:
                raise ValueError(f"{show(name)} in the mini-batch requires grad: collect under no_grad.")
        if not isinstance(key, list):
            return summed(found[0]) if combine else found[0]
        return summed(td.select(*key)) if combine else td.select(*key)


def _as_list(key: Any) -> list[NestedKey]:
    return list(key) if isinstance(key, list) else [key]


def _flat(value: Tensor, key: Any, shape: torch.Size) -> Tensor:
    """``value`` as ``[B]``; refuses every shape but ``[B]`` and ``[B, 1]``."""
    if value.shape == shape:
        return value
    if value.shape == (*shape, 1):
        return value.squeeze(-1)
    name = show(key) if isinstance(key, (str, tuple)) else str(key)
    raise ValueError(
        f"{name} has shape {tuple(value.shape)} in a mini-batch of batch size {tuple(shape)}, expected "
        f"{tuple(shape)} or {(*shape, 1)}: it would broadcast. A distribution over action vectors must "
        "sum over them (torch.distributions.Independent, or TorchRL's IndependentNormal)."
    )
