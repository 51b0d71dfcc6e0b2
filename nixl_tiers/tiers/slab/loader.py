"""A mover that only loads, from the slabs of a shard that another mover of its engine holds and writes.

It needs neither lock nor journal: the core sends it only slots whose rows are stored, and stores nothing there before
their loads have ended; and a load trusts nothing but the seal. What the other mover has opened it is told at each open.
Slabs grow, are cut and come anew meanwhile, so that they are looked at before each unit of loads.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Iterable
from typing import Final, cast

from nixl_tiers.base.chunk import Geometry
from nixl_tiers.base.log_once import LogOnce
from nixl_tiers.config.schema import FileConfig
from nixl_tiers.memory.region import HostRegion
from nixl_tiers.memory.seal import Sealer
from nixl_tiers.tiers.base import TierDown, has_expired
from nixl_tiers.tiers.disk import FileIdentity, HealthMonitor, direct_reads
from nixl_tiers.tiers.folder import Folder, fd_path
from nixl_tiers.tiers.move_queue import Unit
from nixl_tiers.tiers.nixl_agent import Registrar, Registration
from nixl_tiers.tiers.slab.layout import SlabLayout, described, slab_name
from nixl_tiers.tiers.slab.parts import DESCRIPTION
from nixl_tiers.tiers.slab.shard import Shard
from nixl_tiers.tiers.slab.tier import SlabTier

logger = logging.getLogger(__name__)

_NOTHING_OPEN: Final = "the mover that stores there has opened nothing yet"


class SlabLoader(SlabTier):
    """Beside a `SlabTier` with the same configuration."""

    def __init__(self, config: FileConfig, geometry: Geometry, region: HostRegion) -> None:
        super().__init__(config.model_copy(update={"write": "off"}), geometry, region)

    def _open_shard(self, namespace: bytes, epoch: int) -> Shard:
        part = self.opening.decode().partition(" ")[0]
        if not part:
            raise TierDown(_NOTHING_OPEN)
        with Folder.base(self._config.path, writes=False) as base, base.folder(part) as above:
            folder = above.folder(namespace.hex())
        try:
            sealer = Sealer(self._geometry, namespace, epoch)
            shard = ShardToLoad(folder, sealer, self._transfers.registrar, self._config.max_age, self._clock)
        except BaseException:
            folder.close()
            raise
        return cast("Shard", shard)  # which is more than loads need

    def _admit_load(self, unit: Unit) -> bool:
        slabs = cast("SlabsToLoad", self._served.slabs)
        slabs.look_at({move.slot // slabs.layout.slots_per_slab for move in unit.moves}, quiet=self._moves.quiet)
        return super()._admit_load(unit)

    @property
    def used_bytes(self) -> int:
        return 0  # the other mover counts


class ShardToLoad:
    """What loads need of a `Shard`."""

    def __init__(
        self, folder: Folder, sealer: Sealer, agent: Registrar, max_age_s: float | None, clock: Callable[[], float]
    ) -> None:
        """Takes over the folder, unless it raises: TierDown, OSError."""
        self.sealer = sealer
        self.path = folder.path
        self._folder = folder
        self._max_age_s = max_age_s
        self._clock = clock
        self._log_once = LogOnce(logger)
        try:
            found = described(json.loads(folder.read(DESCRIPTION)))
        except ValueError:
            found = None
        if found is None or found[0] != sealer.geometry:
            raise TierDown(f"{self.path}: its {DESCRIPTION} says nothing of rows of {sealer.geometry.row_bytes} bytes")
        self.slabs = SlabsToLoad(folder, found[1], agent)
        identity = FileIdentity(folder.path, os.fstat(folder.descriptor))
        self.health = HealthMonitor(identity.problem)

    def may_hold_row(self, slot: int) -> bool:
        return self.slabs.is_allocated(slot)

    def forget(self, slot: int, key: bytes) -> None:
        """The core has the other mover forget it."""

    def has_expired(self, slot: int, sealed_at: int) -> bool:
        """Where its seal is ahead of the clock, the other mover knows better, and erases it when it has looked."""
        return has_expired(sealed_at, self._clock(), self._max_age_s)

    def load_failed(self) -> None:
        self._log_once.report("load", f"{self.path}: rows cannot be read; the kernel's log may tell why")
        self.health.check_soon()

    def close(self) -> None:
        self.health.close()
        self.slabs.close()

    def release(self) -> None:
        self._folder.close()


class SlabsToLoad:
    """The slab files of a shard that another process writes."""

    def __init__(self, folder: Folder, layout: SlabLayout, agent: Registrar) -> None:
        """The folder stays the caller's."""
        self.layout = layout
        self._folder = folder
        self._agent = agent
        self._direct: bool | None = None  # until a file was opened
        self._rows: dict[int, int] = {}  # slab -> for how many rows its file has room
        self._inodes: dict[int, int] = {}
        self._files: dict[int, Registration] = {}
        self._former: list[Registration] = []  # of files that were deleted, or replaced, while loads may have run

    def look_at(self, slabs: Iterable[int], *, quiet: bool) -> None:
        """Find out what these files are now. `quiet`: no transfer is pending."""
        if quiet:
            self._close(self._former)
        for slab in slabs:
            try:
                status = self._folder.stat(slab_name(slab))
            except FileNotFoundError:
                self._rows[slab] = 0
                continue
            except OSError:
                continue  # that it cannot be looked at does not mean that no row is there
            self._rows[slab] = min(status.st_size // self.layout.row_bytes, self.layout.slots_in(slab))
            if self._inodes.setdefault(slab, status.st_ino) != status.st_ino:
                self._inodes[slab] = status.st_ino
                if (file := self._files.pop(slab, None)) is not None:
                    self._former.append(file)

    def is_allocated(self, slot: int) -> bool:
        slab, index = divmod(slot, self.layout.slots_per_slab)
        return index < self._rows.get(slab, self.layout.slots_in(slab))

    def locate(self, slot: int) -> tuple[int, int]:
        """Device and offset in bytes of a slot. Raises AgentError, OSError."""
        slab, index = divmod(slot, self.layout.slots_per_slab)
        if (file := self._files.get(slab)) is None:
            nbytes = self.layout.slots_per_slab * self.layout.row_bytes
            descriptor = self._folder.open(slab_name(slab), os.O_RDONLY)
            try:
                path = fd_path(descriptor)
                if self._direct is None:
                    self._direct = direct_reads(path)
                file = self._agent.register_file(path, nbytes, direct=self._direct, access="ro")
                self._inodes[slab] = os.fstat(descriptor).st_ino
            finally:
                os.close(descriptor)
            self._files[slab] = file
        return file.devices[0], index * self.layout.row_bytes

    def close(self) -> None:
        """No transfer may be pending."""
        self._close(self._former)
        files, self._files = [*self._files.values()], {}
        self._close(files)

    def _close(self, files: list[Registration]) -> None:
        while files:
            self._agent.deregister(files.pop())
