"""The `echelon` command and its sub-commands; each is implemented in its own module."""

import typer

from .checkpoint import checkpoint
from .models import models
from .timeline import timeline
from .verify import verify

app = typer.Typer(
    help="Echelon: train Hugging Face transformers over many processes.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command()(models)
app.command()(timeline)
app.command()(verify)
app.add_typer(checkpoint, name="checkpoint")


@app.callback()
def _commands() -> None:
    """Echelon: train Hugging Face transformers over many processes."""


def main() -> None:
    """Run the command line."""
    app()
