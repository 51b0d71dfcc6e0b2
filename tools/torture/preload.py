"""What the engines' fork server imports once: no thread may have started."""

from __future__ import annotations

import importlib

from tests.support import vllm_cpu
from tools.torture.engine import IMPORTED

vllm_cpu.supply_metadata()
for _module in IMPORTED:
    importlib.import_module(f"vllm.{_module}")
