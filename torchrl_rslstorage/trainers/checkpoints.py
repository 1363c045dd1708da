"""Checkpoints: TorchRL's, with payloads that hold tensors only and errors of one sentence.

    checkpoint-000000012288/
      manifest.json                     TorchRL's: components, files, versions
      components/0000-actor/state.pt    one ``torch.save`` file each, read with ``weights_only``
      …

TorchRL's default payload is a folder of memory-mapped tensors, whose loader unpickles any ``other.pickle``
that lies in it (tensordict 0.14.3, tensorclass.py, ``_load_pickle_file``): a checkpoint from a stranger could
run code. TorchRL's own ``Checkpoint(actor=actor).load(path)`` reads these checkpoints too.
"""

from __future__ import annotations

import shutil
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from torchrl.checkpoint import Checkpoint, CheckpointError, StateDictCheckpointAdapter


class _TensorsOnly(StateDictCheckpointAdapter):
    """State dicts as one file of tensors and plain numbers, in which no code can hide."""

    def __init__(self) -> None:
        super().__init__(payload_format="torch")

    def load(
        self,
        component: Any,
        path: Path,
        *,
        map_location: Any,
        tensor_load_kwargs: Mapping[str, Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
    ) -> None:
        file = path / self.state_torch
        try:
            state = torch.load(file, map_location=map_location, weights_only=True)
        except FileNotFoundError as error:
            raise CheckpointError(f"{file} is missing") from error
        except Exception as error:  # pickle, zip and torch each have errors of their own
            raise CheckpointError(f"{file} is broken, or holds more than tensors") from error
        try:
            component.load_state_dict(state, *args, **kwargs)
        except Exception as error:
            raise CheckpointError(f"it does not fit: {_first_reason(error)}") from error


RANK = "_rank"
"""What stands before the number in the name of a component that ranks have apart."""


class SavedState:
    """A component of which the state is all that there is here: it lives in another process."""

    def __init__(self, state: Mapping[str, Any]) -> None:
        self._state = state

    def state_dict(self) -> Mapping[str, Any]:
        """The state."""
        return self._state


def checkpoint_of(components: Mapping[str, Any]) -> Checkpoint:
    """TorchRL's checkpoint coordinator over ``components``, which need ``state_dict`` and its inverse."""
    checkpoint = Checkpoint()
    for name, component in components.items():
        checkpoint.register(name, component, adapter=_TensorsOnly())
    return checkpoint


def load_checkpoint(path: str | Path, components: Mapping[str, Any], *, of: Collection[str] = ()) -> None:
    """Restores the named components from a checkpoint folder; others in it are left alone.

    Args:
        path: the folder.
        components: what is restored.
        of: every component that such a checkpoint may hold, of any rank; one that holds all of these and more
            is refused, rather than the others left alone. Nothing is refused if left out.

    Raises:
        CheckpointError: the folder is no checkpoint, is broken, or a component does not fit.
    """
    if not _is_whole(Path(path)):
        raise CheckpointError(f"{path} is not a checkpoint of this package: it has no valid manifest.")
    try:
        held = {name.partition(RANK)[0] for name in Checkpoint.manifest(path)["components"]}
        if of and held > set(of):
            others = ", ".join(map(repr, sorted(held - set(of))))
            raise CheckpointError(
                f"It holds {others}, which nothing here corresponds to: it comes from another kind of run."
            )
        checkpoint_of(components).load(path, map_location="cpu")
    except CheckpointError as error:
        raise CheckpointError(f"{path} cannot be loaded. {str(error).rstrip('.')}.") from error


def latest_checkpoint(folder: Path) -> Path | None:
    """The newest whole checkpoint in ``folder``; None if there is none at all.

    Raises:
        CheckpointError: there are checkpoints, but not one that is whole.
    """
    found = sorted(path for path in folder.glob("checkpoint-*") if path.name[11:].isdigit())
    whole = [path for path in found if _is_whole(path)]
    if found and not whole:
        raise CheckpointError(
            f"No checkpoint in {folder} is whole ({found[-1].name} has no valid manifest): delete them to "
            "start the run over."
        )
    return whole[-1] if whole else None


def remove_leftovers(folder: Path) -> None:
    """Removes what a kill in the middle of writing or deleting a checkpoint has left in ``folder``."""
    for path in (*folder.glob(".checkpoint-*.stage-*"), *folder.glob(".checkpoint-*.delete-*")):
        shutil.rmtree(path, ignore_errors=True)


def _is_whole(path: Path) -> bool:
    try:
        return Checkpoint.is_checkpoint(path)
    except AttributeError:  # the manifest is JSON, but not an object
        return False


def _first_reason(error: Exception) -> str:
    """The first complaint of an error, on one line; torch lists every tensor that does not fit."""
    lines = [" ".join(line.split()) for line in str(error).splitlines() if line.strip()]
    if len(lines) > 1 and lines[0].endswith(":"):
        lines = lines[1:]
    return lines[0] if lines else type(error).__name__
