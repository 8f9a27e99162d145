"""Converts a spec to plain JSON values and back, so that a process can run a call that it has not traced."""

from __future__ import annotations

import dataclasses
import enum
from typing import Any, TypeVar

import numpy as np

T = TypeVar("T")


def to_fields(x: Any) -> dict[str, Any]:
    """Returns the fields of a frozen dataclass that differ from their defaults, as JSON values by name.

    A nested dataclass becomes a dictionary of this kind, a tuple a list, an enumeration its value, a type {"dtype":
    name}, and a complex number {"complex": [real, imaginary]}. Numbers, strings and None stay."""
    values = ((field, getattr(x, field.name)) for field in dataclasses.fields(x))
    return {field.name: _plain(value) for field, value in values if value != field.default}


def from_fields(cls: type[T], fields: dict[str, Any]) -> T:
    """Inverts `to_fields`: returns the dataclass `cls` with these fields, and defaults for all others. Raises
    ValueError if `cls` lacks one of the fields, as in an older version of jaxmp. Raises ValueError if a field's default
    is a bool, a string or a tuple and the value is of another kind."""
    defaults = {field.name: field.default for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
    unknown = sorted(fields.keys() - defaults.keys())
    if unknown:
        raise ValueError(
            f"the program describes a {cls.__name__} with {', '.join(unknown)}, which this version of jaxmp does not "
            "know; export it again, or run it with the version that it was exported with"
        )
    values = {name: _value(plain, defaults[name]) for name, plain in fields.items()}
    for name, value in values.items():
        kind = type(defaults[name])
        if kind in (bool, str, tuple) and not isinstance(value, kind):
            raise ValueError(
                f"the program describes a {cls.__name__} with {name}={value!r}, which is no {kind.__name__}"
            )
    return cls(**values)


def _plain(x: Any) -> Any:
    """Returns a field's value as JSON: see `to_fields`."""
    if dataclasses.is_dataclass(x):
        return to_fields(x)
    if isinstance(x, enum.Enum):
        return x.value
    if isinstance(x, np.dtype | type):
        return {"dtype": np.dtype(x).name}
    if isinstance(x, tuple):
        return [_plain(each) for each in x]
    x = x.item() if isinstance(x, np.generic) else x
    return {"complex": [x.real, x.imag]} if isinstance(x, complex) else x


def _value(plain: Any, default: Any = None) -> Any:
    """Inverts `_plain`. `default`: the field's default, which tells what dataclass or enumeration to build. Without it,
    and inside tuples, a dictionary is a dtype or a complex number."""
    if dataclasses.is_dataclass(default):
        return from_fields(type(default), plain)
    if isinstance(default, enum.Enum):
        return type(default)(plain)
    if isinstance(plain, list):
        return tuple(_value(each) for each in plain)
    if isinstance(plain, dict):
        return np.dtype(plain["dtype"]) if "dtype" in plain else complex(*plain["complex"])
    return plain
