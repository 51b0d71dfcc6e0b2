"""What /proc, /sys and udev's database say: what a directory lies on, where PCI devices are, and which direct ways from
drive to GPU the kernel has. Text below a root directory, which may be missing or unreadable.

The two ways are counted differently. nvidia-fs counts I/O of the whole machine in /proc/driver/nvidia-fs/stats, if its
statistics are enabled. P2PDMA is part of the kernel, which counts nothing: only cuFile's own statistics show it.
"""

from __future__ import annotations

import gzip
import os
import platform
import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final


def text_of(path: Path) -> str | None:
    """None where it cannot be read."""
    try:
        return path.read_text(errors="replace")
    except OSError:
        return None


def line_of(path: Path) -> str:
    """Without spaces around it; "" where it cannot be read."""
    return (text_of(path) or "").strip()


# --- what a directory lies on -----------------------------------------------------------------------------------------


DIRECT: Final = frozenset({"ext4", "xfs", "nfs", "nfs4", "lustre", "wekafs", "gpfs", "beegfs", "scatefs", "virtiofs"})
"""File systems that cuFile can move data of directly, if they are set up for it."""

_NO_DEVICE: Final = "0"  # major number of file systems without a block device


@dataclass(frozen=True, slots=True)
class Mount:
    point: str
    kind: str
    source: str
    options: str
    device: str
    """major:minor"""


@dataclass(frozen=True, slots=True)
class Drive:
    """A physical (or virtual) drive at the end of the chain. `pci` is "" if it is not on PCI."""

    name: str
    pci: str


@dataclass(frozen=True, slots=True)
class Storage:
    mount: Mount
    layers: tuple[str, ...]
    """From the file system down: "partition nvme0n1p1", "md raid0 md0", "device mapper LVM vg-kv"."""
    drives: tuple[Drive, ...]
    raid: str
    """Level of an md array below the file system, or ""."""
    mapped: bool
    """The device mapper is in between."""
    multipath: bool
    udev: dict[str, str] | None
    """The device's udev record; None if there is none."""


def storage_of(root: Path, directory: Path, device: int) -> Storage | None:
    """`device`: st_dev of the directory. None if its mount is not listed."""
    number = f"{os.major(device)}:{os.minor(device)}"
    mount = find_mount((root / "proc/self/mountinfo").read_text(), str(directory), number)
    if mount is None:
        return None
    layers: list[str] = []
    drives: dict[str, Drive] = {}
    if not mount.device.startswith(_NO_DEVICE + ":"):
        for layer, drive in _descend(root, root / "sys/dev/block" / mount.device):
            layers.append(layer)
            if drive:
                drives[drive.name] = drive
    text = " ".join(layers)
    raid = re.search(r"md (\S+)", text)
    return Storage(
        mount,
        tuple(dict.fromkeys(layers)),
        tuple(drives.values()),
        raid[1] if raid else "",
        "device mapper" in text,
        "multipath" in text,
        udev_record(root, mount.device),
    )


def find_mount(mountinfo: str, directory: str, device: str) -> Mount | None:
    """The mount that a directory is on: the last one with the longest path above it, and its device if one has that.

    `device` decides between mounts, because a directory can be bind-mounted anywhere; file systems such as btrfs report
    a device that is listed nowhere, and then the path decides.
    """
    mounts = []
    for line in mountinfo.splitlines():
        before, _, after = line.partition(" - ")
        fields, rest = before.split(), after.split()
        if len(fields) < 6 or len(rest) < 3:
            continue
        point = _unescaped(fields[4])
        if directory == point or directory.startswith(point.rstrip("/") + "/"):
            mounts.append(Mount(point, rest[0], _unescaped(rest[1]), f"{fields[5]},{rest[2]}", fields[2]))
    same = [mount for mount in mounts if mount.device == device] or mounts
    return max(reversed(same), key=lambda mount: len(mount.point), default=None)


def udev_record(root: Path, device: str) -> dict[str, str] | None:
    """Properties of a block device in udev's database. cuFile registers no file of a block device whose record lacks
    ID_FS_USAGE or ID_FS_TYPE (error 5027), and in a container /run/udev is usually missing."""
    text = text_of(root / f"run/udev/data/b{device}")
    if text is None:
        return None
    pairs = (entry[2:].partition("=") for entry in text.splitlines() if entry.startswith("E:"))
    return {name: value for name, _, value in pairs}


def _descend(root: Path, block: Path) -> Iterator[tuple[str, Drive | None]]:
    """Layers from a block device down, each with the drive that it is, if it is one."""
    try:
        here = block.resolve(strict=True)
    except OSError:
        return
    if (here / "partition").exists():
        yield f"partition {here.name}", None
        here = here.parent
    name = here.name
    if level := line_of(here / "md/level"):
        yield f"md {level} {name}", None
    elif (mapped := line_of(here / "dm/uuid")) or (here / "dm").exists():
        kind = "multipath" if mapped.startswith("mpath-") else mapped.partition("-")[0] or "table"
        yield f"device mapper {kind} {line_of(here / 'dm/name') or name}", None
    else:
        address = _pci_address(here)
        multipath = "nvme-subsystem" in str(here)
        yield f"{'NVMe multipath ' if multipath else 'drive '}{name}", Drive(name, address)
        return
    for slave in sorted((here / "slaves").glob("*")):
        yield from _descend(root, slave)


def _pci_address(block: Path) -> str:
    """Of the drive's controller. With multipathing of NVMe the namespace hangs below a subsystem, and its controllers
    are links beside it; the first is taken."""
    found = _ADDRESS.findall(str(block))
    if not found:
        for controller in sorted(block.parent.glob("nvme[0-9]*")):
            found += _ADDRESS.findall(str(controller.resolve()))
    return found[-1] if found else ""


def _unescaped(text: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)


# --- PCI devices ------------------------------------------------------------------------------------------------------


_ADDRESS: Final = re.compile(r"[0-9a-f]{4,}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")
_HOST_BRIDGE: Final = re.compile(r"pci[0-9a-f]{4,}:[0-9a-f]{2}")

_EXTENDED: Final = 0x100  # where extended capabilities begin; only root can read so far
_ACS: Final = 0x000D
_REDIRECT: Final = 0x04 | 0x08 | 0x10  # P2P request redirect, P2P completion redirect, upstream forwarding

DISTANCES: Final = {
    "PIX": "at most one PCIe bridge between them",
    "PXB": "several PCIe bridges between them, not the host's",
    "PHB": "across the processor's host bridge",
    "NODE": "across host bridges of one NUMA node",
    "SYS": "across NUMA nodes",
}


@dataclass(frozen=True, slots=True)
class PciDevice:
    """A PCI device by its place in the tree: the host bridge, the bridges from the top, and the device."""

    address: str
    host_bridge: str
    chain: tuple[str, ...]
    """Addresses from the root port to the device."""
    node: int | None
    link: str
    """Speed and width of its link, such as "32.0 GT/s x4"; "" if unknown."""


def pci_device(root: Path, address: str) -> PciDevice | None:
    """None if there is no such device, or it has no place in the tree of PCI."""
    here = root / "sys/bus/pci/devices" / address
    try:
        parts = here.resolve(strict=True).parts
    except OSError:
        return None
    host = next((part for part in parts if _HOST_BRIDGE.fullmatch(part)), "")
    chain = tuple(part for part in parts if _ADDRESS.fullmatch(part))
    if not chain or chain[-1] != address:
        return None
    speed, width = line_of(here / "current_link_speed").removesuffix(" PCIe"), line_of(here / "current_link_width")
    node = line_of(here / "numa_node")
    link = f"{speed} x{width}" if speed and width and "nknown" not in speed else ""
    return PciDevice(address, host, chain, int(node) if node.isdigit() else None, link)


def pci_distance(one: PciDevice, other: PciDevice) -> str:
    """A key of DISTANCES: the words of `nvidia-smi topo -m`."""
    if one.host_bridge != other.host_bridge:
        return "NODE" if one.node == other.node else "SYS"
    common = _common(one, other)
    if not common:
        return "PHB"
    # A switch is one bridge upwards and one for each of its ports downwards: devices on two ports of one switch have
    # three bridges between them, and that is what nvidia-smi calls a single one.
    apart = max(len(one.chain), len(other.chain)) - common
    return "PIX" if apart <= 2 else "PXB"


def bridges_between(one: PciDevice, other: PciDevice) -> tuple[str, ...]:
    """Bridges below the nearest that both have, and that one itself."""
    common = _common(one, other)
    shared = one.chain[common - 1 : common] if common else ()
    return (*shared, *one.chain[common:-1], *other.chain[common:-1])


def acs_redirects(config: bytes) -> bool | None:
    """Whether a bridge sends peer-to-peer traffic up to the root complex (ACS), by its configuration space.

    None if the extended part was not readable (it needs root). False where there is no such capability.
    """
    at = _EXTENDED
    if len(config) < at + 4:
        return None
    seen = set()
    while at and at not in seen and at + 8 <= len(config):
        seen.add(at)
        (header,) = struct.unpack_from("<I", config, at)
        if header & 0xFFFF == _ACS:
            (control,) = struct.unpack_from("<H", config, at + 6)
            return bool(control & _REDIRECT)
        at = header >> 20
    return False


def redirecting(root: Path, bridges: tuple[str, ...]) -> tuple[str, ...] | None:
    """Which of the bridges redirect peer-to-peer traffic; None if that cannot be read."""
    found = []
    for address in bridges:
        try:
            config = (root / "sys/bus/pci/devices" / address / "config").read_bytes()
        except OSError:
            return None
        state = acs_redirects(config)
        if state is None:
            return None
        if state:
            found.append(address)
    return tuple(found)


def bar1_bytes(root: Path, address: str) -> int | None:
    """Size of a GPU's largest memory window, which is BAR1: all of its memory must fit for P2PDMA."""
    try:
        lines = (root / "sys/bus/pci/devices" / address / "resource").read_text().splitlines()
    except OSError:
        return None
    sizes = []
    for line in lines[:6]:  # BAR0 to BAR5
        start, end, _ = (int(word, 16) for word in line.split())
        sizes.append(end - start + 1 if end else 0)
    return max(sizes, default=0)


def _common(one: PciDevice, other: PciDevice) -> int:
    """How many bridges from the top both have."""
    pairs = zip(one.chain[:-1], other.chain[:-1], strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(one.chain), len(other.chain)) - 1)


# --- the kernel: nvidia-fs, PCI P2PDMA, the IOMMU ---------------------------------------------------------------------


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
