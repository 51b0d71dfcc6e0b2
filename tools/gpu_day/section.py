"""One section, in a process of its own: `python -m tools.gpu_day.section MODULE DESCRIPTOR LIMIT_S`."""

from __future__ import annotations

import faulthandler
import importlib
import os
import sys
from typing import Any

from nixl_tiers.base.native import NotBuilt
from nixl_tiers.swap.driver import NoDriver
from tools.gpu_day.here import Here, Skip


def main() -> None:
    module, descriptor, limit_s = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
    absent: Any = None
    sys.modules["vllm"] = absent  # whatever imports it fails
    faulthandler.enable()
    faulthandler.dump_traceback_later(max(0.5, limit_s - 2))  # into the log, shortly before it is killed
    here = Here(descriptor, limit_s)
    try:
        importlib.import_module(module).run(here)
        if "gpu" in vars(here):
            here.gpu.check()
    except (Skip, NoDriver, NotBuilt, ModuleNotFoundError) as why:
        here.say("skipped", "", str(why))
    sys.stdout.flush()
    os._exit(0)  # destructors of cuFile and its threads have crashed


if __name__ == "__main__":
    main()
