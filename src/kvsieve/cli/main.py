"""Entry point of the `kvsieve` command."""

from __future__ import annotations

import sys

import typer
from rich.console import Console
from rich.markup import escape

from kvsieve.cli.bench import bench
from kvsieve.cli.calibrate import calibrate
from kvsieve.cli.demo import demo
from kvsieve.cli.doctor import doctor
from kvsieve.cli.evaluate import evaluate
from kvsieve.cli.generate import generate
from kvsieve.cli.inspect import inspect
from kvsieve.cli.mode import mode
from kvsieve.cli.plan import plan
from kvsieve.cli.policies import policies
from kvsieve.cli.serve import serve
from kvsieve.core.errors import ConfigError, KvsieveError

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
app.command(context_settings=_PASS_ON)(bench)
app.command()(inspect)
app.command()(calibrate)
app.command()(generate)
app.command()(plan)
app.command()(policies)
app.command()(doctor)
app.command()(mode)
app.command()(demo)


def main() -> None:
    """Run the command; errors that a user can mend are printed without a traceback."""
    try:
        app()
    except KvsieveError as error:
        console = Console(stderr=True, soft_wrap=True)
        console.print(f"[red]error:[/red] {escape(_said(error))}", highlight=False)
        sys.exit(2)


def _said(error: KvsieveError) -> str:
    """An error's words; of a `ConfigError` the reasons alone, because not every command starts."""
    if not isinstance(error, ConfigError):
        return str(error)
    if len(error.reasons) == 1:
        return error.reasons[0]
    lines = "".join(f"\n  {i}. {reason}" for i, reason in enumerate(error.reasons, 1))
    return f"this cannot be done, for {len(error.reasons)} reasons:{lines}"
