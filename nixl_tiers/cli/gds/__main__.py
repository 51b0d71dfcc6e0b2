"""`python -m nixl_tiers.cli.gds DIR`: `nixl-tiers doctor --gds DIR` with nothing but the standard library."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from nixl_tiers.cli.gds.report import NotUsable, examine

parser = argparse.ArgumentParser(prog="python -m nixl_tiers.cli.gds", description=__doc__)
parser.add_argument("directory", type=Path, metavar="DIR")
parser.add_argument("--gpu", type=int, default=0, help="the GPU's ordinal (default: 0)")
parser.add_argument("--json", action="store_true", help="everything that was found, as JSON")
chosen = parser.parse_args()
try:
    sys.exit(examine(chosen.directory, chosen.gpu, as_json=chosen.json))
except NotUsable as error:
    parser.exit(2, f"nixl-tiers: {error}\n")
