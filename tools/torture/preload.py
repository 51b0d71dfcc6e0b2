"""What the fork server of engines, and of LMCache's servers, imports once: no thread may have started."""

from __future__ import annotations

import importlib
from importlib.util import find_spec

from demo import vllm_cpu
from tools.torture.engine import IMPORTED, IMPORTED_LMCACHE

vllm_cpu.supply_metadata()
for _module in [*IMPORTED, *(IMPORTED_LMCACHE if find_spec("lmcache") else ())]:
    importlib.import_module(_module)
