"""The sections of RSL-RL's runner configs: networks, PPO, and what is only handed on."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal

from torchrl_rslstorage.modules.heads import Activation, StdType
from torchrl_rslstorage.modules.recurrent_core import RNNType
from torchrl_rslstorage.trainers.config import PPOConfig
from torchrl_rslstorage.trainers.config_fields import (
    Fields,
    flag,
    number,
    one_of,
    or_none,
    positive,
    relative_widths,
    text,
    widths,
)

_ACTIVATIONS: dict[str, Activation] = {
    "elu": "elu",
    "selu": "selu",
    "relu": "relu",
    "crelu": "celu",  # rsl_rl 5.5.1, utils/utils.py: "crelu" is torch's CELU
    "lrelu": "leaky_relu",
    "tanh": "tanh",
    "sigmoid": "sigmoid",
    "softplus": "softplus",
    "gelu": "gelu",
    "swish": "silu",
    "mish": "mish",
    "identity": "identity",
}
_STD_TYPES: dict[str, StdType] = {"scalar": "scalar", "log": "log"}
_RNN_TYPES: dict[str, RNNType] = {"lstm": "lstm", "gru": "gru"}
_SCHEDULES: dict[str, Literal["adaptive", "fixed"]] = {"adaptive": "adaptive", "fixed": "fixed"}
_NUMBERS = (
    "clip_param",
    "gamma",
    "lam",
    "value_loss_coef",
    "entropy_coef",
    "learning_rate",
    "max_grad_norm",
)


@dataclass(frozen=True)
class NetworkConfig:
    """The shape of an actor or a critic, by the names of `MLPActor` and `RNNActor`.

    Examples:
        >>> from torchrl_rslstorage import NetworkConfig
        >>> NetworkConfig(hidden_dims=(64, 64)).activation
        'elu'
    """

    hidden_dims: tuple[int, ...] = (256, 256, 256)
    """Widths of the hidden layers."""
    activation: Activation = "elu"
    """Activation of the hidden layers."""
    normalize_observations: bool = False
    """Normalise observations by their running moments."""
    rnn_type: RNNType | None = None
    """The RNN before the hidden layers; None for a network without memory."""
    rnn_hidden_dim: int = 256
    """Width of the RNN."""
    rnn_num_layers: int = 1
    """Layers of the RNN."""

    def arguments(self) -> dict[str, Any]:
        """The keyword arguments of the network's class."""
        mine = {f.name: getattr(self, f.name) for f in fields(self)}
        return mine if self.rnn_type else {k: v for k, v in mine.items() if not k.startswith("rnn_")}


def activation(name: str, value: object) -> Activation:
    """This package's name of an RSL-RL activation.

    Raises:
        ValueError: there is no such activation; the valid ones are listed.
    """
    if str(value).lower() not in _ACTIVATIONS:
        raise ValueError(f"`{name}` must be one of {sorted(_ACTIVATIONS)}, got {value!r}.")
    return _ACTIVATIONS[str(value).lower()]


def models(top: Fields, normalize: bool) -> dict[str, Any]:
    """Networks of the layouts 4.x and 5.x."""
    if "critic" not in top:
        raise ValueError("`critic` is missing: a config with an `actor` section has one for its critic too.")
    top.ignore("policy", reason="the sections actor and critic take its place")
    top.ignore("policy_class_name", reason="the sections actor and critic take its place")
    section = top.section("actor")
    actor = _model(section, normalize)
    init_std, std_type = _distribution(section)
    section.refuse_unknown()
    section = top.section("critic")
    critic = _model(section, normalize)
    section.must_be("distribution_cfg", (None,), "a critic is not stochastic")
    section.must_be("stochastic", (False,), "a critic is not stochastic")
    section.ignore("init_noise_std", "noise_std_type", "state_dependent_std", reason="of stochastic networks")
    section.refuse_unknown()
    return {"actor": actor, "critic": critic, "init_std": init_std, "std_type": std_type}


def _model(section: Fields, normalize: bool) -> NetworkConfig:
    kind = section.must_be("class_name", ("MLPModel", "RNNModel"), "there are no other networks here")
    section.must_be("cnn_cfg", (None,), "there is no CNN here")
    return NetworkConfig(
        hidden_dims=section.take("hidden_dims", widths, (256, 256, 256)),
        activation=section.take("activation", one_of(_ACTIVATIONS), _ACTIVATIONS["elu"]),
        normalize_observations=section.take("obs_normalization", flag, normalize),
        **_rnn(section, recurrent=kind == "RNNModel"),
    )


def _distribution(actor: Fields) -> tuple[float, StdType]:
    """The standard deviation at the start, and what of it is learned."""
    older = ("init_noise_std", "noise_std_type", "state_dependent_std", "stochastic")
    if "distribution_cfg" in actor and not actor.is_none("distribution_cfg"):
        gaussian = actor.section("distribution_cfg")
        why = "the policies here are Gaussians with a learned std that does not depend on the state"
        gaussian.must_be("class_name", ("GaussianDistribution",), why)
        gaussian.must_be("learn_std", (True,), why)
        gaussian.must_be("std_range", ((1e-6, 1e6),), "the std is clamped to this range")
        init_std = gaussian.take("init_std", number, 1.0)
        std_type: StdType = gaussian.take("std_type", one_of(_STD_TYPES), _STD_TYPES["scalar"])
        gaussian.refuse_unknown()
        actor.ignore(*older, reason="distribution_cfg takes its place")
        return init_std, std_type
    actor.ignore("distribution_cfg", reason="the older fields take its place")
    if "init_noise_std" not in actor:
        raise ValueError(
            f"`{actor.path('distribution_cfg')}` is missing: PPO needs an actor with a distribution, such as "
            "{class_name: GaussianDistribution, init_std: 1.0}."
        )
    actor.must_be("stochastic", (True,), "PPO needs a stochastic actor")
    return _noise(actor)


def _noise(section: Fields) -> tuple[float, StdType]:
    section.must_be("state_dependent_std", (False,), "the std here does not depend on the state")
    init_std = section.take("init_noise_std", number, 1.0)
    std_type: StdType = section.take("noise_std_type", one_of(_STD_TYPES), _STD_TYPES["scalar"])
    return init_std, std_type


def policy(top: Fields, normalize: bool) -> dict[str, Any]:
    """Networks of the layouts before 4.0, where one section describes both."""
    if "policy" not in top:
        raise ValueError(
            "The config describes no networks: it has neither `actor` and `critic` nor `policy`."
        )
    kinds, why = ("ActorCritic", "ActorCriticRecurrent"), "there are no other networks here"
    named = top.must_be("policy_class_name", kinds, why)  # legged_gym names the class beside the section
    section = top.section("policy")
    kind = section.must_be("class_name", kinds, why) if "class_name" in section else named
    rnn = _rnn(section, recurrent=kind == "ActorCriticRecurrent")
    activation: Activation = section.take("activation", one_of(_ACTIVATIONS), _ACTIVATIONS["elu"])
    actor, critic = (
        NetworkConfig(
            hidden_dims=section.take(f"{name}_hidden_dims", widths, (256, 256, 256)),
            activation=activation,
            normalize_observations=section.take(f"{name}_obs_normalization", flag, normalize),
            **rnn,
        )
        for name in ("actor", "critic")
    )
    init_std, std_type = _noise(section)
    section.refuse_unknown()
    return {"actor": actor, "critic": critic, "init_std": init_std, "std_type": std_type}


def _rnn(section: Fields, *, recurrent: bool) -> dict[str, Any]:
    names = ("rnn_type", "rnn_hidden_dim", "rnn_hidden_size", "rnn_num_layers")
    if not recurrent:
        section.ignore(*names, reason="the class named in class_name has no RNN")
        return {}
    width = "rnn_hidden_size" if "rnn_hidden_size" in section else "rnn_hidden_dim"  # its name before 3.0
    return {
        "rnn_type": section.take("rnn_type", one_of(_RNN_TYPES), "lstm"),
        "rnn_hidden_dim": section.take(width, positive, 256),
        "rnn_num_layers": section.take("rnn_num_layers", positive, 1),
    }


def ppo(algorithm: Fields) -> PPOConfig:
    """The hyper-parameters."""
    why = "this is the only one of its kind here"
    algorithm.must_be("class_name", ("PPO",), why)
    algorithm.must_be("optimizer", ("adam",), why)
    algorithm.must_be("use_mixed_precision", (False,), "training in mixed precision is not supported")
    algorithm.must_be("share_cnn_encoders", (False,), "there is no CNN here")
    algorithm.ignore("grad_reduce_bucket_mb", "device", reason="says how to compute, not what")
    default = PPOConfig()
    values: dict[str, Any] = {name: algorithm.take(name, number, getattr(default, name)) for name in _NUMBERS}
    for name in ("num_learning_epochs", "num_mini_batches"):
        values[name] = algorithm.take(name, positive, getattr(default, name))
    for name in ("use_clipped_value_loss", "normalize_advantage_per_mini_batch"):
        values[name] = algorithm.take(name, flag, getattr(default, name))
    # RSL-RL keeps the rate for every other word, of which a config with a typo would know nothing.
    values["schedule"] = algorithm.take("schedule", one_of(_SCHEDULES), default.schedule)
    desired_kl = algorithm.take("desired_kl", or_none(number), default.desired_kl)
    if desired_kl is None:  # RSL-RL then keeps the rate
        values["schedule"] = "fixed"
    else:
        values["desired_kl"] = desired_kl
    algorithm.refuse_unknown()
    config = PPOConfig(**values)
    config.check()
    return config


def weight_schedule(value: object) -> dict[str, Any]:
    """The schedule of the weight of ``rnd_cfg``: its mode, and numbers."""
    if not isinstance(value, Mapping):
        raise TypeError("it must be a section with fields")
    return {text(name): text(entry) if name == "mode" else number(entry) for name, entry in value.items()}


def function(value: object) -> object:
    """A function, or the name of one."""
    if not isinstance(value, str) and not callable(value):
        raise TypeError("it must be a function, or the name of one such as 'module:function'")
    return value


RND: dict[str, Callable[[object], Any]] = {
    "weight": number,
    "weight_schedule": or_none(weight_schedule),
    "reward_normalization": flag,
    "state_normalization": flag,
    "learning_rate": number,
    "num_outputs": positive,
    "predictor_hidden_dims": relative_widths,
    "target_hidden_dims": relative_widths,
    "activation": text,
}
"""The fields of ``rnd_cfg`` (Isaac Lab, isaaclab_rl/rsl_rl/rnd_cfg.py; rsl_rl 5.5.1, extensions/rnd.py)."""
SYMMETRY: dict[str, Callable[[object], Any]] = {
    "data_augmentation_func": or_none(function),
    "use_data_augmentation": flag,
    "use_mirror_loss": flag,
    "mirror_loss_coeff": number,
}
"""The fields of ``symmetry_cfg`` (rsl_rl 5.5.1, extensions/symmetry.py)."""


def carried(
    algorithm: Fields, name: str, known: Mapping[str, Callable[[object], Any]]
) -> dict[str, Any] | None:
    """A section that is handed on, its fields read by the converters that are ``known``."""
    if name not in algorithm:
        return None
    if algorithm.is_none(name):
        algorithm.ignore(name, reason="it is not set")
        return None
    section = algorithm.section(name)
    values = {field: section.take(field, read, None) for field, read in known.items() if field in section}
    section.refuse_unknown()
    return values


def observation_sets(value: object) -> dict[str, tuple[str, ...]]:
    """Observation sets and their groups; before 4.0 the actor's set was called "policy"."""
    if not isinstance(value, Mapping):
        raise TypeError("it must map observation sets to lists of groups")
    groups: dict[str, tuple[str, ...]] = {}
    for name, members in value.items():
        if isinstance(members, str) or not isinstance(members, Sequence) or not members:
            raise ValueError(f"{name!r} must be a list of at least one group")
        groups[text(name)] = tuple(text(member) for member in members)
    if "policy" in groups and "actor" not in groups:
        groups["actor"] = groups.pop("policy")
    return groups
