"""What a directory lies on: its mount, file system, block device, RAID, multipathing, drives and udev record."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from nixl_tiers.cli.gds.files import line_of, text_of

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
    pattern = r"[0-9a-f]{4,}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]"
    found = re.findall(pattern, str(block))
    if not found:
        for controller in sorted(block.parent.glob("nvme[0-9]*")):
            found += re.findall(pattern, str(controller.resolve()))
    return found[-1] if found else ""


def _unescaped(text: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)
