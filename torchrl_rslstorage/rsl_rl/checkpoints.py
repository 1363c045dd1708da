"""RSL-RL's ``model_*.pt``: loaded into this package's networks, and written so that rsl-rl-lib loads them.

Files are read with ``weights_only``, so that they cannot run code; a file goes in whole or not at all.
"""

from __future__ import annotations

import io
import math
import pickle
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torchrl.checkpoint import CheckpointError

from torchrl_rslstorage._files import atomic_write_bytes
from torchrl_rslstorage.data.leaves import dtype_name
from torchrl_rslstorage.modules import GaussianActor, ValueCritic
from torchrl_rslstorage.rsl_rl.layouts import Contents, Role, left_out, read, their_name
from torchrl_rslstorage.trainers.stepper import KLAdaptiveStepper

_ADAM = {
    "betas": (0.9, 0.999),
    "eps": 1e-8,
    "weight_decay": 0,
    "amsgrad": False,
    "maximize": False,
}
"""``torch.optim.Adam``'s defaults, with which RSL-RL and `KLAdaptiveStepper` optimise."""

_MOMENTS = ("exp_avg", "exp_avg_sq")
_OTHER_NETWORKS = "The stepper does not optimise this actor and this critic: pass the two that it does."


@dataclass(frozen=True)
class RSLCheckpoint:
    """What stands in an RSL-RL checkpoint beside networks and optimiser.

    Examples:
        >>> from torchrl_rslstorage import RSLCheckpoint
        >>> RSLCheckpoint(iteration=1500, infos=None, left_out=()).iteration
        1500
    """

    iteration: int
    """The learning iteration after which it was written."""
    infos: Any
    """What the script that wrote it put there."""
    left_out: tuple[str, ...]
    """Entries that were not loaded, such as those of curiosity."""


def load_rsl_rl_checkpoint(
    path: str | Path,
    actor: GaussianActor,
    critic: ValueCritic | None = None,
    stepper: KLAdaptiveStepper | None = None,
) -> RSLCheckpoint:
    """Loads RSL-RL's ``model_*.pt`` into networks, and into the stepper that optimises them.

    Layouts of rsl_rl 5 and 4 (``actor_state_dict``, ``critic_state_dict``) and older ones
    (``model_state_dict``) are known. Parameters are written in place, so that a stepper or trainer may exist
    already. Actions afterwards are RSL-RL's, bit for bit on the same device.

    Args:
        path: the file.
        actor: an `MLPActor` or `RNNActor` of the shape that the file has (`RSLRunnerConfig.networks`).
        critic: an `MLPCritic` or `RNNCritic`; left out where only actions are wanted.
        stepper: takes the moments of Adam and the learning rate; needs the critic.

    Raises:
        CheckpointError: the file is missing or broken, holds more than tensors and plain values (it could
            run code: nothing of it was run), or does not fit; the message names the layer and both shapes.
        ValueError: a stepper without the critic, or of other networks.

    Examples:
        >>> import tempfile, torch
        >>> from torchrl_rslstorage import MLPActor, MLPCritic, load_rsl_rl_checkpoint, save_rsl_rl_checkpoint
        >>> file = tempfile.mkdtemp() + "/model_7.pt"
        >>> actor, critic = MLPActor(["policy"], 3, 2), MLPCritic(["policy"], 3)
        >>> save_rsl_rl_checkpoint(file, actor, critic, iteration=7)
        >>> other = MLPActor(["policy"], 3, 2)
        >>> load_rsl_rl_checkpoint(file, other).iteration
        7
        >>> torch.equal(other.mlp[0].weight, actor.mlp[0].weight)
        True
    """
    if stepper is not None and (critic is None or not _optimises(stepper, actor, critic)):
        raise ValueError(_OTHER_NETWORKS)
    file = _load(Path(path))
    networks: dict[Role, nn.Module] = {"actor": actor}
    if critic is not None:
        networks["critic"] = critic
    try:
        contents = read(file)
        pairs = [pair for role, network in networks.items() for pair in _pairs(contents, role, network)]
        optimizer = None if stepper is None else _our_optimizer(file, contents, networks, stepper)
        iteration = _iteration(file)
    except ValueError as error:
        raise CheckpointError(f"{path} cannot be loaded: {error}.") from error
    with torch.no_grad():
        for mine, theirs in pairs:
            mine.copy_(theirs)
    if stepper is not None and optimizer is not None:
        stepper.optimizer.load_state_dict(optimizer)
    return RSLCheckpoint(iteration, file.get("infos"), left_out(file))


def save_rsl_rl_checkpoint(
    path: str | Path,
    actor: GaussianActor,
    critic: ValueCritic,
    stepper: KLAdaptiveStepper | None = None,
    *,
    iteration: int = 0,
    infos: Any = None,
) -> None:
    """Writes networks and optimiser as rsl_rl 5.5.1 does, so that its ``OnPolicyRunner.load`` takes them.

    Args:
        path: the file, written whole or not at all.
        actor: an `MLPActor` or `RNNActor`.
        critic: an `MLPCritic` or `RNNCritic`.
        stepper: gives the moments of Adam and the learning rate; without it, Adam's start at 1e-3.
        iteration: the learning iteration that RSL-RL goes on from.
        infos: handed back by ``OnPolicyRunner.load``.

    Raises:
        ValueError: a network has tensors that RSL-RL's models have not, or the stepper is of other networks.
        OSError: the file's folder is missing, or the file cannot be written.

    Examples:
        >>> import tempfile, torch
        >>> from torchrl_rslstorage import MLPActor, MLPCritic, save_rsl_rl_checkpoint
        >>> file = tempfile.mkdtemp() + "/model_0.pt"
        >>> save_rsl_rl_checkpoint(file, MLPActor(["policy"], 3, 2), MLPCritic(["policy"], 3))
        >>> list(torch.load(file)["critic_state_dict"])[:2]
        ['mlp.0.weight', 'mlp.0.bias']
    """
    if stepper is None:
        parameters = [*actor.parameters(), *critic.parameters()]
        optimizer = torch.optim.Adam(parameters, lr=1e-3).state_dict()  # RSL-RL's default
    else:
        if not _optimises(stepper, actor, critic):
            raise ValueError(_OTHER_NETWORKS)
        learning_rate = float(stepper.learning_rate)
        groups = torch.optim.Adam(stepper.optimizer.parameters, lr=learning_rate).state_dict()["param_groups"]
        # Both number actor, then critic, and in each: std, MLP, RNN.
        optimizer = {"state": stepper.optimizer.state_dict()["state"], "param_groups": groups}
    content = {
        "actor_state_dict": _their_state(actor),
        "critic_state_dict": _their_state(critic),
        "optimizer_state_dict": _on_cpu(optimizer),
        "iter": iteration,
        "infos": infos,
    }
    data = io.BytesIO()
    torch.save(content, data)
    atomic_write_bytes(path, data.getvalue())


def _load(path: Path) -> Mapping[str, Any]:
    try:
        file = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError as error:
        raise CheckpointError(f"There is no checkpoint {path}.") from error
    except pickle.UnpicklingError as error:
        named = re.search(r"GLOBAL (\S+)", str(error))
        what = f" (it names {named[1]})" if named else ""
        raise CheckpointError(
            f"{path} holds more than tensors and plain values{what}, which could run code: nothing of it was "
            "loaded."
        ) from error
    except Exception as error:  # zip, pickle and torch each have errors of their own
        raise CheckpointError(f"{path} is broken, or no checkpoint at all.") from error
    if not isinstance(file, Mapping):
        raise CheckpointError(f"{path} holds {type(file).__name__} and no checkpoint of RSL-RL.")
    return file


def _pairs(contents: Contents, role: Role, network: nn.Module) -> list[tuple[Tensor, Tensor]]:
    """Each tensor of ``network`` with the one that it is to become.

    Raises:
        ValueError: they differ in number or shape.
    """
    theirs, mine = contents.networks[role], dict(network.state_dict(keep_vars=True))
    if role == "actor" and isinstance(network, GaussianActor) and contents.std_type != network.std_type:
        raise ValueError(
            f"its std is of type {contents.std_type!r} but the actor's is {network.std_type!r}: build the "
            "actor with its std_type"
        )
    for prefix, what, option in (
        ("normalizer.", "an observation normaliser", "normalize_observations"),
        ("core.", "an RNN", "RNNActor and RNNCritic"),
    ):
        there, here = (any(name.startswith(prefix) for name in names) for names in (theirs, mine))
        if there != here:
            owner = f"its {role} has {what} but this one has none" if there else f"its {role} has not {what}"
            raise ValueError(f"{owner}: build the {role} accordingly ({option})")
    for name in mine:
        if name not in theirs:
            raise ValueError(f"its {role} has no layer for {name!r}: build the {role} with its hidden layers")
    for name, (label, _) in theirs.items():
        if name not in mine:
            raise ValueError(
                f"the {role} has no layer for its {label!r}: build the {role} with its hidden layers"
            )
    for name, (label, tensor) in theirs.items():
        if tensor.shape != mine[name].shape:
            raise ValueError(
                f"its {label!r} has shape {tuple(tensor.shape)} but {name!r} of the {role} has "
                f"{tuple(mine[name].shape)}"
            )
        if not _can_become(tensor, mine[name]):
            raise ValueError(
                f"its {label!r} is a tensor of {dtype_name(tensor.dtype)}, {tensor.layout} on "
                f"{tensor.device}, but {name!r} of the {role} holds {dtype_name(mine[name].dtype)}"
            )
    return [(mine[name], tensor) for name, (_, tensor) in theirs.items()]


def _can_become(theirs: object, mine: Tensor) -> bool:
    """Whether all of one tensor's numbers can be copied into the other."""
    return (
        isinstance(theirs, Tensor)
        and theirs.shape == mine.shape
        and theirs.is_floating_point() == mine.is_floating_point()
        and not (theirs.is_complex() or theirs.is_meta or theirs.is_quantized)
        and theirs.layout is torch.strided
    )


def _iteration(file: Mapping[str, Any]) -> int:
    iteration = file.get("iter", 0)
    if isinstance(iteration, bool) or not isinstance(iteration, int) or iteration < 0:
        raise ValueError(f"its 'iter' is {iteration!r} and not the number of an iteration")
    return iteration


def _optimises(stepper: KLAdaptiveStepper, actor: nn.Module, critic: nn.Module) -> bool:
    mine = [*actor.parameters(), *critic.parameters()]
    theirs = stepper.optimizer.parameters
    return len(mine) == len(theirs) and all(a is b for a, b in zip(mine, theirs, strict=True))


def _our_optimizer(
    file: Mapping[str, Any],
    contents: Contents,
    networks: Mapping[Role, nn.Module],
    stepper: KLAdaptiveStepper,
) -> dict[str, Any]:
    """The optimiser's state with parameters numbered as the stepper's.

    Raises:
        ValueError: there is none, it is not this Adam, or it is of other parameters.
    """
    if "optimizer_state_dict" not in file:
        raise ValueError("it holds no optimiser: load it without a stepper")
    saved = file["optimizer_state_dict"]
    if not isinstance(saved, Mapping) or not {"state", "param_groups"} <= saved.keys():
        raise ValueError("its 'optimizer_state_dict' is not that of an optimiser")
    groups, states = saved["param_groups"], saved["state"]
    if (
        not isinstance(states, Mapping)
        or not isinstance(groups, list)
        or not all(isinstance(group, Mapping) and isinstance(group.get("params"), list) for group in groups)
    ):
        raise ValueError("its 'optimizer_state_dict' is not that of an optimiser")
    if len(groups) != 1 or len(groups[0]["params"]) != len(contents.parameters):
        numbers = sum(len(group["params"]) for group in groups)
        raise ValueError(
            f"its optimiser has {numbers} parameters in {len(groups)} group(s) and its networks have "
            f"{len(contents.parameters)}: load it without a stepper"
        )
    for name, expected in _ADAM.items():
        if groups[0].get(name) != expected:
            raise ValueError(
                f"its optimiser is not Adam with torch's defaults ({name} is {groups[0].get(name)!r} and not "
                f"{expected!r}): load it without a stepper"
            )
    learning_rate = _number(groups[0].get("lr"))
    if not 0 < learning_rate < math.inf:
        raise ValueError(
            f"its optimiser's learning rate is {groups[0].get('lr')!r} and not a positive number: load it "
            "without a stepper"
        )
    numbers = {id(parameter): number for number, parameter in enumerate(stepper.optimizer.parameters)}
    state: dict[int, dict[str, Tensor]] = {}
    for index, (role, name) in zip(groups[0]["params"], contents.parameters, strict=True):
        parameter = networks[role].get_parameter(name)
        moments = _moments(states.get(index), parameter, contents.networks[role][name][0])
        state[numbers[id(parameter)]] = moments
    return {"state": state if states else {}, "param_groups": [{**groups[0], "lr": learning_rate}]}


def _moments(saved: Any, parameter: Tensor, theirs: str) -> dict[str, Tensor]:
    """Adam's moments of one parameter.

    Raises:
        ValueError: they are of another shape, or no moments at all.
    """
    if saved is None:  # it never had a gradient
        return {"step": torch.zeros(()), **dict.fromkeys(_MOMENTS, torch.zeros_like(parameter))}
    moments: dict[str, Any] = {
        name: saved.get(name) if isinstance(saved, Mapping) else None for name in _MOMENTS
    }
    for moment in moments.values():
        if isinstance(moment, Tensor) and moment.shape != parameter.shape:
            raise ValueError(
                f"its optimiser's moments of {theirs!r} have shape {tuple(moment.shape)} and not "
                f"{tuple(parameter.shape)}"
            )
    complete = all(_can_become(moment, parameter) for moment in moments.values())
    steps = _number(saved.get("step")) if complete else math.nan
    if not 0 <= steps < math.inf:
        raise ValueError(f"its optimiser's moments of {theirs!r} are not Adam's: load it without a stepper")
    return {"step": torch.tensor(steps, dtype=torch.float32), **moments}


def _number(value: object) -> float:
    """A number, or a tensor of one; NaN where it is neither."""
    if isinstance(value, Tensor) and value.numel() == 1 and not value.is_meta and not value.is_complex():
        value = value.item()
    return float(value) if isinstance(value, int | float) else math.nan


def _their_state(network: GaussianActor | ValueCritic) -> dict[str, Tensor]:
    std_type = network.std_type if isinstance(network, GaussianActor) else None
    state: dict[str, Tensor] = {}
    for name, tensor in network.state_dict().items():
        theirs = their_name(name, std_type)
        statistic = name.startswith("normalizer.") and tensor.ndim == 1
        state[theirs] = (tensor.unsqueeze(0) if statistic else tensor).cpu().clone()
    return state


def _on_cpu(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.cpu()
    if isinstance(value, dict):
        return {key: _on_cpu(entry) for key, entry in value.items()}
    return value
