"""All commands, each a function in a file of its own. It returns the exit code, and raises what is wrong input."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Annotated, Final

import typer

import nixl_tiers
from nixl_tiers.cli import BAD_INPUT
from nixl_tiers.cli.config import config
from nixl_tiers.cli.doctor import doctor
from nixl_tiers.cli.inspect import inspect
from nixl_tiers.cli.output import InputError
from nixl_tiers.cli.plan import plan
from nixl_tiers.cli.purge import purge
from nixl_tiers.cli.report import report
from nixl_tiers.config.schema import ConfigError

COMMANDS: Final = (plan, config, doctor, report, inspect, purge)

# Tracebacks are Python's own: typer's show the values of variables, which may be secrets.
app: Final = typer.Typer(
    name="nixl-tiers",
    help="KV cache beyond GPU memory.",
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"nixl-tiers {nixl_tiers.__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """KV cache beyond GPU memory."""


for command in COMMANDS:
    app.command()(command)


def run(given: Sequence[str]) -> int:
    """Run one command. Wrong input is one sentence on stderr."""
    try:
        return int(app(list(given) or ["--help"], prog_name="nixl-tiers", standalone_mode=False) or 0)
    except typer.TyperException as error:
        sentence = error.format_message()
    except (ConfigError, InputError) as error:
        sentence = str(error)
    print(f"nixl-tiers: {sentence}", file=sys.stderr)
    return BAD_INPUT
