"""Cost of the first listing of a tier in the scheduler's process: the whole path, through a real mover's socket.

    python -m bench.listing [--rows 4000000] [--one-by-one 200000]

A stub tier lists `--rows` rows with 36-byte keys; nothing is moved. A thread in place of the scheduler looks up keys
(misses) every 200 us, before the listing and during it. `--one-by-one`: so many rows are also given to the core as the
first few of every listing are, decoding included, for comparison.
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from nixl_tiers.base.chunk import Geometry, Namespace
from nixl_tiers.base.policies import Write
from nixl_tiers.config import schema as configuration
from nixl_tiers.config.tier import StorageConfig
from nixl_tiers.core.listing import take_all
from nixl_tiers.core.manager import TierManager
from nixl_tiers.core.types import TierSpec
from nixl_tiers.memory.region import HostRegion
from nixl_tiers.mover.protocol import Listed, decode_to_coordinator, encode
from nixl_tiers.runtime.coordinator import Coordinator
from nixl_tiers.tiers.base import MAX_ENTRIES, Entry, FinishedBatch, Move, StorageTier
from tests.support.core import look_up

GEOMETRY = Geometry(1, 2000)
HOST_ROWS = 64
MAX_LOOKUPS = 4_000_000


def key(number: int) -> bytes:
    return number.to_bytes(8, "big") * 4 + bytes(4)  # as long as a block hash with its group


class ListerConfig(StorageConfig):
    rows: int
    go: Path

    implementation: ClassVar[str] = "bench.listing:Lister"
    physical_slots: ClassVar[bool] = True


class Lister(StorageTier):
    """Holds `rows` rows, one in each slot; its listing waits until the file `go` exists."""

    def __init__(self, config: ListerConfig, geometry: Geometry, region: HostRegion) -> None:
        self._rows = config.rows
        self._go = config.go

    def open(self, namespace: bytes, epoch: int) -> int:
        return self._rows

    def list_rows(self) -> Iterator[list[Entry]]:
        while not self._go.exists():
            yield []
        slots = np.random.default_rng(1).permutation(self._rows)
        for start in range(0, self._rows, MAX_ENTRIES):
            batch = slots[start : start + MAX_ENTRIES].tolist()
            yield [Entry(slot, key(slot), start) for slot in batch]

    def store(self, moves: Sequence[Move]) -> int:
        raise NotImplementedError

    def load(self, moves: Sequence[Move]) -> int:
        raise NotImplementedError

    def poll(self) -> list[FinishedBatch]:
        return []

    def delete(self, entries: Sequence[tuple[int, bytes]]) -> None:
        pass

    @property
    def busy(self) -> bool:
        return False

    @property
    def used_bytes(self) -> int:
        return 0

    def close(self) -> None:
        pass


class Scheduler(threading.Thread):
    """Looks up keys, one every 200 us, and records how long each took."""

    def __init__(self, coordinator: Coordinator, rows: int) -> None:
        super().__init__()
        self._coordinator, self._rows = coordinator, rows
        self.ended = False
        self.count = 0
        self._spent_s = np.ones(MAX_LOOKUPS)  # allocated before anything is measured

    @property
    def spent_s(self) -> list[float]:
        return self._spent_s[: self.count].tolist()

    def run(self) -> None:
        number = self._rows
        while not self.ended and self.count < MAX_LOOKUPS:
            number += 1
            start = time.perf_counter()
            look_up(self._coordinator, key(number), "request")
            self._spent_s[self.count] = time.perf_counter() - start
            self.count += 1
            time.sleep(0.0002)


def timed(call: Callable[..., Any], clock: Callable[[], float], spent_s: list[float]) -> Callable[..., Any]:
    def wrapper(*arguments: Any) -> Any:
        start = clock()
        try:
            return call(*arguments)
        finally:
            spent_s.append(clock() - start)

    return wrapper


def anonymous_bytes() -> int:
    found = re.search(r"RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) << 10


def one_by_one_us(rows: int) -> float:
    """Processor time a row on the supervisor's thread."""
    core = TierManager(HOST_ROWS, GEOMETRY.row_bytes, [TierSpec("file", Write.THROUGH, physical_slots=True)])
    take_all(core.events.opened(0, rows))
    packets = [
        encode(Listed(0, [Entry(n, key(n), start) for n in range(start, min(start + MAX_ENTRIES, rows))], last=False))
        for start in range(0, rows, MAX_ENTRIES)
    ]
    start = time.thread_time()
    for packet in packets:
        message = decode_to_coordinator(packet)
        assert isinstance(message, Listed)
        core.events.listed(0, [(entry.slot, entry.key, entry.tick) for entry in message.entries], message.last)
    return (time.thread_time() - start) / rows * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description="cost of listing a tier's rows")
    parser.add_argument("--rows", type=int, default=4_000_000)
    parser.add_argument("--one-by-one", type=int, default=200_000)
    arguments = parser.parse_args()
    rows = arguments.rows
    with tempfile.TemporaryDirectory() as directory, HostRegion.create(GEOMETRY, HOST_ROWS) as region:
        go = Path(directory) / "go"
        cpu = {"type": "cpu", "capacity": HOST_ROWS * GEOMETRY.row_bytes}
        tier = {"type": "bench.listing:ListerConfig", "capacity": "1TiB", "rows": rows, "go": str(go)}
        config = configuration.load({"tiers": [cpu, tier]})
        coordinator = Coordinator(config, Namespace.of({"name": "bench"}), region)
        link = coordinator._link
        messages_s: list[float] = []
        index_s: list[float] = []
        link.on_message = timed(link.on_message, time.thread_time, messages_s)  # type: ignore[method-assign]
        link.on_columns = timed(link.on_columns, time.thread_time, index_s)  # type: ignore[method-assign]
        coordinator.start(30.0)
        scheduler = Scheduler(coordinator, rows)
        scheduler.start()
        time.sleep(3.0)
        before, quiet = anonymous_bytes(), scheduler.count
        messages_s.clear()
        start = time.perf_counter()
        go.touch()
        while (lister := coordinator.counters()["lister"])["listing"] or not lister["up"]:
            time.sleep(0.05)
        took_s = time.perf_counter() - start
        scheduler.ended = True
        scheduler.join()
        grown = anonymous_bytes() - before
        held = coordinator.counters()["lister"]["rows"]
        coordinator.close(10.0)
    before_s, during_s = (sorted(part) for part in (scheduler.spent_s[:quiet], scheduler.spent_s[quiet:]))
    print(f"| {held:.0f} rows listed through a mover, {os.cpu_count()} processors | |\n| --- | --- |")
    print(f"| from the first row listed to the tier being up | {took_s:.1f} s |")
    print(f"| supervisor's thread, columns | {sum(index_s) * 1e3:.1f} ms of processor time |")
    print(f"| supervisor's thread, other messages | {sum(messages_s) * 1e3:.1f} ms of processor time |")
    for name, part in (("before", before_s), ("meanwhile", during_s)):
        median_us, longest_ms = statistics.median(part) * 1e6, part[-1] * 1e3
        print(f"| a lookup {name}: median, longest | {median_us:.0f} us, {longest_ms:.2f} ms |")
    print(f"| private memory of the scheduler's process for them | {grown / held:.2f} bytes a row |")
    if arguments.one_by_one:
        print(f"| one by one instead | {one_by_one_us(arguments.one_by_one):.1f} us of processor time a row |")


if __name__ == "__main__":
    main()
