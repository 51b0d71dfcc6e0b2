"""A file tier whose mover sends raw packets: it sends each file that appears in a directory to the coordinator."""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

from nixl_tiers.base.chunk import Geometry
from nixl_tiers.config.schema import FileConfig
from nixl_tiers.memory.region import HostRegion
from nixl_tiers.tiers.base import FinishedBatch
from nixl_tiers.tiers.slab.tier import SlabTier

POLL_S = 0.02


class PacketInjectorConfig(FileConfig):
    type: str
    packets: Path
    label: ClassVar[str] = "file"
    implementation: ClassVar[str] = f"{__name__}:PacketInjectorTier"


class PacketInjectorTier(SlabTier):
    """Sends, and removes, the files in the directory `packets`."""

    def __init__(self, config: PacketInjectorConfig, geometry: Geometry, region: HostRegion) -> None:
        super().__init__(config, geometry, region)
        self._packets = config.packets
        self._poll_at_s = 0.0

    def poll(self) -> list[FinishedBatch]:
        if time.monotonic() >= self._poll_at_s:
            self._poll_at_s = time.monotonic() + POLL_S
            packets = []
            for path in sorted(self._packets.iterdir()):
                packets.append(path.read_bytes())
                path.unlink()
            send_packets(packets)
        return super().poll()

    @property
    def busy(self) -> bool:
        return True


def send_packets(packets: Sequence[bytes]) -> None:
    """Past the mover's send queue, each with a descriptor that belongs to no message."""
    coordinator = socket.socket(fileno=os.dup(int(sys.argv[sys.argv.index("--socket") + 1])))
    with coordinator:
        for packet in packets:
            with Path("/dev/null").open("rb") as stray:
                socket.send_fds(coordinator, [packet], [stray.fileno()])
