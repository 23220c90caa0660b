"""Errors and documentation follow from the declaration of an option."""

import re
from dataclasses import dataclass, fields, replace
from inspect import cleandoc
from typing import Any

import pytest

from echelon import ShardConfig
from echelon.cluster.options import (
    AT_LEAST_ONE,
    arguments_like,
    described,
    one_of,
    option,
    option_errors,
    option_like,
    type_errors,
)
from echelon.plugins.hybrid_config import HybridConfig
from echelon.plugins.low_level_zero import ZeroConfig
from echelon.plugins.torch_ddp import DDPConfig
from echelon.plugins.torch_fsdp import FSDPConfig


@dataclass(frozen=True, kw_only=True)
class Oven:
    """Options of an oven.

    Args:
        trays: how many trays
            it has.
        fan, light: switches.

    Raises:
        ValueError: never.
    """

    trays: int | None = option(None, AT_LEAST_ONE)
    fan: bool = False
    light: bool | None = None
    heat: float = 180
    mode: str = option("top", one_of("top", "bottom"))


@dataclass(frozen=True, kw_only=True)
class Kiln(Oven):
    """Options of a kiln.

    Args:
        heat: degrees.
        mode: where it heats.
    """

    racks: int = option_like(Oven, "trays", default=3)


@pytest.mark.parametrize(
    ("value", "error"),
    [
        ({"trays": "2"}, "trays='2' must be an integer or None"),
        ({"trays": True}, "trays=True must be an integer or None"),
        ({"trays": 0}, "trays=0 must be at least 1"),
        ({"fan": 1}, "fan=1 must be True or False"),
        ({"light": "on"}, "light='on' must be True or False or None"),
        ({"heat": True}, "heat=True must be a number"),
        ({"heat": "hot"}, "heat='hot' must be a number"),
        ({"mode": ["top"]}, "mode=['top'] must be one of 'top', 'bottom'"),
    ],
    ids=str,
)
def test_values_of_another_type_and_those_that_a_check_rejects_are_errors(
    value: dict[str, Any], error: str
) -> None:
    assert option_errors(replace(Oven(), **value)) == [error]
    assert bool(type_errors(replace(Oven(), **value))) == ("at least" not in error and "one of" not in error)


def test_all_options_are_checked_at_once_and_valid_ones_are_no_errors() -> None:
    assert len(option_errors(Oven(trays=0, fan=0, light=0, heat="", mode=None))) == 5  # type: ignore[arg-type]
    assert option_errors(Oven(trays=2, fan=True, light=None, heat=20.5, mode="bottom")) == []


def test_an_option_like_another_has_its_type_check_and_meaning() -> None:
    assert arguments_like(Kiln(racks=4))["trays"] == 4
    assert option_errors(Kiln(racks=0)) == ["racks=0 must be at least 1"]
    assert described(Kiln) == {
        "trays": "how many trays it has.",
        "racks": "how many trays it has.",
        "fan": "switches.",
        "light": "switches.",
        "heat": "degrees.",
        "mode": "where it heats.",
    }


@pytest.mark.parametrize("options", [HybridConfig, ZeroConfig, DDPConfig, FSDPConfig, ShardConfig])
def test_the_docstrings_describe_every_option_and_nothing_else(options: Any) -> None:
    assert all(described(options).values())
    texts = (cleandoc(kind.__doc__ or "") for kind in options.__mro__[:-1])
    sections = [re.split(r"^Raises:", text.partition("Args:\n")[2], flags=re.M)[0] for text in texts]
    names = {
        name
        for text in sections
        for line in re.findall(r"^    (\w[\w, ]*):", text, flags=re.M)
        for name in line.split(", ")
    }
    assert names <= {field.name for field in fields(options)}
