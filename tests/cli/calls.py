"""Calls of the command line in this process."""

import shlex
from typing import Any

from typer.testing import CliRunner

from echelon.cli.main import app


def call(command: str, **settings: Any) -> tuple[int, str]:
    """Run a line of `echelon`, without its first word; return the exit status and the output."""
    result = CliRunner().invoke(app, shlex.split(command), **settings)
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.output


def cells(output: str) -> list[list[str]]:
    """Return the cells of a printed table's rows, without its heading."""
    return [
        [cell.strip() for cell in line.strip("│").split("│")] for line in output.splitlines() if "│" in line
    ]


def require_refused(command: str, *words: str) -> None:
    """Require exit status 2, and these words in the output, whose lines may be broken anywhere."""
    status, output = call(command)
    assert status == 2, output
    printed = " ".join(output.split())
    assert [word for word in words if word not in output and word not in printed] == [], output
