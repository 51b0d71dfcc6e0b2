"""The file tier: slots in slab files. Opens a part of the path for a namespace, and says which moves may start and when
slabs grow. How rows are moved is in `transfers.py`."""

from __future__ import annotations

import logging
import resource
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Final

from nixl_tiers.base.chunk import FAILING, Geometry, Outcome
from nixl_tiers.base.log_once import LogOnce
from nixl_tiers.base.manifest import Description
from nixl_tiers.base.times import PRODUCTION, Times
from nixl_tiers.config.schema import FileConfig
from nixl_tiers.memory.region import HostRegion
from nixl_tiers.memory.seal import Sealer
from nixl_tiers.tiers.base import EndedMoves, Entry, FinishedBatch, Move, StorageTier, TierDown, TierRefused, sweep_s
from nixl_tiers.tiers.disk import FULL_ERRORS, FreeSpace, MountGuard, describe, open_error, prepare_path
from nixl_tiers.tiers.manifests import ManifestKeeper
from nixl_tiers.tiers.move_queue import Unit
from nixl_tiers.tiers.slab.expiry import until
from nixl_tiers.tiers.slab.growth import GROWTH_S, Growth
from nixl_tiers.tiers.slab.shard import Shard, ShardManifests, slots_within
from nixl_tiers.tiers.slab.shards import Shards
from nixl_tiers.tiers.slab.transfers import open_transfers

logger = logging.getLogger(__name__)

_FULL_S: Final = 0.5  # how long a lack of space is believed before it is tried again


class SlabTier(StorageTier):
    """Slots in slab files below `<path>/part-<n>/<namespace>`, with a journal, within a part of the path's capacity."""

    def __init__(
        self,
        config: FileConfig,
        geometry: Geometry,
        region: HostRegion,
        clock: Callable[[], float] = time.time,
        *,
        movers: int = 1,
        replicas: int = 1,
        times: Times = PRODUCTION,
    ) -> None:
        """`region` stays the caller's; `clock` returns Unix seconds; `movers`: how many the tier has in this engine;
        `replicas`: how many engines share the path. Raises TierRefused if the wanted backend cannot be had here."""
        self.config = config
        self.geometry = geometry
        self.region = region
        self.times = times
        self.log_once = LogOnce(logger)
        self._clock = clock
        self._free = FreeSpace(config.path, config.min_free)
        self._quota = Shards(config.path, config.capacity, replicas, self._free)
        self._transfers = open_transfers(self, movers * replicas)
        self._moves = self._transfers.moves
        self._staging = self._transfers.staging
        self._mount = MountGuard(self)
        self._open: Shard | None = None
        self._slots: Growth  # of the open shard
        self._allocator = ThreadPoolExecutor(1, thread_name_prefix="allocator")
        self._growth: Future[None] | None = None
        self._growth_since_s = 0.0
        self._full_until_s = 0.0
        self._full_outcome = Outcome.NO_SPACE
        self._manifests = ManifestKeeper(geometry.row_bytes)
        with suppress(OSError, ValueError):  # a slab is an open file, and the usual soft limit is 1024
            hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))

    # --- the contract ---------------------------------------------------------------------------------------------

    def identify(self, engine: str) -> None:
        self._manifests.engine = engine

    def describe(self, description: Description) -> None:
        self._manifests.description = description

    def open(self, namespace: bytes, epoch: int) -> int:
        # A reset keeps the part; after a fault it is claimed anew.
        healthy = self.may_start()
        self._close_shard()
        if not healthy:
            self._quota.release()
        self._staging.open()
        try:
            self._open = self._open_shard(namespace, epoch)
        except OSError as error:
            raise open_error(error) from error
        finally:
            if self._open is None:
                self._quota.release()
        self._slots = Growth(self._open, self._allocator, self.times.growth_retry_s)
        self._full_until_s = 0.0
        return self._slots.slots

    def _open_shard(self, namespace: bytes, epoch: int) -> Shard:
        """Raises TierDown, TierRefused, OSError."""
        slots = slots_within(self._quota.part_bytes, self.geometry.row_bytes)
        if slots < 1:
            raise TierRefused(
                f"capacity: {self._quota.part_bytes} bytes, for each of {self._quota.replicas} replicas, hold no row "
                f"of {self.geometry.row_bytes} bytes beside the journal in {self.config.path}"
            )
        prepare_path(self.config, self._mount, self.log_once)
        self._quota.forget_path()
        with self._quota.locked(self.times.lock_wait_s):
            directory = self._quota.acquire_shard(namespace)
        shard: Shard | None = None
        try:
            self._mount.remember(self.config.path)
            shard = Shard(
                directory,
                slots,
                Sealer(self.geometry, namespace, epoch),
                self._transfers.registrar,
                self._quota,
                max_age_s=self.config.max_age,
                clock=self._clock,
                times=self.times,
            )
            assert shard.slabs.layout.slots <= slots, "a part has more slots than its share"
            with suppress(OSError):  # then nothing grows
                self._quota.make_room(0)  # the capacity may be smaller than last time
        except BaseException:
            if shard is not None:
                shard.close()
            self._quota.discard(directory)
            raise
        self._manifests.serve(namespace.hex(), epoch, ShardManifests(shard, directory), self._clock)
        return shard

    @property
    def slots(self) -> int | None:
        return self._slots.slots if self._open is not None else None

    @property
    def denials(self) -> Mapping[str, str]:
        problem = self._open.store_problem if self._open is not None else ""
        return {**self._free.denials, **({FAILING: problem} if problem else {})}

    def list_rows(self) -> Iterator[Sequence[Entry]]:
        return self.served.list_rows()

    def maintain(self) -> Iterator[list[Entry]]:
        """Erase what is too old, delete parts that are no more, try again to grow, and free what is empty."""
        yield from self.served.expiry.expire(self._slots_in_use)
        if self._quota.surplus:
            yield from until(self._allocator.submit(self._quota.trim_again))
        yield from self._slots.maintain(self._slots_in_use, lambda: self._growth is not None)

    @property
    def maintain_s(self) -> float | None:
        age_s = self.config.max_age
        return GROWTH_S if age_s is None else min(GROWTH_S, sweep_s(age_s))

    def store(self, moves: Sequence[Move]) -> int:
        self.served.journal.start_overwrite(*(move.slot for move in moves))
        return self._moves.store(moves)

    def load(self, moves: Sequence[Move]) -> int:
        return self._moves.load(moves)

    def poll(self) -> list[FinishedBatch]:
        self._transfers.poll()
        if self._growth is not None and self._growth.done():
            self._grown(self._growth)
        problem = ""
        if self._open is not None:
            self._open.journal.step()
            problem = self._open.health.poll()
        if problem:  # what runs ends by itself
            self._moves.loads.give_up()
            if self._growth is None:
                self._moves.stores.give_up()
        self._moves.start()
        if problem and self._moves.quiet and self._growth is None:
            raise TierDown(problem)
        return self._moves.take()

    def ended_moves(self) -> Sequence[EndedMoves]:
        return self._moves.take_ended()

    def delete(self, entries: Sequence[tuple[int, bytes]]) -> None:
        for slot, key in entries:
            self.served.journal.remove(slot, key)

    def touch(self, slots: Sequence[int], ticks: Sequence[int]) -> None:
        self.served.journal.touch(slots, ticks)

    @property
    def busy(self) -> bool:
        return self._moves.busy or not self.may_start()

    @property
    def poll_s(self) -> float:
        return self._moves.poll_s

    @property
    def wake_fd(self) -> int | None:
        return self._transfers.wake_fd

    @property
    def staged(self) -> tuple[bool, bool]:
        return self._staging.staged

    @property
    def used_bytes(self) -> int:
        return self._quota.used_bytes

    def close(self) -> None:
        self._close_shard(last=True)
        self._quota.release()
        self._allocator.shutdown(wait=False, cancel_futures=True)
        self._transfers.close()

    # --- opening and closing a namespace ----------------------------------------------------------------------------

    @property
    def served(self) -> Shard:
        if self._open is None:
            raise RuntimeError("the tier is not open")
        return self._open

    def _close_shard(self, *, last: bool = False) -> None:
        shard, self._open = self._open, None
        if shard is not None:
            self._allocator.submit(lambda: None).result()  # wait for its current task, which uses this shard
            self._growth = None
            shard.close()
            if self._manifests.stop(last=last):
                shard.release()

    # --- which moves may start --------------------------------------------------------------------------------------

    def may_start(self) -> bool:
        return self._open is None or not self._open.health.problem

    def admit_load(self, unit: Unit) -> bool:
        unit.end_each(lambda move: None if self.served.may_hold_row(move.slot) else Outcome.MISSING)
        return True

    def admit_store(self, unit: Unit) -> bool:
        """Stores that need a new extent wait for it, and for each other, unless it is overdue."""
        served = self.served
        slabs = served.slabs
        waits = self._growth is not None and not self._growth_is_overdue()
        if waits or any(move.slot in served.expiry.erasing for move in unit.moves):
            return False
        unit.end_each(lambda move: None if 0 <= move.slot < slabs.layout.slots else Outcome.FAILED)
        lacking = [move.slot for move in unit.moves if not slabs.is_allocated(move.slot)]
        if not lacking:
            return True
        if self._growth is None and time.monotonic() >= self._full_until_s:
            self._growth = self._allocator.submit(served.grow, lacking[0])
            self._growth_since_s, self._full_outcome = time.monotonic(), Outcome.NO_SPACE
            return False
        unit.end_each(lambda move: None if slabs.is_allocated(move.slot) else self._full_outcome)
        return True

    def _growth_is_overdue(self) -> bool:
        """Meanwhile the core evicts to store more, as where there is no room."""
        if time.monotonic() - self._growth_since_s < self.times.growth_overdue_s:
            return False
        self._slots.refused()
        self.log_once.report("growth", f"{self.config.path}: room for rows takes long, as if the disk hangs: see dmesg")
        return True

    def _slots_in_use(self) -> set[int]:
        return {move.slot for move in self._moves.unfinished()}

    def _grown(self, growth: Future[None]) -> None:
        self._growth = None
        try:
            growth.result()
        except OSError as error:
            served, reason, full = self.served, describe(error), error.errno in FULL_ERRORS
            if not full:
                served.store_problem = f"{served.path}: no slab can be made longer ({reason})"
                self.log_once.report("longer", served.store_problem)
            elif not self._full_until_s and not self._free.problem:  # which is logged as a denial
                logger.warning("no room, so rows are evicted to store others; free some, or lower capacity: %s", reason)
            served.health.check_soon()
            self._full_until_s = time.monotonic() + _FULL_S
            if full or served.slabs.end:  # where the core evicts to store more, no write has failed
                self._slots.refused()
            else:
                self._full_outcome = Outcome.FAILED
        else:
            self._full_until_s = 0.0
