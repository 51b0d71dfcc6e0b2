"""Where PCI devices are: how far a drive is from a GPU, what lies between them, and how large a GPU's window is."""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from nixl_tiers.cli.gds.files import line_of

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
class Device:
    """A PCI device by its place in the tree: the host bridge, the bridges from the top, and the device."""

    address: str
    host_bridge: str
    chain: tuple[str, ...]
    """Addresses from the root port to the device."""
    node: int | None
    link: str
    """Speed and width of its link, such as "32.0 GT/s x4"; "" if unknown."""


def device(root: Path, address: str) -> Device | None:
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
    return Device(address, host, chain, int(node) if node.isdigit() else None, link)


def distance(one: Device, other: Device) -> str:
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


def bridges_between(one: Device, other: Device) -> tuple[str, ...]:
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


def _common(one: Device, other: Device) -> int:
    """How many bridges from the top both have."""
    pairs = zip(one.chain[:-1], other.chain[:-1], strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(one.chain), len(other.chain)) - 1)
