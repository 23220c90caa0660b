"""Planted faults as data: each row breaks one thing, and a check of the public behaviour must notice it.

The rows are in `planted/`, a file per package of echelon; test_mutations.py runs them. To add one, write a row:

    FAULTS = {
        "label logits are not summed": fault(
            "shardformer.layers.vocabulary_loss:all_reduce", lambda sums, group: sums, LLAMA, Layout(tp=2)
        ),
    }

The target is a path below echelon. It is resolved when the row runs, and a quick test without processes resolves all
of them: if you rename or remove a target, change its row. `returning(value)` replaces a function by one that returns
the value. `around(function)` is for a fault that calls the original, which the function gets as its first argument;
`made_from(wrap)` replaces an original that is not called by `wrap(original)`.
`in_table("t5", change)` changes a model's table, by a function from Table to Table.

A check other than a parity row is a function in the model's place, called on `num_ranks` ranks. With the fault it must
raise, or return a description of the difference; without the fault it returns None. `notice` is a pattern that must be
found in this description, or in "TypeName: message" of the error. `quick=True` belongs to a few rows; `make test-all`
runs the rest.
"""

import importlib
import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

from echelon.shardformer import split_trial, transforms
from echelon.shardformer.tables.table import Table
from echelon.verify.layout_choice import Layout, Training
from echelon.verify.model_choice import ModelChoice
from echelon.verify.parity import parity

PLAIN = Training()
TABLES = "shardformer.tables.table:_TABLES"
IN_A_STEP = r"^step \d+: "
Check = Callable[[], str | None]


@dataclass(frozen=True)
class made_from:  # reads as a verb
    """A change that wraps the original."""

    wrap: Callable[[Any], Any]


def returning(value: Any) -> Callable[..., Any]:
    """Return a function of any arguments that returns a value."""
    return lambda *args, **kwargs: value


def around(replacement: Callable[..., Any]) -> made_from:
    """Return a change to a function that gets the original as its first argument."""

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        def replaced(*args: Any, **kwargs: Any) -> Any:
            return replacement(original, *args, **kwargs)

        return replaced

    return made_from(wrap)


def in_table(model_type: str, change: Callable[[Table], Table]) -> made_from:
    """Return a change of the table of a model type."""

    def changed(tables: Mapping[str, Table]) -> dict[str, Table]:
        return {**tables, model_type: change(tables[model_type])}

    return made_from(changed)


def without(**fields: Any) -> Callable[[Any], Any]:
    """Return a function that replaces fields of a dataclass."""
    return lambda instance: replace(instance, **fields)


@dataclass(frozen=True, kw_only=True)
class Mutation:
    """One planted fault and the check that must notice it; see `fault`."""

    target: str
    change: Any
    row: tuple[ModelChoice, Layout] | None = None
    training: Training = PLAIN
    num_steps: int = 1
    check: Check | None = None
    num_ranks: int = 2
    notice: str = ""
    quick: bool = False

    @property
    def world_size(self) -> int:
        """Return the number of processes of the check."""
        return self.num_ranks if self.row is None else self.row[1].world_size

    @property
    def noticing(self) -> tuple[object, ...]:
        """Return a key of the check, which several faults may share."""
        return (self.row, self.training, self.check, self.world_size)

    def resolve(self) -> tuple[Any, str]:
        """Return the owner of the target and the attribute's name.

        Raises:
            LookupError: there is no such target.
        """
        module, _, path = f"echelon.{self.target}".partition(":")
        *owners, name = path.split(".")
        try:
            owner = importlib.import_module(module)
            for attribute in owners:
                owner = getattr(owner, attribute)
            getattr(owner, name)
        except (ImportError, AttributeError) as error:
            raise LookupError(f"target={self.target!r} does not exist: {error}") from error
        return owner, name

    @contextmanager
    def planted(self) -> Iterator[None]:
        """Break the target in this process, within the block."""
        owner, name = self.resolve()
        static = inspect.getattr_static(owner, name)
        original = getattr(owner, name)
        broken = self.change.wrap(original) if isinstance(self.change, made_from) else self.change
        if inspect.isclass(owner) and isinstance(static, staticmethod | classmethod):
            broken = staticmethod(broken)
        tried = transforms.sequence_errors

        def tried_without_it(*arguments: Any) -> list[str]:
            """The trial at boost notices wrong sequence modes, too; a row is about the parity check."""
            with patch.object(owner, name, static):
                return tried(*arguments)

        with patch.object(owner, name, broken), patch.dict(split_trial.RESULTS, clear=True):
            if self.row is None:
                yield
            else:
                with patch.object(transforms, "sequence_errors", tried_without_it):
                    yield

    def run(self) -> str | None:
        """Run the check and return the difference that it finds. Collective over the world if the check is."""
        if self.row is not None:
            return parity(*self.row, training=self.training, num_steps=self.num_steps).departure
        assert self.check is not None
        return self.check()

    def notices(self, report: str) -> bool:
        """Return True if a difference or error matches the row's pattern."""
        return re.search(self.notice, report) is not None


def fault(
    target: str,
    change: Any,
    noticed_by: ModelChoice | str | Check,
    layout: Layout | None = None,
    **further: Any,
) -> Mutation:
    """Make a planted fault.

    Args:
        target: the target to break, as "package.module:attribute.attribute" below echelon.
        change: replacement of the target.
        noticed_by: a model (or its type) whose parity under the layout must fail; without a layout another check.
        further: further fields of the check (`training`, `num_steps`, `num_ranks`), `notice` and `quick`.
    """
    if layout is None:
        return Mutation(target=target, change=change, check=noticed_by, **further)
    choice = ModelChoice(model_type=noticed_by) if isinstance(noticed_by, str) else noticed_by
    return Mutation(target=target, change=change, row=(choice, layout), **{"notice": IN_A_STEP, **further})
