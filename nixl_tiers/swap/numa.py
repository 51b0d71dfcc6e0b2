"""Host memory on the GPU's side of the machine: a copy across sockets is slower, and takes bandwidth from others."""

from __future__ import annotations

import ctypes
import platform
from pathlib import Path
from typing import Final

_SYSFS: Final = Path("/sys/bus/pci/devices")
_MBIND: Final = {"x86_64": 237, "aarch64": 235}
_PREFERRED: Final = 1  # MPOL_PREFERRED: elsewhere rather than not at all
_MAX_NODES: Final = 1024


def node_of(pci_address: str, sysfs: Path = _SYSFS) -> int | None:
    """The NUMA node of a PCI device, or None if the machine has one node only, or does not report it."""
    try:
        node = int((sysfs / pci_address / "numa_node").read_text())
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None


def prefer(address: int, nbytes: int, node: int) -> bool:
    """Ask for pages of [address, address + nbytes) on `node`, unless they were touched already; page-aligned address.

    False where the kernel refuses: placement is speed, not correctness.
    """
    number = _MBIND.get(platform.machine())
    if number is None or not 0 <= node < _MAX_NODES:
        return False
    mask = (ctypes.c_ulong * (_MAX_NODES // 64))()
    mask[node // 64] = 1 << node % 64
    call = ctypes.CDLL(None, use_errno=True).syscall
    arguments = (ctypes.c_ulong(nbytes), ctypes.c_ulong(_PREFERRED), mask, ctypes.c_ulong(_MAX_NODES + 1))
    return int(call(ctypes.c_long(number), ctypes.c_void_p(address), *arguments, ctypes.c_ulong(0))) == 0
