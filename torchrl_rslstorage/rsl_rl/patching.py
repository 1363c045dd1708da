"""Putting this package's RolloutStorage in the place of rsl-rl-lib's."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

from torchrl_rslstorage._extras import require_extra
from torchrl_rslstorage.rsl_rl.rollout_storage import RolloutStorage

_NAME = "RolloutStorage"


class RSLRLPatch:
    """The replacement that `patch_rsl_rl` made, which ``undo`` or the end of a ``with`` block takes back.

    >>> with patch_rsl_rl() as patch:
    ...     "rsl_rl.algorithms.ppo" in patch.modules
    True
    """

    def __init__(self, original: type, replaced: list[ModuleType]) -> None:
        self._original = original
        self._replaced = replaced

    @property
    def modules(self) -> list[str]:
        """Names of the modules in which the class was replaced."""
        return sorted(module.__name__ for module in self._replaced)

    def undo(self) -> None:
        """Puts rsl-rl-lib's own class back; storages that were made meanwhile stay what they are."""
        for module in self._replaced:
            setattr(module, _NAME, self._original)
        self._replaced = []

    def __enter__(self) -> RSLRLPatch:
        return self

    def __exit__(self, *error: Any) -> None:
        self.undo()


def patch_rsl_rl() -> RSLRLPatch:
    """Makes rsl-rl-lib build `RolloutStorage` of this package wherever it would build its own.

    Every module that was imported by now and holds rsl-rl-lib's class by its name gets ours instead: those
    of rsl-rl-lib, and those of a project that wrote ``from rsl_rl.storage import RolloutStorage``.

    Returns:
        The replacement: leave it alone and it lasts, use it in a ``with`` block and it ends with the block.

    Raises:
        ImportError: rsl-rl-lib is missing.

    >>> from torchrl_rslstorage.rsl_rl import RolloutStorage, patch_rsl_rl
    >>> with patch_rsl_rl():
    ...     import rsl_rl.algorithms.ppo as ppo
    ...
    ...     ppo.RolloutStorage is RolloutStorage
    True
    >>> ppo.RolloutStorage is RolloutStorage
    False
    """
    for module in ("rsl_rl.algorithms", "rsl_rl.extensions"):  # where the class is used
        require_extra(module, "rsl-rl", feature="patch_rsl_rl")
    original: Any = sys.modules["rsl_rl.storage.rollout_storage"].RolloutStorage
    # Read from the dictionaries: asking a lazily importing module for a name would import what it names.
    replaced = [
        module
        for module in list(sys.modules.values())
        if isinstance(module, ModuleType)
        and original is not RolloutStorage
        and vars(module).get(_NAME) is original
    ]
    for module in replaced:
        setattr(module, _NAME, RolloutStorage)
    return RSLRLPatch(original, replaced)
