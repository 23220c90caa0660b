"""Configurations of other frameworks: nested sections of keys, read by one table of what each key becomes here."""

import json
import runpy
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from inspect import isclass, isfunction, ismodule
from math import isfinite
from pathlib import Path
from typing import Any, NamedTuple

from ..cluster.options import is_number

_CLOSE = 0.85  # similarity of a likely misspelling: num_chunk and num_chunks pass


class Key(NamedTuple):
    """A key of a configuration.

    Args:
        kind: the kind of its values, a name of KINDS.
        argument: the option of the plugin that takes the value unchanged.
        allowed: the accepted values, which change nothing; None accepts any.
        why: the end of the error for a refused value.
    """

    kind: str = "any"
    argument: str | None = None
    allowed: tuple[Any, ...] | None = None
    why: str = ""


def _is_finite(value: Any) -> bool:
    return is_number(value) and isfinite(value)


KINDS: dict[str, Callable[[Any], bool]] = {
    "any": lambda value: True,
    "an integer": lambda value: isinstance(value, int) and not isinstance(value, bool),
    "a number": _is_finite,
    "a bool": lambda value: isinstance(value, bool),
    "a str": lambda value: isinstance(value, str),
    "a bool, or a number from 0 to 1": lambda value: (
        isinstance(value, (bool, int, float)) and 0 <= value <= 1
    ),
}


class Settings:
    """The valid values of a configuration by their paths, "parallel.tensor.size" for example.

    Args:
        config: the sections.
        keys: the known keys by path.
        ignored: further keys of each section, which become no argument. None: any name but a likely misspelling of a
            known key.
        errors: a list to which the errors of invalid values are added.
        name: returns a path as the user wrote it, for errors.

    Attributes:
        ignored_paths: the paths of keys that concern other objects than the plugin.
    """

    def __init__(
        self,
        config: Mapping[str, Any],
        keys: Mapping[str, Key],
        ignored: Mapping[str, tuple[str, ...] | None],
        errors: list[str],
        name: Callable[[str], str] = str,
    ) -> None:
        self.errors = errors
        self.ignored_paths: list[str] = []
        self._keys, self._ignored, self._name = keys, ignored, name
        paths = [path.split(".") for path in keys]
        self._sections = {".".join(path[:depth]) for path in paths for depth in range(1, len(path))}
        self._values: dict[str, Any] = {}  # by path: a value, or the dictionary of a section
        self._read_section("", config)

    def get(self, path: str, default: Any = None) -> Any:
        """Return the value of a path if it is valid, else the default."""
        return self._values.get(path, default)

    def has(self, section: str) -> bool:
        """Return True if the value or the section was given."""
        return section in self._values

    def arguments(self) -> dict[str, Any]:
        """Return the arguments that take a given value unchanged."""
        return {
            key.argument: self._values[path]
            for path, key in self._keys.items()
            if key.argument and path in self._values
        }

    def refuse(self, path: str, value: Any, why: str) -> None:
        """Add the error of a refused value."""
        self.errors.append(f"{self._name(path)}={value!r} {why}")

    def _read_section(self, section: str, content: Any) -> None:
        """Keep the valid values of a section and of the sections in it, and add the errors of the others.

        An integer may stand in place of a section `dict(size=…)` (InternEvo).
        """
        if f"{section}.size" in self._keys and KINDS["an integer"](content):
            content = {"size": content}
        if not isinstance(content, Mapping):
            self.refuse(section, content, "must be a dict")
            return
        self._values[section] = content
        path_of = self._paths_in(section)
        for key, value in content.items():
            path = path_of.get(key)
            if path is None:
                self._read_unknown_key(section, key, list(path_of))
            elif path in self._sections:
                self._read_section(path, {} if value is None else value)
            elif value is not None:
                self._read_value(path, value)

    def _read_value(self, path: str, value: Any) -> None:
        """Keep a value, or add its error."""
        key = self._keys[path]
        if key.allowed is not None and value not in key.allowed:
            self.refuse(path, value, key.why)
        elif not KINDS[key.kind](value):
            self.refuse(path, value, f"must be {key.kind}")
        else:
            self._values[path] = value

    def _read_unknown_key(self, section: str, key: str, known_keys: list[str]) -> None:
        """Add a key that is not known to `ignored_paths`, or its error if it is not ignored or likely misspelled."""
        path = self._name(f"{section}.{key}" if section else str(key))
        ignored = self._ignored.get(section, ())
        similar = get_close_matches(str(key), known_keys, 1, _CLOSE)
        if (ignored is None and not similar) or key in (ignored or ()):
            self.ignored_paths.append(path)
        else:
            advice = f"write {similar[0]}" if similar else f"known are {', '.join(known_keys)}"
            self.errors.append(f"{path} is not understood: {advice}")

    def _paths_in(self, section: str) -> dict[str, str]:
        """Return the paths of the keys and sections directly in a section, by their last name."""
        paths = [*self._keys, *self._sections]
        return {path.rpartition(".")[2]: path for path in paths if path.rpartition(".")[0] == section}


def read_configuration(source: Mapping[str, Any] | str | Path, framework: str) -> dict[str, Any]:
    """Return a configuration as a dictionary, copied or read from a file.

    Args:
        source: the dictionary, or the path of a JSON file or of a Python file, whose variables are the sections. In
            a Python file names in capitals or with a leading underscore, modules, classes and functions are ignored.
        framework: its name, for errors.

    Raises:
        ValueError: the source is neither, the file does not exist, or its JSON is invalid.
    """
    if isinstance(source, Mapping):
        return dict(source)
    if not isinstance(source, (str, Path)):
        raise ValueError(
            f"a configuration of {framework} must be a dict or the path of a file, not {source!r}"
        )
    path, name = Path(source), f"the {framework} configuration {str(source)!r}"
    if path.suffix not in (".py", ".json"):
        raise ValueError(f"{name} must end in one of .py (run as Python) and .json")
    if not path.is_file():
        raise ValueError(f"{name} is not a file")
    if path.suffix == ".py":
        return {
            key: value
            for key, value in runpy.run_path(str(path)).items()
            if not (key.startswith("_") or key.isupper())
            and not (ismodule(value) or isclass(value) or isfunction(value))
        }
    try:
        sections = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"{name} is not JSON: {error}") from error
    if not isinstance(sections, dict):
        raise ValueError(f"{name} must hold an object of sections")
    return sections
