"""The `echelon` command and its sub-commands; each is implemented in its own module."""

import typer

from .. import __version__
from .checkpoint import checkpoint
from .doctor import doctor
from .explain import explain
from .models import models
from .plan import plan
from .timeline import timeline
from .verify import verify

app = typer.Typer(
    help="Echelon: train Hugging Face transformers over many processes.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command()(doctor)
app.command()(explain)
app.command()(models)
app.command()(plan)
app.command()(timeline)
app.command()(verify)
app.add_typer(checkpoint, name="checkpoint")


def _print_version(is_asked: bool) -> None:
    if is_asked:
        typer.echo(f"echelon {__version__}")
        raise typer.Exit


@app.callback()
def _commands(
    version: bool = typer.Option(
        False, "--version", is_eager=True, callback=_print_version, help="Print the version and exit."
    ),
) -> None:
    """Echelon: train Hugging Face transformers over many processes."""


def main() -> None:
    """Run the command line."""
    app()
