"""Configs as other people keep them (dicts, YAML files, config classes), read as plain nested dicts.

Entries that nobody has set are left out: ``dataclasses.MISSING``, which Isaac Lab writes into its
``agent.yaml`` as ``{}``.
"""

from __future__ import annotations

import dataclasses
import inspect
import numbers
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torchrl_rslstorage._extras import require_extra


def plain_config(source: object) -> dict[str, Any]:
    """Returns ``source`` as nested dicts of plain values.

    Args:
        source: a mapping; the path of a YAML file; or a config class or instance, whose attributes are the
            entries and whose nested classes or instances are the sections (Isaac Lab, mjlab, legged_gym).

    Raises:
        ValueError: it is none of these, or the file is no YAML mapping of plain values.
        ImportError: a YAML file, and PyYAML is missing.

    >>> class Config:
    ...     seed = 1
    ...
    ...     class algorithm:
    ...         gamma = 0.9
    >>> plain_config(Config)
    {'algorithm': {'gamma': 0.9}, 'seed': 1}
    """
    if isinstance(source, str | Path):
        source = _yaml(Path(source))
    elif not _is_section(source):
        raise ValueError(
            f"A config is a dict, the path of a YAML file, or a config class; got {type(source).__name__}."
        )
    try:
        return _section(source)
    except RecursionError as error:
        raise ValueError("The config holds itself: one of its sections leads back to itself.") from error


def _section(source: object) -> dict[str, Any]:
    entries = source if isinstance(source, Mapping) else _attributes(source)
    plain = {str(name): _value(name, value) for name, value in entries.items()}
    return {name: value for name, value in plain.items() if not _is_unset(value)}


def _value(name: object, value: object) -> Any:
    if name == "class_name" and isinstance(value, type):
        return value.__name__
    if isinstance(value, numbers.Real) and not isinstance(value, bool):  # NumPy's are no int, or no float
        return int(value) if isinstance(value, numbers.Integral) else float(value)
    return _section(value) if _is_section(value) else value


def _is_section(value: object) -> bool:
    if value is None or isinstance(value, str | bytes | int | float | list | tuple | set):
        return False
    has_attributes = hasattr(value, "__dict__") or dataclasses.is_dataclass(value)
    if not (has_attributes or isinstance(value, Mapping)):  # a date
        return False
    # A function, or anything else that is called, is a value: symmetry_cfg has one.
    return not _is_unset(value) and (isinstance(value, type) or not callable(value))


def _is_unset(value: object) -> bool:
    # By its type: a copied MISSING is another object.
    missing = isinstance(value, type(dataclasses.MISSING))
    return missing or (isinstance(value, Mapping) and not value)


def _attributes(source: object) -> dict[str, Any]:
    if isinstance(source, type) and dataclasses.is_dataclass(source):
        source = source()  # defaults that are made anew for each instance are no attributes of the class
    own = {} if isinstance(source, type) else getattr(source, "__dict__", {})  # slots have none
    names = [name for name in dir(source) if not name.startswith("_")]
    found = {name: getattr(source, name) for name in names}
    return {
        name: value
        for name, value in found.items()
        # Methods are no entries, and a class with a capital letter is a type that a section may have.
        if name in own or not (inspect.isroutine(value) or (isinstance(value, type) and name[0].isupper()))
    }


def _yaml(path: Path) -> Mapping[str, Any]:
    yaml: Any = require_extra("yaml", "yaml", feature="reading a YAML config")

    class Loader(yaml.SafeLoader):
        """Builds plain values only; tuples, which Isaac Lab and mjlab write, become lists."""

    Loader.add_constructor("tag:yaml.org,2002:python/tuple", yaml.SafeLoader.construct_yaml_seq)
    try:
        loaded = yaml.load(path.read_text(encoding="utf-8"), Loader=Loader)
    except FileNotFoundError as error:
        raise ValueError(f"There is no config {path}.") from error
    except OSError as error:  # a folder, or nobody may read it
        raise ValueError(f"The config {path} cannot be read: {error.strerror}.") from error
    except yaml.constructor.ConstructorError as error:
        raise ValueError(f"{path} holds more than plain values and was not read: {error.problem}.") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"{path} is not a YAML file: {reason}.") from error
    if not isinstance(loaded, Mapping):
        raise ValueError(f"{path} holds {type(loaded).__name__} and not a mapping of config entries.")
    return loaded
