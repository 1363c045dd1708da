"""RSL-RL's curiosity and symmetry sections, built."""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from tensordict.utils import NestedKey
from torchrl.envs import EnvBase

from torchrl_rslstorage.modules import RandomNetworkDistillation
from torchrl_rslstorage.objectives import Symmetry
from torchrl_rslstorage.objectives.mirror import rsl_rl_augmentation
from torchrl_rslstorage.trainers.rsl_rl_sections import activation


def curiosity_of(
    section: Mapping[str, Any], env: EnvBase, groups: Sequence[NestedKey], step_dt: float
) -> RandomNetworkDistillation:
    """What ``rnd_cfg`` describes, for an environment.

    Args:
        section: its fields.
        env: whose observation groups are read.
        groups: the observation set ``rnd_state``.
        step_dt: seconds of a step, which RSL-RL multiplies the weight by (rsl_rl 5.5.1, extensions/rnd.py,
            ``resolve_rnd_config``).

    Raises:
        ValueError: a field is missing or out of its range; the message names it.
    """
    options = dict(section)
    for name in ("num_outputs", "predictor_hidden_dims", "target_hidden_dims"):
        if name not in options:
            raise ValueError(f"`algorithm.rnd_cfg.{name}` is missing, which RSL-RL has no default for.")
    options["activation"] = activation("algorithm.rnd_cfg.activation", options.get("activation", "elu"))
    options["weight"] = options.get("weight", 0.0) * step_dt
    return RandomNetworkDistillation.for_env(env, groups, **options)


def symmetry_of(section: Mapping[str, Any], simulator: Any) -> Symmetry:
    """What ``symmetry_cfg`` describes.

    Args:
        section: its fields; the function may be named, "module:function", and is imported then.
        simulator: what RSL-RL's function is given as ``env``.

    Raises:
        ValueError: there is no function, or it cannot be imported; the message names it.
    """
    options = dict(section)
    named = options.pop("data_augmentation_func", None)
    return Symmetry(rsl_rl_augmentation(_function(named), simulator), **options)


def _function(named: Any) -> Callable[..., tuple[Any, Any]]:
    if not isinstance(named, str) and callable(named):
        return cast("Callable[..., tuple[Any, Any]]", named)
    what = "`algorithm.symmetry_cfg.data_augmentation_func`"
    if not isinstance(named, str):
        raise ValueError(f"{what} must be a function, or the name of one such as 'module:function'.")
    try:
        found: Any = pkgutil.resolve_name(named)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"{what} names {named!r}, which cannot be imported: {error}.") from error
    if not callable(found):
        raise ValueError(f"{what} names {named!r}, which is a {type(found).__name__} and no function.")
    return cast("Callable[..., tuple[Any, Any]]", found)
