"""The command line: `nixl-tiers COMMAND ...`. The commands are in `app.py`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Final

OK: Final = 0
FAILED: Final = 1
BAD_INPUT: Final = 2
INCOMPLETE: Final = 3  # of inspect and purge: something could not be read or deleted
_EXTRA: Final = ("typer", "rich")
INSTALL_EXTRA: Final = "pip install '.[cli]' in the checkout of nixl_tiers"
"""For error messages. Nothing is published yet."""


def main(given: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code: 0 done, 1 it failed, 2 wrong input, 3 incomplete; doctor has its own.

    Imports nothing but the standard library until it knows that the extra `cli` is installed.
    """
    try:
        from nixl_tiers.cli.app import run
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in _EXTRA:
            raise
        print(f"nixl-tiers: the command line needs {missing}: {INSTALL_EXTRA}", file=sys.stderr)
        return BAD_INPUT
    return run(sys.argv[1:] if given is None else given)
