"""What all commands print alike: JSON or a table on stdout, progress on stderr."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Annotated, Any, Final

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]
"""The option of every command that prints more than lines."""

_UNBOUNDED: Final = 10_000


class InputError(ValueError):
    """An argument that cannot be used. One sentence; the exit code is 2."""


def print_json(value: Any) -> None:
    """What has no form in JSON (paths) is printed as text."""
    print(json.dumps(value, indent=2, default=str))


def print_table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """One line per row; a terminal wraps cells, a pipe gets whole lines."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*map(str, row))
    console().print(table)


def console() -> Console:
    """Of stdout as it is now. Text is taken literally: names of files may have brackets."""
    width = None if sys.stdout.isatty() else _UNBOUNDED
    return Console(width=width, markup=False, highlight=False, emoji=False)


@contextmanager
def progress(what: str, total: int | None = None) -> Iterator[Progress]:
    """A bar of `total` steps on stderr while the block runs, only on a terminal: call its `advance(task, steps)` with
    `task = bar.tasks[0].id`."""
    stderr = Console(stderr=True)
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), TimeRemainingColumn())
    with Progress(*columns, console=stderr, transient=True, disable=not stderr.is_terminal) as bar:
        bar.add_task(what, total=total)
        yield bar
