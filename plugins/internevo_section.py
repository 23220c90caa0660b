"""Sections of an InternEvo configuration, and the file that they come from. What their keys mean is internevo.py."""

import json
import runpy
from collections.abc import Callable, Iterable, Mapping
from difflib import get_close_matches
from inspect import isclass, isfunction, ismodule
from math import isfinite
from pathlib import Path
from typing import Any

_CLOSE = 0.85  # num_chunk to num_chunks, and no less
_FORMATS = ".py (run as Python) and .json"


class Section:
    """A dictionary of a configuration, from which keys are taken. What is wrong is noted, and never raised.

    Args:
        name: how faults call it; "" is the configuration itself.
        given: the dictionary.
        faults: where faults are noted.
    """

    def __init__(self, name: str, given: Any, faults: list[str]) -> None:
        self.name = name
        self._faults = faults
        self._taken: list[str] = []
        if not isinstance(given, Mapping):
            faults.append(f"{name}={given!r} must be a dict")
            given = {}
        self._left = dict(given)

    def take(self, key: str) -> Any | None:
        """A value of any kind; None where there is none."""
        self._taken.append(key)
        return self._left.pop(key, None)

    def whole_number(self, key: str) -> int | None:
        """A whole number."""
        return self._checked(key, lambda value: isinstance(value, int), "must be a whole number")

    def number(self, key: str) -> float | None:
        """A finite number."""
        return self._checked(
            key, lambda value: isinstance(value, (int, float)) and isfinite(value), "must be a number"
        )

    def switch(self, key: str) -> bool | None:
        """A truth value."""
        value = self.take(key)
        if value is None or isinstance(value, bool):
            return value
        self.refuse(key, value, "must be a bool")
        return None

    def text(self, key: str) -> str | None:
        """A string."""
        return self._checked(key, lambda value: isinstance(value, str), "must be a str")

    def subsection(self, key: str, *, number_is: str | None = None) -> "Section":
        """A dictionary in it, empty where there is none.

        Args:
            number_is: the key that a whole number in the place of the dictionary stands for.
        """
        value = self.take(key)
        if number_is is not None and isinstance(value, int) and not isinstance(value, bool):
            value = {number_is: value}
        return Section(self._path(key), {} if value is None else value, self._faults)

    def refuse(self, key: str, value: Any, why: str) -> None:
        """Note that a value cannot be had."""
        self._faults.append(f"{self._path(key)}={value!r} {why}")

    def allow(self, key: str, *allowed: Any, why: str) -> None:
        """Take a key that may be absent, or have one of these values, which change nothing."""
        value = self.take(key)
        if value is not None and value not in allowed:
            self.refuse(key, value, why)

    def rest(self, known: Iterable[str] | None = ()) -> list[str]:
        """Names of what was not taken and may be there; whatever else was not taken is noted.

        Args:
            known: what may be there; None is anything whose name is not nearly that of a key that was taken.
        """
        may_be = []
        for key in self._left:
            meant = get_close_matches(str(key), self._taken, 1, _CLOSE)
            if key in (() if known is None else known) or (known is None and not meant):
                may_be.append(self._path(key))
            else:
                what = f"write {meant[0]}" if meant else f"known are {', '.join(dict.fromkeys(self._taken))}"
                self._faults.append(f"{self._path(key)} is not understood: {what}")
        return may_be

    def _checked(self, key: str, is_right: Callable[[Any], bool], why: str) -> Any | None:
        """A value that is right, and no truth value, which Python counts among the numbers."""
        value = self.take(key)
        if value is None or (not isinstance(value, bool) and is_right(value)):
            return value
        self.refuse(key, value, why)
        return None

    def _path(self, key: str) -> str:
        return f"{self.name}.{key}" if self.name else key


def read_configuration(source: Mapping[str, Any] | str | Path) -> dict[str, Any]:
    """A configuration as a dictionary, from itself or from a file.

    Args:
        source: the dictionary, or the path of a Python file, whose variables are the sections, or of a JSON file. Of a
            Python file constants in capitals, names that begin with an underscore, modules, classes and functions are
            no sections.

    Raises:
        ValueError: it is neither, or no such file, or JSON that cannot be read.
    """
    if isinstance(source, Mapping):
        return dict(source)
    if not isinstance(source, (str, Path)):
        raise ValueError(f"an InternEvo configuration is a dict or the path of a file, and not {source!r}")
    path = Path(source)
    if path.suffix not in (".py", ".json") or not path.is_file():
        what = "is no file" if path.suffix in (".py", ".json") else f"must end in one of {_FORMATS}"
        raise ValueError(f"the InternEvo configuration {str(path)!r} {what}")
    return _read_json(path) if path.suffix == ".json" else _read_python(path)


def _read_python(path: Path) -> dict[str, Any]:
    return {
        name: value
        for name, value in runpy.run_path(str(path)).items()
        if not (name.startswith("_") or name.isupper())
        and not (ismodule(value) or isclass(value) or isfunction(value))
    }


def _read_json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"the InternEvo configuration {str(path)!r} is no JSON: {error}") from error
    if not isinstance(found, dict):
        raise ValueError(f"the InternEvo configuration {str(path)!r} must hold an object of sections")
    return found
