"""What RSL-RL's checkpoints call things, and what this package calls them.

    ours                  rsl_rl 4 and 5                    rsl_rl 3 and older, actor (critic)
    mlp.0.weight          mlp.0.weight                      actor.0.weight (critic.0.weight)
    core.rnn.weight_…     rnn.rnn.weight_…                  memory_a.rnn.weight_… (memory_c.…)
    normalizer.mean       obs_normalizer._mean, [1, F]      actor_obs_normalizer._mean (critic_…)
    std_param, "scalar"   distribution.std_param            std
    std_param, "log"      distribution.log_std_param        log_std

In version 4 the standard deviation is called as in version 3. Before version 3 normalisers stood in entries
of their own. Sources: rsl_rl 5.5.1, models and modules; leggedrobotics/rsl_rl, rsl_rl/modules/actor_critic.py
and actor_critic_recurrent.py of version 3, runners/on_policy_runner.py of version 2.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import Tensor

from torchrl_rslstorage.modules.heads import StdType

Role = Literal["actor", "critic"]

_MODEL_STATE: dict[Role, str] = {"actor": "actor_state_dict", "critic": "critic_state_dict"}
_PREFIXES = {"mlp.": "mlp.", "rnn.rnn.": "core.rnn.", "obs_normalizer.": "normalizer."}
_OLD_PREFIXES: dict[str, tuple[Role, str]] = {
    "actor.": ("actor", "mlp."),
    "critic.": ("critic", "mlp."),
    "memory_a.rnn.": ("actor", "core.rnn."),
    "memory_c.rnn.": ("critic", "core.rnn."),
    "actor_obs_normalizer.": ("actor", "normalizer."),
    "critic_obs_normalizer.": ("critic", "normalizer."),
}
_OLD_NORMALIZERS: dict[str, Role] = {
    "obs_norm_state_dict": "actor",
    "critic_obs_norm_state_dict": "critic",
    "privileged_obs_norm_state_dict": "critic",
}
_STD: dict[str, StdType] = {
    "distribution.std_param": "scalar",
    "distribution.log_std_param": "log",
    "std": "scalar",
    "log_std": "log",
}
_READ = {*_MODEL_STATE.values(), "model_state_dict", *_OLD_NORMALIZERS}
_READ |= {"optimizer_state_dict", "iter", "infos"}


@dataclass
class Contents:
    """The networks of a checkpoint by our names, with the name that each tensor has in the file."""

    networks: dict[Role, dict[str, tuple[str, Tensor]]] = field(
        default_factory=lambda: {"actor": {}, "critic": {}}
    )
    std_type: StdType | None = None
    parameters: list[tuple[Role, str]] = field(default_factory=list)
    """The parameters in the order in which the optimiser numbers them."""

    def add(self, role: Role, name: str, theirs: str, tensor: object) -> None:
        """Takes in one tensor.

        Raises:
            ValueError: it is no tensor.
        """
        if not isinstance(tensor, Tensor):
            raise ValueError(f"{theirs!r} is {type(tensor).__name__} and not a tensor")
        group, _, rest = name.partition(".")
        if group == "normalizer":  # statistics [1, F] here are [F]
            name = f"{group}.{rest.removeprefix('_')}"
            tensor = tensor.squeeze(0) if tensor.ndim == 2 else tensor
        else:
            self.parameters.append((role, name))
        self.networks[role][name] = (theirs, tensor)

    def add_std(self, theirs: str, tensor: object) -> None:
        """Takes in the standard deviation or its logarithm."""
        self.std_type = _STD[theirs]
        self.add("actor", "std_param", theirs, tensor)


def read(file: Mapping[str, Any]) -> Contents:
    """Sorts the tensors of a checkpoint of any version.

    Raises:
        ValueError: it is no checkpoint of PPO, or has tensors that nothing here corresponds to.
    """
    found = Contents()
    if "model_state_dict" in file:
        for theirs, tensor in _section(file, "model_state_dict").items():
            if theirs in _STD:
                found.add_std(theirs, tensor)
                continue
            role, name = _old_name(theirs)
            found.add(role, name, theirs, tensor)
        for entry, role in _OLD_NORMALIZERS.items():
            for theirs, tensor in _section(file, entry).items() if entry in file else ():
                found.add(role, f"normalizer.{theirs}", f"{entry}[{theirs}]", tensor)
        return found
    missing = [entry for entry in _MODEL_STATE.values() if entry not in file]
    if missing:
        raise ValueError(
            f"it holds {sorted(map(str, file))} and neither {missing[0]!r} nor 'model_state_dict', as "
            "checkpoints of PPO do"
        )
    for role, entry in _MODEL_STATE.items():
        for theirs, tensor in _section(file, entry).items():
            if theirs in _STD and role == "actor":
                found.add_std(theirs, tensor)
                continue
            prefix = next((p for p in _PREFIXES if theirs.startswith(p)), None)
            if prefix is None:
                raise ValueError(f"nothing here corresponds to {theirs!r} of its {role}")
            found.add(role, _PREFIXES[prefix] + theirs[len(prefix) :], theirs, tensor)
    return found


def left_out(file: Mapping[str, Any]) -> tuple[str, ...]:
    """The entries of a checkpoint that `read` and the optimiser have no use for."""
    return tuple(sorted(str(entry) for entry in file if entry not in _READ))


def their_name(name: str, std_type: StdType | None) -> str:
    """What rsl_rl 5.5.1 calls the tensor that is ``name`` here.

    Raises:
        ValueError: it has nothing of the kind.
    """
    if name == "std_param":
        return "distribution.std_param" if std_type == "scalar" else "distribution.log_std_param"
    for theirs, ours in _PREFIXES.items():
        if name.startswith(ours):
            rest = name[len(ours) :]
            private = ours == "normalizer." and rest != "count"
            return f"{theirs}{'_' if private else ''}{rest}"
    raise ValueError(f"RSL-RL's models have nothing that corresponds to {name!r}.")


def _old_name(theirs: str) -> tuple[Role, str]:
    for prefix, (role, ours) in _OLD_PREFIXES.items():
        if theirs.startswith(prefix):
            return role, ours + theirs[len(prefix) :]
    raise ValueError(f"nothing here corresponds to {theirs!r}")


def _section(file: Mapping[str, Any], entry: str) -> Mapping[str, Any]:
    section = file[entry]
    if not isinstance(section, Mapping):
        raise ValueError(f"its {entry!r} is {type(section).__name__} and not a state dict")
    return {str(name): value for name, value in section.items()}
