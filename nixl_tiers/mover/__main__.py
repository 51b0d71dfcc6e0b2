"""`python -m nixl_tiers.mover`: started by the engine process for each storage tier, not by people."""

from __future__ import annotations

import argparse
import os
import signal
import sys


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m nixl_tiers.mover", description=__doc__)
    parser.add_argument("--socket", type=int, required=True, help="descriptor of our end of the socketpair")
    parser.add_argument("--region", type=int, required=True, help="descriptor of the host region's memfd")
    parser.add_argument("--parent", type=int, required=True, help="process whose death ends this one")
    arguments = parser.parse_args()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the engine's to handle
    # NIXL logs several lines for every row that fails, and not why. The tiers say what went wrong, once.
    os.environ.setdefault("NIXL_LOG_LEVEL", "FATAL")
    # Read by the AWS SDK when it is loaded: a dead endpoint then fails within a second, not half a minute.
    os.environ.setdefault("AWS_RETRY_MODE", "standard")
    os.environ.setdefault("AWS_MAX_ATTEMPTS", "2")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # NIXL logs to stdout, which is the engine's

    from nixl_tiers.mover.process import run  # after the environment is set

    run(arguments.socket, arguments.region, arguments.parent)


if __name__ == "__main__":
    main()
