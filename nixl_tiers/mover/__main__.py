"""The program of a mover process: started by the engine for each storage tier, not by people.

The engine runs this very file (`python -P .../nixl_tiers/mover/__main__.py`, see child.py), so that nothing is imported
from wherever the engine happens to be started: a mover has the engine's credentials.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import signal
import sys
from pathlib import Path


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

    from nixl_tiers.mover.loop import run  # after the environment is set

    run(arguments.socket, arguments.region, arguments.parent)


def import_own_package() -> None:
    """Have `nixl_tiers` be the package that this file belongs to, which is the engine's.

    The engine may have it from a path that Python does not know by itself; then its dependencies may lie there too, and
    that path is searched last. Another copy that Python does know (a checkout beside an installed version) would speak
    another protocol.
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
