"""Host memory on the GPUs' side of the machine: a copy across sockets is slower, and takes bandwidth from others."""

from __future__ import annotations

import ctypes
import platform
from collections.abc import Collection
from pathlib import Path
from typing import Final

_SYSFS: Final = Path("/sys/bus/pci/devices")
_MBIND: Final = {"x86_64": 237, "aarch64": 235}
_PREFERRED: Final = 1  # MPOL_PREFERRED: elsewhere rather than not at all
_INTERLEAVE: Final = 3  # MPOL_INTERLEAVE: page by page
_MAX_NODES: Final = 1024


def node_of(pci_address: str, sysfs: Path = _SYSFS) -> int | None:
    """The NUMA node of a PCI device, or None if the machine has one node only, or does not report it."""
    try:
        node = int((sysfs / pci_address / "numa_node").read_text())
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None


def place(address: int, nbytes: int, nodes: Collection[int]) -> bool:
    """Ask for pages of [address, address + nbytes) on one node, or interleaved over several, unless they were touched
    already; page-aligned address. Of shared memory this holds for all processes.

    False where the kernel refuses: placement is speed, not correctness.
    """
    number = _MBIND.get(platform.machine())
    if number is None or not nodes or not all(0 <= node < _MAX_NODES for node in nodes):
        return False
    mask = (ctypes.c_ulong * (_MAX_NODES // 64))()
    for node in nodes:
        mask[node // 64] |= 1 << node % 64
    call = ctypes.CDLL(None, use_errno=True).syscall
    mode = _PREFERRED if len(nodes) == 1 else _INTERLEAVE
    arguments = (ctypes.c_ulong(nbytes), ctypes.c_ulong(mode), mask, ctypes.c_ulong(_MAX_NODES + 1))
    return int(call(ctypes.c_long(number), ctypes.c_void_p(address), *arguments, ctypes.c_ulong(0))) == 0
