"""RSL-RL's PPO objective as a TorchRL loss module."""

from __future__ import annotations

import warnings
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import CompositeDistribution, TensorDictModuleBase
from tensordict.utils import NestedKey
from torch import Tensor
from torch.distributions import Distribution
from torchrl.objectives import PPOLoss

from torchrl_rslstorage._compat import dispatch, entry, unchecked
from torchrl_rslstorage.data.leaves import show, show_all
from torchrl_rslstorage.modules import GaussianActor, MLPActor, MLPCritic, ValueCritic
from torchrl_rslstorage.modules.mlp import require_states_apart
from torchrl_rslstorage.modules.normalizer import Pool
from torchrl_rslstorage.objectives.divergence import (
    estimated_kl,
    exact_kl,
    log_prob,
    mean_entropy,
    summed,
)
from torchrl_rslstorage.objectives.padded import (
    Padded,
    dist_of_padded,
    is_recurrent,
    read_padded,
    valid_cells,
    values_of_padded,
)
from torchrl_rslstorage.objectives.reading import Part, Targets, as_list, check_action, flat, readable
from torchrl_rslstorage.objectives.returns import explained_variance, normalize_advantage
from torchrl_rslstorage.objectives.symmetry import Symmetry

_OUT_KEYS = (
    "loss_objective",
    "loss_critic",
    "loss_entropy",
    "kl",
    "entropy",
    "clip_fraction",
    "explained_variance",
)
_NOTHING = nullcontext()


class RSLPPOLoss(PPOLoss):
    """Clipped surrogate, clipped value loss and entropy bonus, as RSL-RL has them (rsl_rl 5.5.1).

        r = exp(log π(a|s) − log π_old(a|s))
        loss_objective = mean max(−A·r, −A·clip(r, 1 − ε, 1 + ε))
        loss_critic    = c_v · mean max((V − R)², (V_old + clip(V − V_old, ±ε) − R)²)
        loss_entropy   = −c_e · mean H(π)

    The whole loss is the sum of the three. Schulman et al. 2017, arXiv:1707.06347; rsl_rl 5.5.1,
    algorithms/ppo.py, ``PPO.update``. Beside them come ``kl`` (KL(π_old ‖ π), for the adaptive learning
    rate), ``entropy``, ``clip_fraction`` and ``explained_variance``, all without gradient.

    Recurrent networks, ours or TorchRL's, learn from padded trajectories ``[L, B]`` with their ``mask``
    (`TrajectorySampler`); every number is then one of the valid cells alone.

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
        pool: normalise them by the moments of all ranks' mini-batches (`Ranks.pool`).
        functional: hold parameters functionally, as TorchRL's losses do by default. Off: the networks'
            own parameters are used, at less overhead.
        symmetry: learn from mirrored copies of mini-batches, or by a mirror loss; adds ``symmetry`` and
            ``loss_symmetry`` to what is returned. It is moved to the actor's device.

    Raises:
        TypeError: the actor is no stochastic policy, or a recurrent network stands inside of another.
        ValueError: a coefficient that makes no sense; of a mini-batch: a shape that would broadcast, an
            entry that requires grad, or trajectories where networks have no memory and the reverse.
        KeyError: a mini-batch lacks a key.

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

    actor_network: Any
    critic_network: Any
    clip_value: Tensor | None
    critic_coeff: Tensor
    entropy_coeff: Tensor

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
        pool: Pool | None = None,
        functional: bool = False,
        symmetry: Symmetry | None = None,
    ) -> None:
        radius = (clip_epsilon if clip_value else None) if isinstance(clip_value, bool) else clip_value
        if clip_epsilon <= 0:
            raise ValueError(f"`clip_epsilon` must be positive, got {clip_epsilon}.")
        if radius is not None and radius <= 0:
            raise ValueError(
                f"`clip_value` must be a positive radius, True ({clip_epsilon}) or False, got {clip_value}."
            )
        for name, coeff in (("critic_coeff", critic_coeff), ("entropy_coeff", entropy_coeff)):
            if not isinstance(coeff, (int, float)) or not coeff >= 0:
                raise ValueError(f"`{name}` must be a number of at least 0, got {coeff!r}.")
        require_states_apart(actor_network, critic_network)
        for method in ("get_dist", "build_dist_from_params"):
            if not hasattr(actor_network, method):
                raise TypeError(
                    f"{type(actor_network).__name__} has no `{method}`: the actor must be a stochastic "
                    "policy such as MLPActor or TorchRL's ProbabilisticActor."
                )
        super().__init__(
            cast("Any", actor_network),  # typed as the two classes of TorchRL's that it mostly gets
            cast("Any", critic_network),
            entropy_coeff=entropy_coeff,
            critic_coeff=1.0,
            loss_critic_type="l2",
            normalize_advantage=normalize_advantage,
            clip_value=radius,
            functional=functional,
        )
        self.critic_coeff.fill_(critic_coeff)  # PPOLoss takes a zero for "no critic"
        self.clip_epsilon = float(clip_epsilon)
        self.pool = pool
        self._announced: set[str] = set()
        actions = getattr(actor_network, "dist_sample_keys", [])
        if symmetry is not None and len(actions) > 1:
            raise ValueError(
                f"Symmetry is that of one action vector, but this actor has several: {show_all(actions)}."
            )
        device = next((p.device for p in actor_network.parameters()), None)
        self.symmetry = None if symmetry is None else symmetry.to(device)
        if len(actions) > 1:  # PPOLoss drops all but the first where their log-probabilities are one entry
            self.set_keys(action=list(actions))
        self._set_in_keys()

    def _set_in_keys(self) -> None:
        keys = self.tensor_keys
        self._parameter_keys = self._dist_keys()
        names: list[NestedKey] = [
            *self.actor_network.in_keys,
            *self.critic_network.in_keys,
            *as_list(keys.action),
            *as_list(keys.sample_log_prob),
            keys.advantage,
            keys.value_target,
            *self._parameter_keys,
        ]
        if self.clip_value is not None:
            names.append(keys.value)
        self._in_keys = list(dict.fromkeys(names))
        # A recurrent network reads whole trajectories itself; what only it reads is not taken apart.
        networks = (self.actor_network, self.critic_network)
        self._recurrent = tuple(is_recurrent(network) for network in networks)
        inputs = {key for network in networks for key in network.in_keys}
        for network, recurrent in zip(networks, self._recurrent, strict=True):
            if not recurrent:
                inputs -= set(network.in_keys)
        if self.symmetry is not None:
            self._mirrored = self.symmetry.keys_of(*networks, cast("NestedKey", keys.action))
            inputs -= set(self._mirrored.observations)
        self._cell_keys = [key for key in self._in_keys if key not in inputs]

    def _dist_keys(self) -> list[NestedKey]:
        """Where the actor's distribution parameters stand, for the KL."""
        actor = self.actor_network
        if isinstance(actor, GaussianActor):
            return actor.parameter_keys
        last = actor[-1] if hasattr(actor, "__getitem__") else actor
        return list(getattr(last, "in_keys", []))

    @property
    def is_recurrent(self) -> bool:
        """Whether actor or critic has memory, and learns from trajectories."""
        return any(self._recurrent)

    @property
    def out_keys(self) -> list[NestedKey]:
        """The entries of the TensorDict that `forward` returns."""
        if self._out_keys is None:
            symmetry = self.symmetry
            added = () if symmetry is None else ("symmetry", *["loss_symmetry"] * symmetry.use_mirror_loss)
            self._out_keys = cast("list[NestedKey]", [*_OUT_KEYS, *added])
        return self._out_keys

    @out_keys.setter
    def out_keys(self, values: list[NestedKey]) -> None:
        self._out_keys: list[NestedKey] | None = values

    @dispatch
    def forward(self, tensordict: TensorDictBase) -> TensorDict:
        """The losses and diagnostics of one mini-batch, all scalars.

        Args:
            tensordict: batch size ``[B]``, or ``[L, B]`` with ``mask``, with the keys of ``in_keys``; it is
                not written to.
        """
        terms = self.terms(tensordict)
        # A subclass may add plain numbers and nested keys, which TensorDict makes entries of.
        return unchecked(terms) if type(self).terms is RSLPPOLoss.terms else TensorDict(cast("Any", terms))

    def terms(self, tensordict: TensorDictBase) -> dict[str, Tensor]:
        """What `forward` returns, as a dictionary: less overhead, and what ``torch.compile`` is given."""
        if 0 in tensordict.batch_size:
            raise ValueError(f"The mini-batch is empty: its batch size is {tuple(tensordict.batch_size)}.")
        padded = self._padded(tensordict)
        if padded is not None:
            tensordict = valid_cells(padded, self._cell_keys)
        elif self.symmetry is not None and tensordict.ndim != 1:
            tensordict = tensordict.reshape(-1)  # copies stand one behind the other
        targets = self._targets(tensordict)
        part = self._part(tensordict, padded, targets)
        loss_objective, loss_critic = part.loss_objective, part.loss_critic
        added: dict[str, Tensor] = {}
        if self.symmetry is not None:
            loss_objective, loss_critic, added = self.symmetry.with_copies(
                part, targets, tensordict, padded, self._mirrored, self._part, self._dist
            )
        entropy = self._entropy(part.dist, tensordict.ndim)
        with torch.no_grad():
            kl = self._kl(tensordict, part.dist, part.log_ratio)
            clip_fraction = part.clipped.mean(dtype=part.log_ratio.dtype)
            explained = explained_variance(part.value, targets.value_target)
        return {
            "loss_objective": loss_objective,
            "loss_critic": self.critic_coeff * loss_critic,
            "loss_entropy": -self.entropy_coeff * entropy,
            "kl": kl,
            "entropy": entropy.detach(),
            "clip_fraction": clip_fraction,
            "explained_variance": explained,
            **added,
        }

    def _targets(self, td: TensorDictBase) -> Targets:
        keys, shape = self.tensor_keys, td.batch_size
        advantage = flat(self._get(td, keys.advantage), keys.advantage, shape)
        value_target = flat(self._get(td, keys.value_target), keys.value_target, shape)
        log_prob = summed(self._get(td, keys.sample_log_prob), len(shape))
        log_prob = flat(log_prob, keys.sample_log_prob, shape)
        if self.normalize_advantage:
            advantage = normalize_advantage(advantage, pool=self.pool)
        value = None if self.clip_value is None else flat(self._get(td, keys.value), keys.value, shape)
        return Targets(advantage, value_target, log_prob, value)

    def _part(self, td: TensorDictBase, padded: Padded | None, targets: Targets) -> Part:
        """What the networks make of ``td``, and the clipped losses of it."""
        keys, shape = self.tensor_keys, td.batch_size
        dist = self._dist(td, padded)
        action = self._action(td, dist)
        log_ratio = flat(log_prob(dist, action, len(shape)), keys.sample_log_prob, shape) - targets.log_prob
        ratio, weight = log_ratio.exp(), -targets.advantage
        # Where the clipped term is the larger one its gradient is zero, elsewhere both have the same.
        clipped = ratio.detach().clamp(1 - self.clip_epsilon, 1 + self.clip_epsilon)
        surrogate, bound = weight * ratio, weight * clipped
        loss_objective = torch.where(bound > surrogate, bound, surrogate).mean()
        value = flat(self._value(td, padded), keys.value, shape)
        loss_critic = self._value_loss(value, targets)
        return Part(dist, log_ratio, clipped != ratio, value, loss_objective, loss_critic)

    # -- the networks ----------------------------------------------------------------------------

    def _padded(self, td: TensorDictBase) -> Padded | None:
        """``td`` as the trajectories that recurrent networks learn from; None if it is a flat mini-batch."""
        if self.is_recurrent:
            return read_padded(td)
        mask = td.get("mask", None) if td.ndim == 2 else None
        # An action mask may have that name, too.
        if mask is None or mask.dtype is not torch.bool or mask.shape != td.batch_size:
            return None
        if isinstance(self.actor_network, MLPActor) and isinstance(self.critic_network, MLPCritic):
            raise ValueError(
                "This mini-batch holds padded trajectories, which only recurrent policies need, but actor "
                "and critic are MLPs: give the buffer a MiniBatchSampler."
            )
        return read_padded(td)

    def _dist(self, td: TensorDictBase, padded: Padded | None) -> Distribution:
        actor = self.actor_network
        with self._parameters_of("actor_network"):
            if padded is not None and self._recurrent[0]:
                return dist_of_padded(actor, padded, self._parameter_keys)
            return actor.get_dist(td if isinstance(actor, GaussianActor) else readable(td, actor))

    def _value(self, td: TensorDictBase, padded: Padded | None) -> Tensor:
        critic = self.critic_network
        with self._parameters_of("critic_network"):
            if padded is not None and self._recurrent[1]:
                value = values_of_padded(critic, padded, self.tensor_keys.value)
            elif isinstance(critic, ValueCritic):
                value = critic.evaluate(td)
            else:
                value = critic(readable(td, critic)).get(self.tensor_keys.value, None)
        if value is None:
            raise KeyError(
                f"The critic writes {show_all(critic.out_keys)} but the loss reads "
                f"{show(self.tensor_keys.value)}: call loss.set_keys(value=...)."
            )
        return value

    def _parameters_of(self, name: str) -> AbstractContextManager[Any]:
        """Puts functional parameters into a network."""
        if not self.functional:
            return _NOTHING
        network, parameters = getattr(self, name), getattr(self, f"{name}_params")
        return parameters.to_module(network, preserve_module_state=False)

    def _action(self, td: TensorDictBase, dist: Distribution) -> Any:
        key: Any = self.tensor_keys.action
        action = self._get(td, key)
        if isinstance(dist, CompositeDistribution):
            action = td.select(*as_list(key))
            for name, head in dist.dists.items():
                check_action(head, action.get(name), name)
        else:
            check_action(dist, action, key)
        return action

    # -- the terms -------------------------------------------------------------------------------

    def _value_loss(self, value: Tensor, targets: Targets) -> Tensor:
        error = value - targets.value_target
        radius, old = self.clip_value, targets.value
        if radius is not None and old is not None:
            clipped = old + (value - old).clamp(-radius, radius) - targets.value_target
            # Asked this way round, so that a value that is not a number is seen in the loss.
            error = torch.where(clipped.detach().abs() <= error.detach().abs(), error, clipped)
        return (error * error).mean()

    def _entropy(self, dist: Distribution, ndim: int) -> Tensor:
        value, exact = mean_entropy(dist, ndim)
        if not exact:
            self._announce("entropy", dist, "the estimate −log π(a) of one sample")
        return value

    def _kl(self, td: TensorDictBase, dist: Distribution, log_ratio: Tensor) -> Tensor:
        old = self._old_dist(td)
        if old is None:
            self._announce(
                "KL",
                dist,
                "the estimate mean(r − 1 − log r), since the mini-batch holds no parameters of the "
                "distribution that acted",
            )
            return estimated_kl(log_ratio).mean()
        kl = exact_kl(old, dist, td.ndim)
        if kl is None:
            self._announce("KL", dist, "the estimate mean(r − 1 − log r)")
            kl = estimated_kl(log_ratio)
        return kl.mean()

    def _old_dist(self, td: TensorDictBase) -> Distribution | None:
        """The distribution that acted, where all of its parameters are there."""
        if any(entry(td, key) is None for key in self._parameter_keys):
            return None
        try:
            return self.actor_network.build_dist_from_params(td)
        except KeyError:
            return None

    def _announce(self, what: str, dist: Distribution, stand_in: str) -> None:
        if what not in self._announced:
            self._announced.add(what)
            warnings.warn(
                f"RSLPPOLoss has no exact {what} for {type(dist).__name__}: it uses {stand_in}.",
                UserWarning,
                stacklevel=4,
            )

    # -- reading a mini-batch --------------------------------------------------------------------

    def _get(self, td: TensorDictBase, key: Any) -> Any:
        """What stands under ``key``: a tensor; a TensorDict for a list of keys or a group."""
        value = None
        for name in as_list(key):
            value = entry(td, name)
            if value is None:
                hint = (
                    " Run RolloutGAE on the buffer before its mini-batches."
                    if name in (self.tensor_keys.advantage, self.tensor_keys.value_target)
                    else " The collection policy must write it (ActorCritic(actor, critic) does)."
                )
                raise KeyError(f"RSLPPOLoss needs {show(name)}, which is not in the mini-batch.{hint}")
            if value.requires_grad:
                raise ValueError(f"{show(name)} in the mini-batch requires grad: collect under no_grad.")
        return td.select(*key) if isinstance(key, list) else value
