"""Runs every property test with fresh random examples, for a given time.

    python tests/fuzz.py --minutes 10            prints the seed of each round
    python tests/fuzz.py --seed 1234 --rounds 1  the same examples again

A round runs the state machine of the core, the model of the tables of rows, and the fuzzers of
seal and configuration, all with one seed. It ends with the first failure; hypothesis keeps the shrunk example in
.hypothesis, and the next run begins with it. `make test` draws the same examples each time, not these: what was found
becomes a test.
"""

from __future__ import annotations

import argparse
import os
import secrets
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
FUZZED = [
    "tests/core/test_stateful.py",
    "tests/core/test_tier_rows.py",
    "tests/core/test_announced.py",
    "tests/memory/test_seal.py",
    "tests/config/test_schema.py",
    "tests/tiers/s3/test_record.py",
    "tests/tiers/slab/test_journal_model.py::TestJournal",
    "tests/tiers/slab/test_parts.py",
]


def main(arguments: list[str] | None = None) -> int:
    """0 when the time or the rounds are up, else pytest's status."""
    parser = argparse.ArgumentParser(description="property tests with fresh seeds")
    parser.add_argument("--minutes", type=float, default=10.0, help="start no round after this time (default 10)")
    parser.add_argument("--seed", type=int, help="of the first round, counted up by the next ones (default: random)")
    parser.add_argument("--rounds", type=int, help="end after this many rounds")
    parser.add_argument(
        "tests", nargs="*", help="test files or other arguments of pytest (default: all property tests)"
    )
    options = parser.parse_args(arguments)
    first = secrets.randbits(31) if options.seed is None else options.seed
    deadline = time.monotonic() + 60 * options.minutes
    done = 0
    while time.monotonic() < deadline and (options.rounds is None or done < options.rounds):
        seed = first + done
        print(f"round {done + 1}, seed {seed}", flush=True)
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", f"--hypothesis-seed={seed}"]
        command += options.tests or FUZZED
        env = {**os.environ, "NIXL_TIERS_FUZZ": "1"}  # by the seed, and more of them: tests/support/replay.py
        status = subprocess.run(command, cwd=ROOT, env=env, check=False).returncode
        if status:
            print(f"failed; to repeat: python tests/fuzz.py --seed {seed} --rounds 1", flush=True)
            return status
        done += 1
    print(f"{done} rounds without a failure, seeds {first} to {first + done - 1}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
