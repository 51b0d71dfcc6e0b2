"""A file tier whose mover says what it is told to: every file in a directory is a packet for the engine."""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nixl_tiers.chunk import Geometry
from nixl_tiers.config.schema import FileConfig, tier_from_dict
from nixl_tiers.memory.region import HostRegion
from nixl_tiers.tiers.base import FinishedBatch
from nixl_tiers.tiers.slab.tier import SlabTier

LOOK_S = 0.02


class Babbling(SlabTier):
    def __init__(self, config: dict[str, Any], geometry: Geometry, region: HostRegion) -> None:
        inner = tier_from_dict(config["inner"])
        assert isinstance(inner, FileConfig)
        super().__init__(inner, geometry, region)
        self._say = Path(config["say"])
        self._look_at_s = 0.0

    def poll(self) -> list[FinishedBatch]:
        if time.monotonic() >= self._look_at_s:
            self._look_at_s = time.monotonic() + LOOK_S
            packets = []
            for path in sorted(self._say.iterdir()):
                packets.append(path.read_bytes())
                path.unlink()
            speak(packets)
        return super().poll()

    @property
    def busy(self) -> bool:
        return True


def speak(packets: Sequence[bytes]) -> None:
    """Past the mover's own words, each with a descriptor that belongs to nothing."""
    engine = socket.socket(fileno=os.dup(int(sys.argv[sys.argv.index("--socket") + 1])))
    with engine:
        for packet in packets:
            with Path("/dev/null").open("rb") as nothing:
                socket.send_fds(engine, [packet], [nothing.fileno()])
