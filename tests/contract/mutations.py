"""Planted faults as data: each row breaks one thing, and a check of the public behaviour must notice it.

The rows stand in `planted/`, a file per package of echelon; test_mutations.py runs them. To add one, write what takes
the original's place as a function at the top level of the file (the worker pool pickles it) and a row in its FAULTS:

    def unsummed(sums: Tensor, group: ProcessGroup) -> Tensor:
        return sums

    FAULTS = {
        "label logits are not summed": Mutation(
            target="echelon.shardformer.layers.loss:all_reduce",
            replacement=unsummed,
            row=(ModelChoice(model_type="llama"), Layout(tp=2)),
        ),
    }

`target` is resolved when the row runs, and a quick test without processes resolves all of them: who renames or removes
a target changes its row. A fault that needs the original is a `wrapper`: it is called with the original, and returns
what takes its place. A fault in a model's table is `in_table("t5", change)` with a function from Table to Table.

A check that is no row of parity is any `check` that the workers can import: called with `args` on `num_ranks` ranks, it
fails, or returns what departs, and returns None without the fault. `notice` is a pattern that must be found in
what departs, or in "TypeName: message" of the error. `quick=True` belongs to a few rows; `make test-all` runs the rest.
"""

import importlib
import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest.mock import patch

from echelon.shardformer.tables.table import Table
from echelon.verify.layout import Layout, Training
from echelon.verify.models import ModelChoice
from echelon.verify.parity import parity

PLAIN = Training()
AS_IT_IS = object()  # in the place of a replacement that was not given
TABLES = "echelon.shardformer.tables.table:_TABLES"


@dataclass(frozen=True, kw_only=True)
class Mutation:
    """One planted fault and the check that must notice it.

    Args:
        target: what is broken, as "package.module:attribute.attribute".
        replacement: what takes its place.
        wrapper: called with the original, returns what takes its place; instead of `replacement`.
        row: a model and a layout whose parity must depart.
        training: what the steps of the row go through.
        num_steps: how many of them there are.
        check: instead of a row, a function that must fail or return what departs; None without the fault.
        args: positional arguments of `check`.
        num_ranks: how many processes run `check`.
        notice: a pattern found in what departs, or in the error.
        quick: part of `make test`.
    """

    target: str
    replacement: Any = AS_IT_IS
    wrapper: Callable[[Any], Any] | None = None
    row: tuple[ModelChoice, Layout] | None = None
    training: Training = PLAIN
    num_steps: int = 1
    check: Callable[..., str | None] | None = None
    args: tuple[Any, ...] = ()
    num_ranks: int = 2
    notice: str = ""
    quick: bool = False

    def __post_init__(self) -> None:
        if (self.replacement is AS_IT_IS) == (self.wrapper is None):
            raise ValueError("give either a replacement or a wrapper")
        if (self.row is None) == (self.check is None):
            raise ValueError("give either a row of parity or a check")

    @property
    def world_size(self) -> int:
        """Processes that notice it."""
        return self.num_ranks if self.row is None else self.row[1].world_size

    @property
    def noticing(self) -> tuple[object, ...]:
        """Identify the check, which several faults may share."""
        return (self.row, self.training, self.check, self.args, self.world_size)

    def resolve(self) -> tuple[Any, str]:
        """Return the owner of the target and the attribute's name.

        Raises:
            LookupError: there is no such target.
        """
        module, _, path = self.target.partition(":")
        *owners, name = path.split(".")
        try:
            owner = importlib.import_module(module)
            for each in owners:
                owner = getattr(owner, each)
            getattr(owner, name)
        except (ImportError, AttributeError) as error:
            raise LookupError(f"target={self.target!r} does not exist: {error}") from error
        return owner, name

    @contextmanager
    def planted(self) -> Iterator[None]:
        """Break the target in this process."""
        owner, name = self.resolve()
        static = inspect.getattr_static(owner, name)
        original = getattr(owner, name)
        broken = self.replacement if self.wrapper is None else self.wrapper(original)
        if inspect.isclass(owner) and isinstance(static, staticmethod | classmethod):
            broken = staticmethod(broken)
        with patch.object(owner, name, broken):
            yield

    def run(self) -> str | None:
        """Run the check and return what departs. Collective over the world where the check is."""
        if self.row is not None:
            return parity(*self.row, training=self.training, num_steps=self.num_steps).departure
        assert self.check is not None
        return self.check(*self.args)

    def notices(self, found: str) -> bool:
        """Tell whether what was found is what the row announces."""
        return re.search(self.notice, found) is not None


def found_with(mutation: Mutation) -> str | None:
    """Run a check with its fault, on one rank of the pool."""
    with mutation.planted():
        return mutation.run()


def found_without(mutation: Mutation) -> str | None:
    """Run a check as the code is, on one rank of the pool."""
    return mutation.run()


def in_table(model_type: str, change: Callable[[Table], Table]) -> dict[str, Any]:
    """Arguments of a Mutation that changes the table of a model type."""
    return dict(target=TABLES, wrapper=partial(_with_change, model_type=model_type, change=change))


def _with_change(
    tables: Mapping[str, Table], *, model_type: str, change: Callable[[Table], Table]
) -> dict[str, Table]:
    return {**tables, model_type: change(tables[model_type])}
