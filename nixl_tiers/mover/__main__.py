"""The program of a mover process: started by the scheduler's process for each storage tier, not by people.

It is run as a file (`python -P .../nixl_tiers/mover/__main__.py`, see child.py), so that nothing is imported from the
working directory of the scheduler's process: a mover has that process's credentials.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import signal
import sys
from pathlib import Path

LOOK = "--look"
"""Be the child that looks at what this machine has for a configuration (`runtime/here.py`)."""


def main() -> None:
    if sys.argv[1:] == [LOOK]:
        from nixl_tiers.config import here

        here.main()
    parser = argparse.ArgumentParser(prog="python -m nixl_tiers.mover", description=__doc__)
    parser.add_argument("--tier", required=True, help="which tier it serves, for who looks at processes")
    parser.add_argument("--socket", type=int, required=True, help="descriptor of the mover's end of the socketpair")
    parser.add_argument("--region", type=int, required=True, help="descriptor of the host region's memfd")
    parser.add_argument("--mark", type=int, required=True, help="descriptor that marks the mover's address space")
    parser.add_argument("--parent", type=int, required=True, help="process whose death ends this one")
    arguments = parser.parse_args()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is handled by the scheduler's process
    # NIXL logs several lines for each row that fails, without the reason. The tiers log the reason, once.
    os.environ.setdefault("NIXL_LOG_LEVEL", "FATAL")
    # Read by the AWS SDK when it is loaded: a dead endpoint then fails within a second, not half a minute.
    os.environ.setdefault("AWS_RETRY_MODE", "standard")
    os.environ.setdefault("AWS_MAX_ATTEMPTS", "2")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # NIXL logs to stdout, which belongs to the scheduler

    from nixl_tiers.mover.process import run  # after the environment is set

    run(arguments.socket, arguments.region, arguments.mark, arguments.parent)


def import_own_package() -> None:
    """Import `nixl_tiers` from the package that this file belongs to, which is that of the scheduler's process.

    That process may have found it on a path that Python does not search by default; its dependencies may lie there
    too, so that path is searched last. Another copy that Python does find by default (a checkout beside an installed
    version) could use another version of the protocol.
    """
    package = Path(__file__).absolute().parents[1]
    if importlib.util.find_spec(package.name) is None:
        sys.path.append(str(package.parent))
    spec = importlib.util.spec_from_file_location(
        package.name, package / "__init__.py", submodule_search_locations=[str(package)]
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[package.name] = module
    spec.loader.exec_module(module)


if __name__ == "__main__":
    if __spec__ is None:  # run as a file; with -m, Python has found the package
        import_own_package()
    main()
