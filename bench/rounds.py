"""Rounds in which the sides of a comparison take turns: a disk's or a server's speed changes from minute to minute, so
only sides that were measured in the same rounds can be compared."""

from __future__ import annotations

import os
import resource
import statistics
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, NamedTuple

Direction = Literal["store", "load"]
DIRECTIONS: Final[tuple[Direction, ...]] = ("store", "load")
SECTOR_BYTES: Final = 512  # /proc/diskstats counts in these, whatever the disk's own are
_CPUCLOCK_SCHED: Final = 2  # linux/posix-timers.h: the clock of a process is its ID, inverted and shifted, and this


class Took(NamedTuple):
    seconds: float
    cpu_s: float  # of all that works for a side


class Side(ABC):
    """Moves the same rows each time it is called."""

    pids: Sequence[int] = ()
    """Processes other than this one and its children that do the work."""

    @abstractmethod
    def store(self) -> Took | None:
        """Returns what it took if the side measures that itself."""

    @abstractmethod
    def load(self) -> Took | None:
        """The same."""

    def close(self) -> None:  # noqa: B027  most have nothing to do
        """Remove what it has stored, and stop."""


@dataclass(frozen=True)
class Turn:
    seconds: float
    cpu_s: float  # of this process, its children, and the side's processes
    requests: int  # that the disks got, in this direction
    request_bytes: int
    server_cpu_s: float = 0.0


class Spread(NamedTuple):
    """Median and quartiles."""

    low: float
    median: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        return cls(*(statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else [*values] * 3))


def rotated(names: Sequence[str], turn: int) -> list[str]:
    """The names, each turn beginning with another one."""
    start = turn % len(names)
    return [*names[start:], *names[:start]]


def rotations(names: Sequence[str], turns: int) -> Iterator[tuple[int, str]]:
    """Turn and name: each of them once a turn."""
    return ((turn, name) for turn in range(turns) for name in rotated(names, turn))


def take_turns(
    sides: Mapping[str, Side],
    rounds: int,
    *,
    before_store: Callable[[], object] = lambda: None,
    path: Path = Path("/"),
    server: int | None = None,
) -> dict[Direction, dict[str, list[Turn]]]:
    """`rounds` turns of each side, after a round that is not measured (it connects, and allocates files).

    `before_store` is called before each store, outside its time. `path`: where the disk is whose requests are counted.
    `server`: the process ID of a server that works for all sides.
    """
    taken: dict[Direction, dict[str, list[Turn]]] = {what: {name: [] for name in sides} for what in DIRECTIONS}
    for number in range(rounds + 1):
        for what in DIRECTIONS:
            # In turns: each finds the disk's cache as the one before has left it.
            for name in rotated([*sides], number):
                if what == "store":
                    before_store()
                turn = _turn(sides[name], what, path, server)
                if number:
                    taken[what][name].append(turn)
    return taken


def _turn(side: Side, what: Direction, path: Path, server: int | None) -> Turn:
    requests, nbytes = disk_requests(path)[what]
    server_s = process_seconds(server)
    cpu_s, began_s = cpu_seconds(side.pids), time.perf_counter()
    own = side.store() if what == "store" else side.load()
    took = own or Took(time.perf_counter() - began_s, cpu_seconds(side.pids) - cpu_s)
    requests_after, nbytes_after = disk_requests(path)[what]
    return Turn(*took, requests_after - requests, nbytes_after - nbytes, process_seconds(server) - server_s)


def cpu_seconds(pids: Sequence[int] = ()) -> float:
    """Of this process, of its children that have ended, and of these processes."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    others = sum(map(process_seconds, pids))
    return time.process_time() + children.ru_utime + children.ru_stime + others


def process_seconds(pid: int | None) -> float:
    """Processor time of another process; 0 without one."""
    return 0.0 if pid is None else time.clock_gettime(~pid << 3 | _CPUCLOCK_SCHED)


def disk_requests(path: Path) -> dict[Direction, tuple[int, int]]:
    """Requests and bytes so far of the disk below `path`, of all disks where that is not known, with the traffic of
    others. Fields: Documentation/admin-guide/iostats.rst."""
    device = path.stat().st_dev
    own = Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}").resolve().name
    lines = [line.split() for line in Path("/proc/diskstats").read_text().splitlines()]
    chosen = [line for line in lines if line[2] == own]
    chosen = chosen or [line for line in lines if (Path("/sys/block") / line[2]).exists()]
    reads, sectors_read, writes, sectors_written = (sum(int(line[at]) for line in chosen) for at in (3, 5, 7, 9))
    return {"load": (reads, sectors_read * SECTOR_BYTES), "store": (writes, sectors_written * SECTOR_BYTES)}


def rates(turns: Sequence[Turn], nbytes: int) -> Spread:
    """GB/s of `nbytes` a turn."""
    return Spread.of([nbytes / 1e9 / turn.seconds for turn in turns])


def kb_a_request(turns: Sequence[Turn]) -> float:
    """Median size of the disk's requests in KiB; 0 if there were none."""
    return statistics.median(turn.request_bytes / max(1, turn.requests) / 1024 for turn in turns)


def ratio(turns: Sequence[Turn], others: Sequence[Turn]) -> float:
    """How many times as fast as the others: the median of each round's ratio."""
    return statistics.median(other.seconds / turn.seconds for turn, other in zip(turns, others, strict=True))
