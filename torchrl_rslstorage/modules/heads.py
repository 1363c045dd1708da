"""What the package's actors and critics share: the Gaussian over actions, the MLP behind the features."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, get_args

import torch
from tensordict import TensorDictBase
from tensordict.nn import InteractionType
from tensordict.nn.probabilistic import interaction_type
from tensordict.utils import NestedKey
from torch import Tensor, nn
from torchrl.modules import MLP

from torchrl_rslstorage._compat import entry
from torchrl_rslstorage.data.leaves import show
from torchrl_rslstorage.modules.distributions import DiagonalGaussian
from torchrl_rslstorage.modules.observations import ObservationModule

Activation = Literal[
    "elu",
    "relu",
    "selu",
    "celu",
    "leaky_relu",
    "tanh",
    "sigmoid",
    "softplus",
    "gelu",
    "silu",
    "mish",
    "identity",
]
StdType = Literal["scalar", "log"]

_ACTIVATIONS: dict[str, type[nn.Module]] = {
    "elu": nn.ELU,
    "relu": nn.ReLU,
    "selu": nn.SELU,
    "celu": nn.CELU,
    "leaky_relu": nn.LeakyReLU,
    "tanh": nn.Tanh,
    "sigmoid": nn.Sigmoid,
    "softplus": nn.Softplus,
    "gelu": nn.GELU,
    "silu": nn.SiLU,
    "mish": nn.Mish,
    "identity": nn.Identity,
}
_STD_RANGE = (1e-6, 1e6)
"""Bounds of the standard deviation (rsl_rl 5.5.1, modules/distribution.py)."""


def make_mlp(in_features: int, out_features: int, hidden_dims: Sequence[int], activation: str) -> MLP:
    """TorchRL's MLP by RSL-RL's names; its ELUs write into what the layer before them returns.

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
        # Its gradient comes from its result then, at a third of the time and without an exponential.
        activation_kwargs={"inplace": True} if activation == "elu" else None,
    )


class GaussianActor(ObservationModule):
    """A Gaussian policy with a learned standard deviation that does not depend on the state.

    The base of `MLPActor` and `RNNActor`, which say how features become means (`latent`).

    Args:
        in_keys: observation groups, concatenated.
        in_features: their summed width.
        latent_features: width of what `latent` makes of them.
        action_dim: A.
        hidden_dims, activation: the MLP from latent features to means.
        normalize_observations: keep an `EmpiricalNormalizer` before the network.
        init_std: standard deviation at the start.
        std_type: what is learned, the standard deviation ("scalar") or its logarithm ("log"); both start
            at ``init_std`` and are clamped to a std in [1e-6, 1e6].
        action_key, log_prob_key, loc_key, scale_key: the entries written.
        extra_in_keys, extra_out_keys: what a subclass reads and writes beside.

    Raises:
        ValueError: an unknown activation or std type, or a non-positive ``init_std``.

    Examples:
        >>> from torchrl_rslstorage import GaussianActor, MLPActor
        >>> issubclass(MLPActor, GaussianActor)
        True
    """

    def __init__(
        self,
        in_keys: Sequence[NestedKey],
        in_features: int,
        latent_features: int,
        action_dim: int,
        *,
        hidden_dims: Sequence[int],
        activation: Activation,
        normalize_observations: bool,
        init_std: float,
        std_type: StdType,
        action_key: NestedKey,
        log_prob_key: NestedKey,
        loc_key: NestedKey,
        scale_key: NestedKey,
        extra_in_keys: Sequence[NestedKey] = (),
        extra_out_keys: Sequence[NestedKey] = (),
    ) -> None:
        super().__init__(
            in_keys,
            in_features,
            out_keys=[loc_key, scale_key, action_key, log_prob_key, *extra_out_keys],
            normalize_observations=normalize_observations,
            extra_in_keys=extra_in_keys,
        )
        if std_type not in get_args(StdType):
            raise ValueError(f"`std_type` must be one of {get_args(StdType)}, got {std_type!r}.")
        if not 0 < init_std < math.inf:
            raise ValueError(f"`init_std` must be positive, got {init_std}.")
        self.std_type: StdType = std_type
        self._keys = (loc_key, scale_key, action_key, log_prob_key)
        start = init_std if std_type == "scalar" else math.log(init_std)
        self.std_param = nn.Parameter(torch.full((action_dim,), start))
        self.mlp = make_mlp(latent_features, action_dim, hidden_dims, activation)

    @property
    def std(self) -> Tensor:
        """The standard deviation ``[A]``, clamped."""
        if self.std_type == "scalar":
            return self.std_param.clamp(*_STD_RANGE)
        return self.std_param.clamp(math.log(_STD_RANGE[0]), math.log(_STD_RANGE[1])).exp()

    @property
    def parameter_keys(self) -> list[NestedKey]:
        """Where the distribution's mean and standard deviation are written."""
        return list(self._keys[:2])

    @property
    def dist_sample_keys(self) -> list[NestedKey]:
        """Where the action is written (TorchRL's losses read this)."""
        return [self._keys[2]]

    @property
    def log_prob_keys(self) -> list[NestedKey]:
        """Where its log-probability is written (TorchRL's losses read this)."""
        return [self._keys[3]]

    def latent(self, tensordict: TensorDictBase) -> Tensor:
        """What the MLP reads of ``tensordict``, ``[*, latent_features]``: the features as they are."""
        return self.features(tensordict)

    def get_dist(self, tensordict: TensorDictBase) -> DiagonalGaussian:
        """The action distribution for the observations of ``tensordict``; writes nothing."""
        return self._dist(self.latent(tensordict))

    def build_dist_from_params(self, tensordict: TensorDictBase) -> DiagonalGaussian:
        """The distribution that acted, from the parameters stored in ``tensordict``.

        Raises:
            KeyError: they are not there.
        """
        parameters = [entry(tensordict, key) for key in self._keys[:2]]
        for key, parameter in zip(self._keys, parameters, strict=False):
            if parameter is None:
                raise KeyError(f"{show(key)} of the distribution that acted is not there.")
        return DiagonalGaussian(*parameters)

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Acts: writes mean, std, action and log-probability."""
        return self._act(tensordict, self.latent(tensordict))

    def _dist(self, latent: Tensor) -> DiagonalGaussian:
        return DiagonalGaussian(self.mlp(latent), self.std)

    def _act(self, tensordict: TensorDictBase, latent: Tensor) -> TensorDictBase:
        dist = self._dist(latent)
        explore = interaction_type() in (None, InteractionType.RANDOM)
        action = dist.sample() if explore else dist.loc
        loc_key, scale_key, action_key, log_prob_key = self._keys
        tensordict.set(loc_key, dist.loc)
        tensordict.set(scale_key, dist.stddev)
        tensordict.set(action_key, action)
        tensordict.set(log_prob_key, dist.log_prob(action))
        return tensordict


class ValueCritic(ObservationModule):
    """A state-value function; the base of `MLPCritic` and `RNNCritic`. Writes ``state_value`` ``[*, 1]``.

    Args:
        in_keys: observation groups, concatenated; may hold what the actor does not see.
        in_features: their summed width.
        latent_features: width of what `latent` makes of them.
        hidden_dims, activation: the MLP from latent features to the value.
        normalize_observations: keep an `EmpiricalNormalizer` before the network.
        value_key: the entry written.
        extra_in_keys, extra_out_keys: what a subclass reads and writes beside.

    Examples:
        >>> from torchrl_rslstorage import MLPCritic, ValueCritic
        >>> issubclass(MLPCritic, ValueCritic)
        True
    """

    def __init__(
        self,
        in_keys: Sequence[NestedKey],
        in_features: int,
        latent_features: int,
        *,
        hidden_dims: Sequence[int],
        activation: Activation,
        normalize_observations: bool,
        value_key: NestedKey,
        extra_in_keys: Sequence[NestedKey] = (),
        extra_out_keys: Sequence[NestedKey] = (),
    ) -> None:
        super().__init__(
            in_keys,
            in_features,
            out_keys=[value_key, *extra_out_keys],
            normalize_observations=normalize_observations,
            extra_in_keys=extra_in_keys,
        )
        self._value_key = value_key
        self.mlp = make_mlp(latent_features, 1, hidden_dims, activation)

    def latent(self, tensordict: TensorDictBase) -> Tensor:
        """What the MLP reads of ``tensordict``, ``[*, latent_features]``: the features as they are."""
        return self.features(tensordict)

    def evaluate(self, tensordict: TensorDictBase) -> Tensor:
        """State values ``[*, 1]``; writes nothing."""
        return self.mlp(self.latent(tensordict))

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Writes the state value."""
        return tensordict.set(self._value_key, self.evaluate(tensordict))
