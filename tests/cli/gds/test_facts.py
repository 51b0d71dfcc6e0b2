"""The readers of /proc, /sys and udev's records, on made-up trees."""

from __future__ import annotations

import gzip
import platform
import struct
from collections.abc import Mapping
from pathlib import Path

import pytest

from nixl_tiers.cli.gds import sysfs
from nixl_tiers.cli.gds.facts import Check, facts

STATS = """GDS Version: 1.10.0.4
NVFS statistics(ver: 4.0)
NVFS Driver(version: 2.20.5)
IO stats: Enabled, peer IO stats: Enabled

Active Shadow-Buffer (MiB): 0
Batches\t\t\t\t: n=0 ok=0 err=0 Avg-Submit-Latency(usec)=0
Reads\t\t\t\t: n=12 ok=11 err=1 readMiB=3 io_state_err=0
Reads\t\t\t\t: Bandwidth(MiB/s)=0 Avg-Latency(usec)=0
Sparse Reads\t\t        : n=6 io=0 holes=0 pages=0
Writes\t\t\t\t: n=8 ok=8 err=0 writeMiB=2 io_state_err=0 pg-cache=0 pg-cache-fail=0 pg-cache-eio=0
Ops\t\t\t\t: Read=0 Write=0 BatchIO=0
"""
STATS_OFF = """IO stats: Disabled, peer IO stats: Enabled
Reads                           : err=0 io_state_err=0
Sparse Reads                    : n=0 io=0 holes=0 pages=0
Writes                          : err=0 io_state_err=0 pg-cache=0 pg-cache-fail=0 pg-cache-eio=0
"""
GPU, DRIVE, FAR = "0000:1b:00.0", "0000:1c:00.0", "0000:c1:00.0"
SWITCH = "pci0000:17/0000:17:01.0/0000:18:00.0"
PLACES = {
    GPU: f"{SWITCH}/0000:19:00.0/{GPU}",
    DRIVE: f"{SWITCH}/0000:19:04.0/{DRIVE}",
    "0000:1f:00.0": f"{SWITCH}/0000:19:08.0/0000:1d:00.0/0000:1e:00.0/0000:1f:00.0",
    "0000:20:00.0": "pci0000:17/0000:17:03.0/0000:20:00.0",
    FAR: f"pci0000:c0/0000:c0:01.0/{FAR}",
}


def put(root: Path, files: Mapping[str, str | bytes]) -> None:
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)


def pci_tree(root: Path, nodes: Mapping[str, str] | None = None) -> None:
    (root / "sys/bus/pci/devices").mkdir(parents=True)
    for path in PLACES.values():
        parts = Path(path).parts
        for depth in range(2, len(parts) + 1):
            device = root / "sys/devices" / Path(*parts[:depth])
            device.mkdir(parents=True, exist_ok=True)
            link = root / "sys/bus/pci/devices" / parts[depth - 1]
            if not link.exists():
                link.symlink_to(device)
    for address, node in (nodes or {}).items():
        put(root, {f"sys/bus/pci/devices/{address}/numa_node": node})


def drive_tree(root: Path, device: str, block: str) -> None:
    """A block device with its number, at a place below sys/devices."""
    here = root / "sys/devices" / block
    here.mkdir(parents=True, exist_ok=True)
    numbers = root / "sys/dev/block"
    numbers.mkdir(parents=True, exist_ok=True)
    (numbers / device).symlink_to(here)


def mountinfo(device: str, point: str, kind: str, source: str, options: str = "rw") -> str:
    return f"36 25 {device} / {point} rw,noatime shared:1 - {kind} {source} {options}\n"


def by_name(checks: list[Check]) -> dict[str, Check]:
    return {check.name: check for check in checks}


# --- the kernel -----------------------------------------------------------------------------------------------------


def test_counters_of_nvidia_fs_are_those_that_succeeded() -> None:
    assert sysfs.io_counts(STATS) == (11, 8)


@pytest.mark.parametrize("text", [STATS_OFF, "", "Reads: none"])
def test_counters_that_are_off_are_none_and_not_zero(text: str) -> None:
    assert sysfs.io_counts(text) == (None, None)


def test_nvidia_fs_is_found_by_its_version(tmp_path: Path) -> None:
    assert sysfs.nvidia_fs(tmp_path) is None
    put(
        tmp_path,
        {
            "proc/driver/nvidia-fs/version": "version: 2.26.6\n",
            "proc/driver/nvidia-fs/stats": STATS,
            "proc/driver/nvidia-fs/modules": "nvme: enabled\nnvme_rdma: enabled\n",
        },
    )
    assert sysfs.nvidia_fs(tmp_path) == sysfs.NvidiaFs("2.26.6", 11, 8, ("nvme", "nvme_rdma"))


def test_p2pdma_needs_kernel_driver_and_no_multipathing(tmp_path: Path) -> None:
    assert sysfs.p2pdma(tmp_path) == sysfs.P2pDma(None, None, None)
    put(
        tmp_path,
        {
            "proc/config.gz": gzip.compress(b"CONFIG_PCI=y\nCONFIG_PCI_P2PDMA=y\n"),
            "proc/driver/nvidia/params": 'RegistryDwords: "RMForceStaticBar1=1;RmForceDisableIomapWC=1;"\n',
            "sys/module/nvme_core/parameters/multipath": "Y\n",
        },
    )
    assert sysfs.p2pdma(tmp_path) == sysfs.P2pDma(True, True, True)


@pytest.mark.parametrize(
    ("files", "built"),
    [
        ({f"boot/config-{platform.release()}": "# CONFIG_PCI_P2PDMA is not set\n"}, False),
        ({"proc/kallsyms": "0000000000000000 d p2pdma_pgmap_ops\n"}, True),
        ({"proc/kallsyms": "0000000000000000 T vfs_read\n"}, False),
    ],
)
def test_p2pdma_of_the_kernel_is_read_wherever_it_is_written(
    files: dict[str, str], built: bool, tmp_path: Path
) -> None:
    put(tmp_path, files)
    assert sysfs.p2pdma(tmp_path).kernel is built


@pytest.mark.parametrize(("text", "state"), [("DMA-FQ\n", "translating"), ("identity\n", "passthrough"), ("", "off")])
def test_iommu_is_that_of_the_device(text: str, state: str, tmp_path: Path) -> None:
    if text:
        put(tmp_path, {f"sys/bus/pci/devices/{GPU}/iommu_group/type": text})
    assert sysfs.iommu(tmp_path, GPU) == state


# --- PCI ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("other", "nodes", "expected"),
    [
        (DRIVE, {}, "PIX"),
        ("0000:1f:00.0", {}, "PXB"),
        ("0000:20:00.0", {}, "PHB"),
        (FAR, {GPU: "0", FAR: "0"}, "NODE"),
        (FAR, {GPU: "0", FAR: "1"}, "SYS"),
    ],
)
def test_distance_is_that_of_nvidia_smi(other: str, nodes: dict[str, str], expected: str, tmp_path: Path) -> None:
    pci_tree(tmp_path, nodes)
    gpu, there = sysfs.pci_device(tmp_path, GPU), sysfs.pci_device(tmp_path, other)
    assert gpu
    assert there
    assert sysfs.pci_distance(gpu, there) == sysfs.pci_distance(there, gpu) == expected


def test_bridges_between_two_devices_are_those_below_the_last_common_one(tmp_path: Path) -> None:
    pci_tree(tmp_path)
    gpu, drive = sysfs.pci_device(tmp_path, GPU), sysfs.pci_device(tmp_path, DRIVE)
    assert gpu
    assert drive
    assert set(sysfs.bridges_between(gpu, drive)) == {"0000:18:00.0", "0000:19:00.0", "0000:19:04.0"}


def acs(control: int) -> bytes:
    """4 KiB of configuration space: another extended capability first, then ACS with this control register."""
    config = bytearray(4096)
    struct.pack_into("<I", config, 0x100, 0x0001 | 1 << 16 | 0x148 << 20)
    struct.pack_into("<IHH", config, 0x148, 0x000D | 1 << 16, 0x1F, control)
    return bytes(config)


def test_acs_is_read_from_the_extended_capabilities() -> None:
    assert sysfs.acs_redirects(acs(0x1D)) is True
    assert sysfs.acs_redirects(acs(0x01)) is False, "source validation alone redirects nothing"
    assert sysfs.acs_redirects(bytes(4096)) is False, "no such capability"
    assert sysfs.acs_redirects(bytes(64)) is None, "not root"


def test_acs_chain_that_loops_ends() -> None:
    config = bytearray(4096)
    struct.pack_into("<I", config, 0x100, 0x0001 | 1 << 16 | 0x100 << 20)
    assert sysfs.acs_redirects(bytes(config)) is False


def test_bar1_is_the_largest_window(tmp_path: Path) -> None:
    lines = ["0x0000000090000000 0x0000000090ffffff 0x000000000014220c", "0x0 0x0 0x0"]
    lines += ["0x0000206000000000 0x0000207fffffffff 0x000000000014220c", *["0x0 0x0 0x0"] * 4]
    put(tmp_path, {f"sys/bus/pci/devices/{GPU}/resource": "\n".join(lines)})
    assert sysfs.bar1_bytes(tmp_path, GPU) == 128 << 30
    assert sysfs.bar1_bytes(tmp_path, DRIVE) is None


# --- storage --------------------------------------------------------------------------------------------------------


def test_mount_is_the_deepest_above_the_directory() -> None:
    text = mountinfo("8:1", "/", "ext4", "/dev/sda1") + mountinfo("259:1", "/mnt/nv\\040me", "xfs", "/dev/nvme0n1")
    assert sysfs.find_mount(text, "/mnt/nv me/kv", "259:1") == sysfs.Mount(
        "/mnt/nv me", "xfs", "/dev/nvme0n1", "rw,noatime,rw", "259:1"
    )
    root = sysfs.find_mount(text, "/mnt/nv mextra", "8:1")
    assert root
    assert root.point == "/"


def test_latest_of_two_mounts_at_one_place_counts() -> None:
    text = mountinfo("8:1", "/kv", "ext4", "/dev/sda1") + mountinfo("8:2", "/kv", "xfs", "/dev/sdb1")
    found = sysfs.find_mount(text, "/kv", "0:99")
    assert found
    assert found.kind == "xfs"


def test_partition_of_an_nvme_drive_is_followed_to_pci(tmp_path: Path) -> None:
    put(tmp_path, {"proc/self/mountinfo": mountinfo("259:2", "/", "ext4", "/dev/nvme0n1p2")})
    block = f"{PLACES[DRIVE]}/nvme/nvme0/nvme0n1"
    drive_tree(tmp_path, "259:2", f"{block}/nvme0n1p2")
    put(tmp_path, {f"sys/devices/{block}/nvme0n1p2/partition": "2\n"})
    put(tmp_path, {"run/udev/data/b259:2": "S:disk/by-id/x\nE:ID_FS_USAGE=filesystem\nE:ID_FS_TYPE=ext4\n"})
    found = sysfs.storage_of(tmp_path, Path("/kv"), 259 << 8 | 2)
    assert found
    assert found.layers == ("partition nvme0n1p2", "drive nvme0n1")
    assert found.drives == (sysfs.Drive("nvme0n1", DRIVE),)
    assert found.udev == {"ID_FS_USAGE": "filesystem", "ID_FS_TYPE": "ext4"}


def raid_tree(root: Path, level: str) -> None:
    put(root, {"proc/self/mountinfo": mountinfo("9:0", "/", "xfs", "/dev/md0")})
    drive_tree(root, "9:0", "virtual/block/md0")
    put(root, {"sys/devices/virtual/block/md0/md/level": f"{level}\n"})
    slaves = root / "sys/devices/virtual/block/md0/slaves"
    slaves.mkdir()
    for name, address in (("nvme0n1", DRIVE), ("nvme1n1", FAR)):
        block = root / "sys/devices" / PLACES[address] / "nvme" / name
        block.mkdir(parents=True, exist_ok=True)
        (slaves / name).symlink_to(block)


def test_raid_is_followed_to_all_of_its_drives(tmp_path: Path) -> None:
    raid_tree(tmp_path, "raid0")
    found = sysfs.storage_of(tmp_path, Path("/kv"), 9 << 8)
    assert found
    assert (found.raid, found.mapped, found.multipath) == ("raid0", False, False)
    assert {drive.pci for drive in found.drives} == {DRIVE, FAR}


def test_device_mapper_and_multipath_are_seen(tmp_path: Path) -> None:
    put(tmp_path, {"proc/self/mountinfo": mountinfo("253:0", "/", "xfs", "/dev/mapper/kv")})
    drive_tree(tmp_path, "253:0", "virtual/block/dm-0")
    put(
        tmp_path,
        {
            "sys/devices/virtual/block/dm-0/dm/uuid": "mpath-3600508b1001c\n",
            "sys/devices/virtual/block/dm-0/dm/name": "kv\n",
        },
    )
    found = sysfs.storage_of(tmp_path, Path("/kv"), 253 << 8)
    assert found
    assert found.layers == ("device mapper multipath kv",)
    assert (found.mapped, found.multipath) == (True, True)


def test_namespace_below_an_nvme_subsystem_is_multipath(tmp_path: Path) -> None:
    put(tmp_path, {"proc/self/mountinfo": mountinfo("259:0", "/", "xfs", "/dev/nvme0n1")})
    subsystem = "virtual/nvme-subsystem/nvme-subsys0"
    drive_tree(tmp_path, "259:0", f"{subsystem}/nvme0n1")
    controller = tmp_path / "sys/devices" / PLACES[DRIVE] / "nvme/nvme0"
    controller.mkdir(parents=True)
    (tmp_path / "sys/devices" / subsystem / "nvme0").symlink_to(controller)
    found = sysfs.storage_of(tmp_path, Path("/kv"), 259 << 8)
    assert found
    assert (found.multipath, found.drives) == (True, (sysfs.Drive("nvme0n1", DRIVE),))


# --- lines of the report --------------------------------------------------------------------------------------------


def test_machine_that_is_set_up_has_no_warning(tmp_path: Path) -> None:
    pci_tree(tmp_path, {GPU: "0", DRIVE: "0"})
    device = tmp_path.stat().st_dev
    number = f"{device >> 8 & 0xFFF}:{device & 0xFF}"
    put(
        tmp_path,
        {
            "proc/self/mountinfo": mountinfo(number, "/", "ext4", "/dev/nvme0n1"),
            "proc/driver/nvidia-fs/version": "version: 2.26.6\n",
            "proc/driver/nvidia-fs/stats": STATS,
            f"run/udev/data/b{number}": "E:ID_FS_USAGE=filesystem\nE:ID_FS_TYPE=ext4\n",
            f"sys/bus/pci/devices/{DRIVE}/current_link_speed": "32.0 GT/s PCIe\n",
            f"sys/bus/pci/devices/{DRIVE}/current_link_width": "4\n",
        },
    )
    for bridge in ("0000:18:00.0", "0000:19:00.0", "0000:19:04.0"):
        put(tmp_path, {f"sys/bus/pci/devices/{bridge}/config": acs(0)})
    drive_tree(tmp_path, number, f"{PLACES[DRIVE]}/nvme/nvme0/nvme0n1")
    gpu = {"gpu": 0, "name": "H100", "address": GPU}
    found = by_name(list(facts(tmp_path, tmp_path, gpu)))
    assert {name for name, check in found.items() if check.status != "ok"} == {"PCI P2PDMA"}
    far = "PIX, at most one PCIe bridge between them, drive 32.0 GT/s x4; ACS does not redirect"
    assert found["GPU to nvme0n1"].text == far


def test_what_keeps_cufile_from_moving_data_directly_is_warned_about(tmp_path: Path) -> None:
    raid_tree(tmp_path, "raid5")
    device = tmp_path.stat().st_dev
    number = f"{device >> 8 & 0xFFF}:{device & 0xFF}"
    (tmp_path / "sys/dev/block" / number).symlink_to(tmp_path / "sys/devices/virtual/block/md0")
    put(tmp_path, {"proc/self/mountinfo": mountinfo(number, "/", "ext4", "/dev/md0", "rw,data=journal")})
    found = by_name(list(facts(tmp_path, tmp_path, None)))
    assert found["storage"].status == "warning"
    assert "ext4 must be mounted with data=ordered; raid5 is not moved directly" in found["storage"].text
    assert "there is no record of" in found["udev"].text
    assert "/proc/modules is missing" in found["nvidia-fs"].text
