"""Optional dependencies: imported where they are used, with an error that says what to install."""

from __future__ import annotations

import importlib
from types import ModuleType


def require_extra(module: str, extra: str, *, feature: str = "this") -> ModuleType:
    """Returns the imported ``module``, or says which extra of ours brings it.

    Args:
        module: dotted name of the module, such as ``"matplotlib.figure"``.
        extra: the extra of this package that installs it, such as ``"cli"``.
        feature: what the user asked for, the first words of the error.

    Raises:
        ImportError: the module is missing, or is installed but broken (the reason is then given).

    >>> require_extra("json", "cli").dumps([1])
    '[1]'
    >>> require_extra("no_such_module.sub", "gym", feature="the Gymnasium wrapper")
    Traceback (most recent call last):
    ImportError: the Gymnasium wrapper needs no_such_module: pip install torchrl-rslstorage[gym]
    """
    top = module.partition(".")[0]
    try:
        return importlib.import_module(module)
    except ImportError as error:
        absent = isinstance(error, ModuleNotFoundError) and error.name == top
        reason = "" if absent else f" (it is installed, but its import failed: {error})"
        raise ImportError(
            f"{feature} needs {top}: pip install torchrl-rslstorage[{extra}]{reason}", name=top
        ) from error
