"""Runs every property test with fresh random examples, for a given time.

    python tests/fuzz.py --minutes 10            prints the seed of every round
    python tests/fuzz.py --seed 1234 --rounds 1  the same examples again

A round runs the state machine over the core, the models of the eviction policies, and the fuzzers of seal and shared
table, with one seed for all. The first failure ends it; hypothesis keeps the shrunk example in .hypothesis, so that
`make test` fails with it until it is mended.
"""

from __future__ import annotations

import argparse
import secrets
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
FUZZED = [
    "tests/cascade/test_stateful.py",
    "tests/cascade/test_eviction.py",
    "tests/cascade/test_eviction_batches.py",
    "tests/memory/test_seal.py",
    "tests/memory/test_cold_index.py",
    "tests/config/test_schema.py",
]


def main(arguments: list[str] | None = None) -> int:
    """0 when the time or the rounds are up, else pytest's status."""
    parser = argparse.ArgumentParser(description="property tests with fresh seeds")
    parser.add_argument("--minutes", type=float, default=10.0, help="begin no round after this time (default 10)")
    parser.add_argument("--seed", type=int, help="of the first round; the next ones count up (default: drawn)")
    parser.add_argument("--rounds", type=int, help="end after this many rounds")
    parser.add_argument("tests", nargs="*", help="files of tests, or anything else that pytest takes (default: all)")
    options = parser.parse_args(arguments)
    first = secrets.randbits(31) if options.seed is None else options.seed
    deadline = time.monotonic() + 60 * options.minutes
    done = 0
    while time.monotonic() < deadline and (options.rounds is None or done < options.rounds):
        seed = first + done
        print(f"round {done + 1}, seed {seed}", flush=True)
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", f"--hypothesis-seed={seed}"]
        status = subprocess.run([*command, *(options.tests or FUZZED)], cwd=ROOT, check=False).returncode
        if status:
            print(f"failed; the same again: python tests/fuzz.py --seed {seed} --rounds 1", flush=True)
            return status
        done += 1
    print(f"{done} rounds without a failure, seeds {first} to {first + done - 1}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
