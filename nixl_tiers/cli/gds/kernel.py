"""What the kernel has for GPUDirect Storage: nvidia-fs or PCI P2PDMA, and the IOMMU. Reads text below a root directory.

The two ways are counted differently. nvidia-fs counts I/O of the whole machine in /proc/driver/nvidia-fs/stats, if its
statistics are enabled. P2PDMA is part of the kernel, which counts nothing: only cuFile's own statistics show it.
"""

from __future__ import annotations

import gzip
import platform
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from nixl_tiers.cli.gds.files import text_of

_NVIDIA_FS: Final = "proc/driver/nvidia-fs"
_P2PDMA_SYMBOL: Final = b"p2pdma_pgmap_ops"  # the one that NVIDIA's guide looks for
_STATIC_BAR1: Final = re.compile(r"RMForceStaticBar1\s*=\s*1", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class NvidiaFs:
    """The module nvidia-fs. Reads and writes are those of the machine since it was loaded, None if they are not
    counted (`rw_stats_enabled=0`, its default)."""

    version: str
    reads: int | None
    writes: int | None
    modules: tuple[str, ...]
    """Storage drivers and file systems that have registered with it."""


@dataclass(frozen=True, slots=True)
class P2pDma:
    """What PCI P2PDMA needs of the kernel and of NVIDIA's driver."""

    kernel: bool | None
    """Built with CONFIG_PCI_P2PDMA; None if that cannot be read."""
    static_bar1: bool | None
    """NVIDIA's driver was loaded with RMForceStaticBar1=1, which x86 needs; None without that driver."""
    nvme_multipath: bool | None
    """Native multipathing of NVMe, with which P2PDMA does not work; None without NVMe."""


def nvidia_fs(root: Path) -> NvidiaFs | None:
    """None where the module is not loaded."""
    version = text_of(root / _NVIDIA_FS / "version")
    if version is None:
        return None
    number = re.search(r"\d+(?:[.:]\d+)+", version)
    reads, writes = io_counts(text_of(root / _NVIDIA_FS / "stats") or "")
    modules = (text_of(root / _NVIDIA_FS / "modules") or "").split("\n")
    return NvidiaFs(
        number[0].replace(":", ".") if number else version.strip(),
        reads,
        writes,
        tuple(line.split()[0].rstrip(":") for line in modules if line.strip()),
    )


def io_counts(stats: str) -> tuple[int | None, int | None]:
    """Successful reads and writes of /proc/driver/nvidia-fs/stats, None where they are not counted."""
    found = (re.search(rf"^{kind}\s*:\s*n=\d+\s+ok=(\d+)", stats, re.MULTILINE) for kind in ("Reads", "Writes"))
    reads, writes = (int(match[1]) if match else None for match in found)
    return reads, writes


def p2pdma(root: Path) -> P2pDma:
    parameters = text_of(root / "proc/driver/nvidia/params")
    multipath = text_of(root / "sys/module/nvme_core/parameters/multipath")
    return P2pDma(
        _has_p2pdma(root),
        None if parameters is None else bool(_STATIC_BAR1.search(parameters)),
        None if multipath is None else multipath.strip() == "Y",
    )


def iommu(root: Path, pci_address: str) -> str:
    """ "off", "passthrough" or "translating", for one PCI device.

    A translating IOMMU sends what a drive writes to a GPU through the root complex, or stops it.
    """
    kind = text_of(root / "sys/bus/pci/devices" / pci_address / "iommu_group/type")
    if kind is None:
        return "off"
    return "passthrough" if kind.strip() == "identity" else "translating"


def _has_p2pdma(root: Path) -> bool | None:
    for config in (root / "proc/config.gz", root / f"boot/config-{platform.release()}"):
        try:
            raw = config.read_bytes()
            text = gzip.decompress(raw) if config.suffix == ".gz" else raw
        except OSError:
            continue
        return b"CONFIG_PCI_P2PDMA=y" in text
    try:
        with (root / "proc/kallsyms").open("rb") as symbols:
            return any(_P2PDMA_SYMBOL in line for line in symbols)
    except OSError:
        return None
