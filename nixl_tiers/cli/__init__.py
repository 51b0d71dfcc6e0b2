"""The command line: `nixl-tiers COMMAND ...`. The commands are in `app.py`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Final

OK: Final = 0
FAILED: Final = 1
BAD_INPUT: Final = 2
INCOMPLETE: Final = 3  # of inspect and purge: something could not be read or deleted


def main(given: Sequence[str] | None = None) -> int:
    """Run one command. Its exit code: 0 done, 1 it failed, 2 wrong input, 3 incomplete; doctor has its own."""
    from nixl_tiers.cli.app import run  # here, as `nixl_tiers.cli.gds` works without what the commands need

    return run(sys.argv[1:] if given is None else given)
