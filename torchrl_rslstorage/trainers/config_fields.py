"""Reading one section of somebody else's config: every field is used, ignored with a reason, or refused."""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

T = TypeVar("T")


class Fields:
    """The fields of one section, taken one by one; what is left in the end is refused.

    Args:
        section: the section's dotted name, "" for the top.
        values: its fields.
        notes: where it is noted what was used, left at its default, and ignored.

    >>> notes = Notes()
    >>> fields = Fields("algorithm", {"gamma": "9.9e-1", "color": "red"}, notes)
    >>> fields.take("gamma", number, 0.5)
    0.99
    >>> fields.refuse_unknown()
    Traceback (most recent call last):
    ValueError: RSL-RL configs have no field `algorithm.color` that is known here.
    """

    def __init__(self, section: str, values: object, notes: Notes) -> None:
        if not isinstance(values, Mapping):
            raise ValueError(f"`{section}` must be a section with fields, got {values!r}.")
        self._section = section
        self._left = dict(values)
        self._asked: list[str] = []
        self._notes = notes

    def __contains__(self, field: str) -> bool:
        return field in self._left

    def is_none(self, field: str) -> bool:
        """Whether the field is there and says None."""
        return self._left.get(field, self) is None

    def path(self, field: str) -> str:
        """The field's dotted name."""
        return f"{self._section}.{field}" if self._section else field

    def take(self, field: str, convert: Callable[[object], T], default: T) -> T:
        """The converted value; the default where the field is not set.

        Raises:
            ValueError: the value is not what ``convert`` takes.
        """
        self._asked.append(field)
        if field not in self._left:
            self._notes.defaults[self.path(field)] = default
            return default
        value = self._left.pop(field)
        try:
            converted = convert(value)
        except (TypeError, ValueError) as error:
            raise ValueError(f"`{self.path(field)}` is {value!r}: {error}.") from error
        self._notes.used[self.path(field)] = converted
        return converted

    def must_be(self, field: str, choices: Sequence[object], why: str) -> Any:
        """The field's value, which must be the first of ``choices`` (the default) or another of them.

        Raises:
            ValueError: it is something else.
        """
        self._asked.append(field)
        if field not in self._left:
            return choices[0]
        value = self._left.pop(field)
        if isinstance(choices[0], str) and isinstance(value, str):
            value = value.replace(":", ".").rpartition(".")[2]  # "rsl_rl.models:MLPModel"
        if isinstance(value, list):
            value = tuple(value)
        # `1 == True`, so that types are compared as well.
        if not any(value == choice and isinstance(value, type(choice)) for choice in choices):
            allowed = " or ".join(repr(choice) for choice in choices)
            raise ValueError(f"`{self.path(field)}` is {value!r}, but only {allowed} works here: {why}.")
        self._notes.used[self.path(field)] = value
        return value

    def ignore(self, *fields: str, reason: str) -> None:
        """Leaves fields unread, with the reason noted for those that are set."""
        for field in fields:
            self._asked.append(field)
            if field in self._left:
                del self._left[field]
                self._notes.ignored[self.path(field)] = reason

    def section(self, field: str) -> Fields:
        """A section inside this one."""
        self._asked.append(field)
        return Fields(self.path(field), self._left.pop(field), self._notes)

    def refuse_unknown(self) -> None:
        """Ends the reading.

        Raises:
            ValueError: fields are left over.
        """
        if not self._left:
            return
        names = ", ".join(f"`{self.path(field)}`" for field in self._left)
        near = difflib.get_close_matches(next(iter(self._left)), self._asked, 1)
        hint = f" Did you mean `{self.path(near[0])}`?" if near else ""
        raise ValueError(f"RSL-RL configs have no field {names} that is known here.{hint}")


class Notes:
    """What became of each field of a config, by its dotted name."""

    def __init__(self) -> None:
        self.used: dict[str, object] = {}
        self.defaults: dict[str, object] = {}
        self.ignored: dict[str, str] = {}


def number(value: object) -> float:
    """A number; YAML reads ``1e-3``, without a point, as text."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise TypeError("it must be a number")
    try:
        converted = float(value)
    except ValueError as error:
        raise ValueError("it must be a number") from error
    if math.isnan(converted):
        raise ValueError("it must be a number")
    return converted


def integer(value: object) -> int:
    """A whole number."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError("it must be a whole number")
    return value


def positive(value: object) -> int:
    """A whole number of at least one."""
    if integer(value) < 1:
        raise ValueError("it must be at least 1")
    return integer(value)


def flag(value: object) -> bool:
    """True or false."""
    if not isinstance(value, bool):
        raise TypeError("it must be true or false")
    return value


def text(value: object) -> str:
    """A string."""
    if not isinstance(value, str):
        raise TypeError("it must be text")
    return value


def or_none(convert: Callable[[object], T]) -> Callable[[object], T | None]:
    """A converter that leaves None as it is."""
    return lambda value: None if value is None else convert(value)


def one_of(choices: Mapping[str, T]) -> Callable[[object], T]:
    """A converter of names, whatever their case, to what they stand for."""

    def convert(value: object) -> T:
        if not isinstance(value, str) or value.lower() not in choices:
            raise ValueError(f"it must be one of {sorted(choices)}")
        return choices[value.lower()]

    return convert


def widths(value: object) -> tuple[int, ...]:
    """Widths of hidden layers."""
    if -1 in _list_of_widths(value):
        raise ValueError("-1 (as wide as the input) is not supported, write the width out")
    return relative_widths(value)


def relative_widths(value: object) -> tuple[int, ...]:
    """Widths of hidden layers, of which -1 stands for that of the input."""
    return tuple(-1 if width == -1 else positive(width) for width in _list_of_widths(value))


def _list_of_widths(value: object) -> Sequence[object]:
    if isinstance(value, str) or not isinstance(value, Sequence) or not value:
        raise TypeError("it must be a list of widths")
    return value
