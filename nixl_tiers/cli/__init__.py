"""The command line: `nixl-tiers COMMAND ...`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from nixl_tiers.config.schema import ConfigError

BAD_INPUT: Final = 2
_CODES: Final = (
    "Exit code: 0 if it is valid, with or without warnings; 2 if it is refused, with one sentence on stderr. Nothing "
    "is created, and no server is contacted."
)


def arguments() -> argparse.ArgumentParser:
    """The parser of all commands."""
    parser = argparse.ArgumentParser(prog="nixl-tiers", description="KV cache beyond GPU memory.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    config = commands.add_parser(
        "config",
        help="check a configuration and say what it means",
        description="Check a configuration, and print every field with its value and warnings about likely mistakes.",
        epilog=_CODES,
    )
    config.add_argument(
        "file", help="a .json, .yaml or .yml file, or JSON text; may be what --kv-transfer-config takes"
    )

    demo = commands.add_parser(
        "demo",
        help="a real vLLM server, and a hit from every tier",
        description="Start a vLLM server on a small model and time one prompt: computed, then a hit from every tier.",
    )
    demo.add_argument("--out", type=Path, default=Path("demo-out"), help="where results go (default: demo-out)")
    demo.add_argument("--prompt-tokens", type=int, default=6032, help="length of the prompt (default: 6032)")

    doctor = "what this machine has for copies between GPU and host"
    commands.add_parser("doctor", help=doctor, description=f"Show {doctor}.")

    return parser


def main(given: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code: 0 done, 1 it failed, 2 the input is wrong."""
    chosen = arguments().parse_args(given)
    try:
        if chosen.command == "config":
            from nixl_tiers.cli.config import check

            return check(chosen.file)
        if chosen.command == "doctor":
            from nixl_tiers.cli.doctor import examine

            return examine()
        from nixl_tiers.demo.run import run

        return run(chosen.out, chosen.prompt_tokens)
    except ConfigError as error:
        print(f"nixl-tiers: {error}", file=sys.stderr)
        return BAD_INPUT
