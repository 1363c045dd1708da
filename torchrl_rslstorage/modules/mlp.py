"""MLP actor and critic with RSL-RL's shape: optional normaliser, ELU layers, state-independent std."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal, get_args

import torch
from tensordict import TensorDictBase
from tensordict.nn import InteractionType, TensorDictModuleBase
from tensordict.nn.probabilistic import interaction_type
from tensordict.utils import NestedKey
from torch import Tensor, nn
from torchrl.envs import EnvBase
from torchrl.modules import MLP

from torchrl_rslstorage._compat import ModuleBase
from torchrl_rslstorage.data.leaves import show
from torchrl_rslstorage.modules.distributions import DiagonalGaussian
from torchrl_rslstorage.modules.observations import (
    ObservationModule,
    action_width,
    observation_width,
)

Activation = Literal["elu", "relu", "selu", "leaky_relu", "tanh", "sigmoid", "softplus", "gelu", "silu"]
StdType = Literal["scalar", "log"]

_ACTIVATIONS: dict[str, type[nn.Module]] = {
    "elu": nn.ELU,
    "relu": nn.ReLU,
    "selu": nn.SELU,
    "leaky_relu": nn.LeakyReLU,
    "tanh": nn.Tanh,
    "sigmoid": nn.Sigmoid,
    "softplus": nn.Softplus,
    "gelu": nn.GELU,
    "silu": nn.SiLU,
}
_STD_RANGE = (1e-6, 1e6)
"""Bounds of the standard deviation (rsl_rl 5.5.1, modules/distribution.py)."""


def make_mlp(in_features: int, out_features: int, hidden_dims: Sequence[int], activation: str) -> MLP:
    """TorchRL's MLP by RSL-RL's names.

    Raises:
        ValueError: an unknown activation (the valid ones are listed), or no hidden layer.
    """
    if activation not in _ACTIVATIONS:
        raise ValueError(f"`activation` must be one of {sorted(_ACTIVATIONS)}, got {activation!r}.")
    if not hidden_dims or any(width < 1 for width in hidden_dims):
        raise ValueError(f"`hidden_dims` must be positive widths, got {hidden_dims!r}.")
    return MLP(
        in_features=in_features,
        out_features=out_features,
        num_cells=list(hidden_dims),
        activation_class=_ACTIVATIONS[activation],
    )


class MLPActor(ObservationModule):
    """A Gaussian policy: MLP mean, learned standard deviation that does not depend on the state.

    Writes ``loc``, ``scale`` and ``action`` ``[*, A]`` and ``action_log_prob`` ``[*]``. Acts by TorchRL's
    exploration type (``set_exploration_type``): samples unless told to be deterministic.

    Args:
        in_keys: observation groups, concatenated.
        in_features: their summed width.
        action_dim: A.
        hidden_dims: widths of the hidden layers (rsl_rl 5.5.1, models/mlp_model.py).
        activation: name of the activation.
        normalize_observations: keep an `EmpiricalNormalizer` before the MLP.
        init_std: standard deviation at the start.
        std_type: what is learned, the standard deviation ("scalar") or its logarithm ("log"); both start
            at ``init_std`` and are clamped to a std in [1e-6, 1e6].
        action_key, log_prob_key, loc_key, scale_key: the entries written.

    Raises:
        ValueError: an unknown activation or std type, or a non-positive ``init_std``.

    Examples:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from torchrl_rslstorage import MLPActor
        >>> actor = MLPActor(["observation"], in_features=3, action_dim=2)
        >>> td = actor(TensorDict({"observation": torch.zeros(5, 3)}, [5]))
        >>> td["action"].shape, td["action_log_prob"].shape
        (torch.Size([5, 2]), torch.Size([5]))
    """

    def __init__(
        self,
        in_keys: Sequence[NestedKey],
        in_features: int,
        action_dim: int,
        *,
        hidden_dims: Sequence[int] = (256, 256, 256),
        activation: Activation = "elu",
        normalize_observations: bool = False,
        init_std: float = 1.0,
        std_type: StdType = "scalar",
        action_key: NestedKey = "action",
        log_prob_key: NestedKey = "action_log_prob",
        loc_key: NestedKey = "loc",
        scale_key: NestedKey = "scale",
    ) -> None:
        super().__init__(
            in_keys,
            in_features,
            out_keys=[loc_key, scale_key, action_key, log_prob_key],
            normalize_observations=normalize_observations,
        )
        if std_type not in get_args(StdType):
            raise ValueError(f"`std_type` must be one of {get_args(StdType)}, got {std_type!r}.")
        if init_std <= 0:
            raise ValueError(f"`init_std` must be positive, got {init_std}.")
        self.std_type: StdType = std_type
        self._keys = (loc_key, scale_key, action_key, log_prob_key)
        start = init_std if std_type == "scalar" else math.log(init_std)
        self.std_param = nn.Parameter(torch.full((action_dim,), start))
        self.mlp = make_mlp(in_features, action_dim, hidden_dims, activation)

    @classmethod
    def for_env(
        cls, env: EnvBase, in_keys: Sequence[NestedKey] = ("observation",), **kwargs: Any
    ) -> MLPActor:
        """An actor whose sizes are read off an environment.

        Raises:
            KeyError, TypeError, ValueError: the observations or the action space do not fit an MLP with
                a Gaussian; the message says which and why.
        """
        return cls(in_keys, observation_width(env, in_keys), action_width(env), **kwargs)

    @property
    def std(self) -> Tensor:
        """The standard deviation ``[A]``, clamped."""
        if self.std_type == "scalar":
            return self.std_param.clamp(*_STD_RANGE)
        return self.std_param.clamp(math.log(_STD_RANGE[0]), math.log(_STD_RANGE[1])).exp()

    @property
    def dist_sample_keys(self) -> list[NestedKey]:
        """Where the action is written (TorchRL's losses read this)."""
        return [self._keys[2]]

    @property
    def log_prob_keys(self) -> list[NestedKey]:
        """Where its log-probability is written (TorchRL's losses read this)."""
        return [self._keys[3]]

    def get_dist(self, tensordict: TensorDictBase) -> DiagonalGaussian:
        """The action distribution for the observations of ``tensordict``; writes nothing."""
        return DiagonalGaussian(self.mlp(self.features(tensordict)), self.std)

    def build_dist_from_params(self, tensordict: TensorDictBase) -> DiagonalGaussian:
        """The distribution that acted, from the parameters stored in ``tensordict``.

        Raises:
            KeyError: they are not there.
        """
        parameters = [tensordict.get(key, None) for key in self._keys[:2]]
        for key, parameter in zip(self._keys, parameters, strict=False):
            if parameter is None:
                raise KeyError(f"{show(key)} of the distribution that acted is not there.")
        return DiagonalGaussian(*parameters)

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Acts: writes mean, std, action and log-probability."""
        dist = self.get_dist(tensordict)
        explore = interaction_type() in (None, InteractionType.RANDOM)
        action = dist.sample() if explore else dist.loc
        loc_key, scale_key, action_key, log_prob_key = self._keys
        tensordict.set(loc_key, dist.loc)
        tensordict.set(scale_key, dist.stddev)
        tensordict.set(action_key, action)
        tensordict.set(log_prob_key, dist.log_prob(action))
        return tensordict


class MLPCritic(ObservationModule):
    """A state-value function: MLP on one or several observation groups; writes ``state_value`` ``[*, 1]``.

    Args:
        in_keys: observation groups, concatenated; may hold what the actor does not see.
        in_features: their summed width.
        hidden_dims: widths of the hidden layers.
        activation: name of the activation.
        normalize_observations: keep an `EmpiricalNormalizer` before the MLP.
        value_key: the entry written.

    Examples:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from torchrl_rslstorage import MLPCritic
        >>> critic = MLPCritic(["observation"], in_features=3)
        >>> critic(TensorDict({"observation": torch.zeros(5, 3)}, [5]))["state_value"].shape
        torch.Size([5, 1])
    """

    def __init__(
        self,
        in_keys: Sequence[NestedKey],
        in_features: int,
        *,
        hidden_dims: Sequence[int] = (256, 256, 256),
        activation: Activation = "elu",
        normalize_observations: bool = False,
        value_key: NestedKey = "state_value",
    ) -> None:
        super().__init__(
            in_keys,
            in_features,
            out_keys=[value_key],
            normalize_observations=normalize_observations,
        )
        self._value_key = value_key
        self.mlp = make_mlp(in_features, 1, hidden_dims, activation)

    @classmethod
    def for_env(
        cls, env: EnvBase, in_keys: Sequence[NestedKey] = ("observation",), **kwargs: Any
    ) -> MLPCritic:
        """A critic whose width is read off an environment; raises as `MLPActor.for_env` does."""
        return cls(in_keys, observation_width(env, in_keys), **kwargs)

    def evaluate(self, tensordict: TensorDictBase) -> Tensor:
        """State values ``[*, 1]``; writes nothing."""
        return self.mlp(self.features(tensordict))

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Writes the state value."""
        return tensordict.set(self._value_key, self.evaluate(tensordict))


class ActorCritic(ModuleBase):
    """Actor, then critic: what a collector runs so that rollouts hold values from act time.

    The same as ``TensorDictSequential(actor, critic)`` at a fraction of its overhead; works with
    TorchRL's ``ProbabilisticActor`` and ``ValueOperator`` as well.

    Args:
        actor: writes the action, its log-probability and the distribution's parameters.
        critic: writes the state value.

    Examples:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from torchrl_rslstorage import ActorCritic, MLPActor, MLPCritic
        >>> policy = ActorCritic(MLPActor(["obs"], 3, 2), MLPCritic(["obs"], 3))
        >>> sorted(policy(TensorDict({"obs": torch.zeros(5, 3)}, [5])).keys())
        ['action', 'action_log_prob', 'loc', 'obs', 'scale', 'state_value']
    """

    def __init__(self, actor: TensorDictModuleBase, critic: TensorDictModuleBase) -> None:
        super().__init__()
        self.actor = actor
        self.critic = critic
        self._name_keys(
            list(dict.fromkeys([*actor.in_keys, *critic.in_keys])),
            list(dict.fromkeys([*actor.out_keys, *critic.out_keys])),
        )

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Runs both on ``tensordict``, which they write into."""
        return self.critic(self.actor(tensordict))
