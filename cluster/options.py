"""Options, declared once: as the fields of a frozen dataclass, whose docstring has their meanings.

    max_norm: float = option(0, Check(lambda norm: norm >= 0, "must be a number of at least 0"))

Signatures, documentation and errors of all that takes the options follow from the class.
"""

import re
from collections.abc import Callable
from dataclasses import MISSING, field, fields
from inspect import cleandoc
from types import NoneType
from typing import Any, NamedTuple, TypeGuard, TypeVar, get_args

Value = TypeVar("Value")

_KINDS: dict[Any, str] = {int: "an integer", float: "a number", bool: "True or False", NoneType: "None"}
# An entry of a docstring: names, and a text whose further lines are indented.
_ENTRY = re.compile(r"^    (\w[\w, ]*): (.+(?:\n {8}.+)*)", flags=re.M)


class Check(NamedTuple):
    """A check of an option's value.

    Args:
        is_valid: called with a value of the option's type; the default is valid in any case.
        rule: the end of the error for other values, "must be at least 1" for example.
    """

    is_valid: Callable[[Any], bool]
    rule: str


AT_LEAST_ONE = Check(lambda value: value is None or value >= 1, "must be at least 1")


def one_of(*allowed: Any) -> Check:
    """Return the check for these values alone."""
    return Check(lambda value: value in allowed, f"must be one of {', '.join(map(repr, allowed))}")


def option(default: Value, check: Check) -> Value:
    """Declare an option with a check of its values, besides that of their type."""
    declared: Value = field(default=default, metadata={"check": check})
    return declared


def option_like(options: type, name: str, default: Any = MISSING) -> Any:
    """Declare an option of another dataclass again, under the name of the field.

    Args:
        options: the other dataclass.
        name: the option's name there.
        default: another default.
    """
    (original,) = (option for option in fields(options) if option.name == name)
    metadata = {**original.metadata, "name": name, "options": options}
    return field(default=original.default if default is MISSING else default, metadata=metadata)


def arguments_like(options: Any) -> dict[str, Any]:
    """Return the values of options by name, those of `option_like` by their original names."""
    return {field.metadata.get("name", field.name): getattr(options, field.name) for field in fields(options)}


def type_errors(options: Any) -> dict[str, str]:
    """Return the errors of values of another type than their option, by name: numbers, switches, and None."""
    errors = {}
    for option in fields(options):
        value = getattr(options, option.name)
        kinds = get_args(option.type) or (option.type,)
        if value is option.default or not set(kinds) <= _KINDS.keys():
            continue
        if not (type(value) in kinds or (float in kinds and is_number(value))):
            words = " or ".join(_KINDS[kind] for kind in kinds)
            errors[option.name] = f"{option.name}={value!r} must be {words}"
    return errors


def option_errors(options: Any) -> list[str]:
    """List the errors of all options: of their types and of their checks."""
    of_types = type_errors(options)
    errors = list(of_types.values())
    for option in fields(options):
        value, check = getattr(options, option.name), option.metadata.get("check")
        if option.name in of_types or check is None or value is option.default:
            continue
        if not check.is_valid(value):
            errors.append(f"{option.name}={value!r} {check.rule}")
    return errors


def described(options: Any) -> dict[str, str]:
    """Return the meaning of every option, from the docstrings of its dataclass and of the inherited ones."""
    meanings: dict[str, str] = {}
    for kind in reversed(options.__mro__):  # a class may describe an option of its base again
        for names, text in _ENTRY.findall(cleandoc(kind.__doc__ or "")):
            meanings |= dict.fromkeys(names.split(", "), " ".join(text.split()))
    for option in fields(options):
        if "name" in option.metadata:
            meanings[option.name] = described(option.metadata["options"])[option.metadata["name"]]
    return {
        option.name: meanings.get(option.name, "") for option in fields(options)
    }  # none under `python -OO`


def is_number(value: object) -> TypeGuard[float]:
    """Return True for an integer or a float, which True and False are not."""
    return isinstance(value, int | float) and not isinstance(value, bool)
