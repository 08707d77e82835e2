"""Entry point of the `kvsieve` command."""

from __future__ import annotations

import sys

import typer
from rich.console import Console

from kvsieve.cli.demo import demo
from kvsieve.cli.doctor import doctor
from kvsieve.cli.evaluate import evaluate
from kvsieve.cli.generate import generate
from kvsieve.cli.mode import mode
from kvsieve.cli.plan import plan
from kvsieve.cli.serve import serve
from kvsieve.core.errors import KvsieveError

app = typer.Typer(
    name="kvsieve",
    help="Stock vLLM, keeping only the KV entries that matter.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)
# Everything that these do not know is a flag of `vllm serve`.
_PASS_ON = {"allow_extra_args": True, "ignore_unknown_options": True}
app.command(context_settings=_PASS_ON)(serve)
app.command("eval", context_settings=_PASS_ON)(evaluate)
app.command()(generate)
app.command()(plan)
app.command()(doctor)
app.command()(mode)
app.command()(demo)


def main() -> None:
    """Run the command; errors that a user can mend are printed without a traceback."""
    try:
        app()
    except KvsieveError as error:
        Console(stderr=True, soft_wrap=True).print(f"[red]error:[/red] {error}", highlight=False)
        sys.exit(2)
