"""What the machine has, as far as files of /proc, /sys and /run say it: one line a thing, with a warning where cuFile
is known not to move data directly."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

from nixl_tiers.cli.gds import sysfs

Status = Literal["ok", "warning", "unavailable", "not tried"]
_GIB: Final = 1 << 30
_UDEV_NEEDED: Final = ("ID_FS_USAGE", "ID_FS_TYPE")


@dataclass(frozen=True, slots=True)
class Check:
    """One line of the report."""

    name: str
    status: Status
    text: str
    details: dict[str, Any] = field(default_factory=dict)


def facts(root: Path, directory: Path, gpu: Mapping[str, Any] | None) -> Iterator[Check]:
    """`gpu`: a finding of the step `gpus`, or None without one."""
    found = sysfs.storage_of(root, directory, directory.stat().st_dev)
    if found is None:
        yield Check("storage", "warning", f"the mount of {directory} is not listed in /proc/self/mountinfo")
    else:
        yield _storage(found)
        yield _udev(found)
    yield _nvidia_fs(root)
    yield _p2pdma(root)
    if gpu is None:
        return
    here = sysfs.pci_device(root, gpu["address"])
    yield _window(root, gpu, here)
    for drive in found.drives if found else ():
        yield _distance(root, drive, here)


def _storage(found: sysfs.Storage) -> Check:
    problems = []
    if found.mount.kind not in sysfs.DIRECT:
        problems.append(f"cuFile does not move data of {found.mount.kind} directly")
    if "data=journal" in found.mount.options:
        problems.append("ext4 must be mounted with data=ordered")
    if found.raid and found.raid != "raid0":
        problems.append(f"{found.raid} is not moved directly, raid0 is")
    if found.mapped:
        problems.append("the device mapper (LVM, encryption, multipath) is in between")
    elif found.multipath:
        problems.append("NVMe multipathing is on, with which P2PDMA does not work")
    layers = " > ".join((found.mount.kind, *found.layers)) if found.layers else found.mount.kind
    text = "; ".join((f"{layers}, mounted at {found.mount.point}", *problems))
    return Check("storage", "warning" if problems else "ok", text, asdict(found))


def _udev(found: sysfs.Storage) -> Check:
    if not found.layers:
        return Check("udev", "ok", "not needed: the file system has no block device")
    missing = [name for name in _UDEV_NEEDED if not (found.udev or {}).get(name)]
    if not missing:
        kind = (found.udev or {})["ID_FS_TYPE"]
        return Check("udev", "ok", f"the record of {found.mount.device} has what cuFile asks for ({kind})")
    why = "there is no record" if found.udev is None else f"{' and '.join(missing)} missing in the record"
    return Check(
        "udev",
        "warning",
        f"{why} of {found.mount.device}: cuFile will refuse files (error 5027); in a container, mount /run/udev",
    )


def _nvidia_fs(root: Path) -> Check:
    found = sysfs.nvidia_fs(root)
    if found is None:
        spins = "; /proc/modules is missing, and without it the driver of cuFile 1.20 never opens"
        listed = (root / "proc/modules").exists()
        return Check("nvidia-fs", "unavailable", f"the module is not loaded{'' if listed else spins}")
    counted = "counts I/O" if found.reads is not None else "does not count I/O (rw_stats_enabled=0)"
    drivers = f"; registered: {', '.join(found.modules)}" if found.modules else ""
    return Check("nvidia-fs", "ok", f"{found.version}, {counted}{drivers}", asdict(found))


def _p2pdma(root: Path) -> Check:
    found = sysfs.p2pdma(root)
    missing = []
    if not found.kernel:
        missing.append("the kernel is built without it" if found.kernel is False else "the kernel does not say")
    if not found.static_bar1:
        missing.append(
            "NVIDIA's driver is not loaded"
            if found.static_bar1 is None
            else "NVIDIA's driver is loaded without RMForceStaticBar1=1"
        )
    if found.nvme_multipath:
        missing.append("NVMe multipathing is on (nvme_core.multipath=N turns it off)")
    text = "; ".join(missing) or "the kernel and NVIDIA's driver are set up for it"
    return Check("PCI P2PDMA", "unavailable" if missing else "ok", text, asdict(found))


def _window(root: Path, gpu: Mapping[str, Any], here: sysfs.PciDevice | None) -> Check:
    bar1, translated = sysfs.bar1_bytes(root, gpu["address"]), sysfs.iommu(root, gpu["address"])
    window = "" if not bar1 else f", BAR1 {bar1 / _GIB:.3g} GiB"
    link = f", {here.link}" if here and here.link else ""
    node = f", NUMA node {here.node}" if here and here.node is not None else ""
    return Check(
        f"GPU {gpu['gpu']}",
        "warning" if translated == "translating" else "ok",
        f"{gpu['name']} at {gpu['address']}{link}{node}{window}, IOMMU {translated}",
        {**gpu, "bar1_bytes": bar1, "iommu": translated, "place": asdict(here) if here else None},
    )


def _distance(root: Path, drive: sysfs.Drive, gpu: sysfs.PciDevice | None) -> Check:
    name = f"GPU to {drive.name}"
    there = sysfs.pci_device(root, drive.pci) if drive.pci else None
    if gpu is None or there is None:
        return Check(name, "warning", "one of them is not on PCI, as far as /sys shows", {"drive": asdict(drive)})
    far = sysfs.pci_distance(there, gpu)
    redirecting = sysfs.redirecting(root, sysfs.bridges_between(there, gpu))
    if redirecting is None:
        acs = "ACS unknown (only root can read it)" if os.geteuid() else "ACS unknown"
    else:
        acs = f"ACS redirects at {', '.join(redirecting)}" if redirecting else "ACS does not redirect"
    link = f", drive {there.link}" if there.link else ""
    details = {"drive": asdict(there), "distance": far, "acs_redirects": redirecting}
    warned = far in ("NODE", "SYS") or bool(redirecting)
    return Check(name, "warning" if warned else "ok", f"{far}, {sysfs.DISTANCES[far]}{link}; {acs}", details)
