"""What actor and critic share: reading observation groups from a TensorDict and normalising them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from tensordict import TensorDictBase
from tensordict.utils import NestedKey
from torch import Tensor
from torchrl.data import Bounded, Composite, Unbounded
from torchrl.envs import EnvBase

from torchrl_rslstorage._compat import ModuleBase, entry
from torchrl_rslstorage.data.leaves import canonical, dtype_name, leaves, show, show_all
from torchrl_rslstorage.modules.normalizer import EmpiricalNormalizer


class ObservationModule(ModuleBase):
    """Reads one or several observation groups ``[*, F_i]`` as one feature vector ``[*, ΣF_i]``.

    The base of the package's actors and critics. It is a ``TensorDictModuleBase`` with a ``forward`` of
    its own, since the stock ``TensorDictModule`` costs about 140 us per output on a CPU.

    Args:
        in_keys: observation groups, concatenated in this order.
        in_features: ΣF_i.
        normalize_observations: keep an `EmpiricalNormalizer` before the network.
        extra_in_keys: what a subclass reads beside the observations.

    Examples:
        >>> from torchrl_rslstorage import MLPCritic, ObservationModule
        >>> critic = MLPCritic(["policy", "privileged"], in_features=7)
        >>> isinstance(critic, ObservationModule), critic.in_keys
        (True, ['policy', 'privileged'])
    """

    normalizer: EmpiricalNormalizer | None

    def __init__(
        self,
        in_keys: Sequence[NestedKey],
        in_features: int,
        *,
        out_keys: Sequence[NestedKey],
        normalize_observations: bool,
        extra_in_keys: Sequence[NestedKey] = (),
    ) -> None:
        super().__init__()
        if isinstance(in_keys, str) or not in_keys:
            raise ValueError(f"`in_keys` must be a list of at least one observation key, got {in_keys!r}.")
        self.observation_keys: list[NestedKey] = list(in_keys)
        self._name_keys([*in_keys, *extra_in_keys], out_keys)
        self.in_features = in_features
        self._dtype = torch.get_default_dtype()
        self.normalizer = EmpiricalNormalizer(in_features) if normalize_observations else None

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        # torch.nn's hook of .to(), .double(), …: asking the parameters in each forward costs 3 us.
        applied = super()._apply(fn, recurse)
        self._dtype = fn(torch.empty(0, dtype=self._dtype)).dtype
        return applied

    def features(self, td: TensorDictBase) -> Tensor:
        """The observation groups of ``td``, concatenated and normalised, ``[*, ΣF_i]``.

        Raises:
            KeyError: a group is missing.
            ValueError: the groups' widths do not add up to ``in_features``.
            TypeError: a group's dtype is not that of the parameters.
        """
        x = self._concatenate(td)
        return x if self.normalizer is None else self.normalizer(x)

    def update_normalizer(self, td: TensorDictBase) -> None:
        """Takes the observations of a whole window ``[T, N]`` into the normaliser, if there is one."""
        if self.normalizer is not None:
            self.normalizer.update(self._concatenate(td).flatten(0, -2))

    def _concatenate(self, td: TensorDictBase) -> Tensor:
        parts: list[Tensor] = []
        for key in self.observation_keys:
            part = entry(td, key)
            if part is None:
                raise KeyError(
                    f"{type(self).__name__} reads {show(key)}, which is not there. The TensorDict holds "
                    f"{show_all(leaves(td))}."
                )
            parts.append(part)
        x = parts[0] if len(parts) == 1 else torch.cat(parts, -1)
        if x.shape[-1] != self.in_features or x.ndim != td.ndim + 1:
            shapes = ", ".join(
                f"{show(key)} {tuple(part.shape)}"
                for key, part in zip(self.observation_keys, parts, strict=True)
            )
            raise ValueError(
                f"{type(self).__name__} expects {self.in_features} features behind batch size "
                f"{tuple(td.batch_size)}, got {shapes}."
            )
        if x.dtype is not self._dtype:
            raise TypeError(
                f"{show_all(self.observation_keys)} is {dtype_name(x.dtype)} but {type(self).__name__}'s "
                f"parameters are {dtype_name(self._dtype)}: cast the environment "
                "(torchrl.envs.DoubleToFloat) or the module."
            )
        return x


def observation_width(env: EnvBase, in_keys: Sequence[NestedKey]) -> int:
    """ΣF_i of an environment's observation groups.

    Raises:
        KeyError: the environment has no such group.
        ValueError: a group is not a vector per environment.
        TypeError: a group is not of the default floating dtype.
    """
    width = 0
    spec = env.observation_spec
    valid = spec_keys(spec)
    for key in in_keys:
        if canonical(key) not in valid:
            raise KeyError(f"The environment has no observation {show(key)}. It has {show_all(valid)}.")
        leaf = spec[key]
        shape = tuple(leaf.shape[len(env.batch_size) :])
        if len(shape) != 1:
            raise ValueError(
                f"Observation {show(key)} has shape {shape} per environment; an MLP reads vectors. "
                "Flatten it (torchrl.envs.FlattenObservation) or write a module for it."
            )
        if leaf.dtype != torch.get_default_dtype():
            raise TypeError(
                f"Observation {show(key)} is {dtype_name(leaf.dtype)} but networks are "
                f"{dtype_name(torch.get_default_dtype())}: cast the environment "
                "(torchrl.envs.DoubleToFloat, or DTypeCastTransform)."
            )
        width += shape[0]
    return width


def action_width(env: EnvBase, action_key: NestedKey = "action") -> int:
    """A of a continuous action space.

    Raises:
        ValueError: actions are not real vectors.
    """
    spec = env.full_action_spec[action_key]
    shape = tuple(spec.shape[len(env.batch_size) :])
    real = isinstance(spec, (Bounded, Unbounded)) and spec.dtype.is_floating_point
    if not real or len(shape) != 1:
        raise ValueError(
            f"A Gaussian policy acts with real vectors, but this environment's action space is "
            f"{type(spec).__name__} of {dtype_name(spec.dtype)} with shape {shape} per environment. "
            "Use a continuous task, or a TorchRL ProbabilisticActor of your own with RSLPPOLoss."
        )
    return shape[0]


def spec_keys(spec: Composite) -> list[str | tuple[str, ...]]:
    """The leaves of an observation spec by name."""
    return [canonical(key) for key in spec.keys(include_nested=True, leaves_only=True)]
