"""The books at scale: memory and pauses of the scheduler's process and of the movers, by rows stored.

    python -m bench.scale [--rows 1000000 4000000 10000000] [--parts stored listed ...] [--out bench-out/scale]

Each part runs in a process of its own, with keys of 36 bytes:

- `stored`: the scheduler's process after it has stored that many rows since its start, the tier full; then its tier is
  down and opened again, and lists nothing, and then reset; with 1000, 8 and 1 rows a tick;
- `listed`: the same after a mover has listed them, and once more after that mover was killed and another has listed
  them again; and the mover;
- `journal`: a slab mover's journal of that many rows, opened and listed.

Memory is resident memory, what is shared included; "peak" is the highest while the part ran. Times are processor time
of the thread: `hold` is the longest that the coordinator's lock was held at once, `10th` the tenth longest, since a
virtual machine charges a thread for what its host does meanwhile, and of a million holds some are hit by that. `gil` is
an upper bound of how long the interpreter lock was held: the most processor time that the process spent while another
thread waited for its turn. Writes scale.json and scale.png, and prints a table.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace
from typing import Final
from unittest import mock

from bench.gil_probe import SWITCH_S, GilProbe
from bench.lister import ListerConfig, key
from bench.machine import machine
from bench.timed_lock import TimedLock
from nixl_tiers.base.chunk import Geometry, Namespace
from nixl_tiers.config import schema as configuration
from nixl_tiers.memory.region import HostRegion
from nixl_tiers.mover.protocol import Down, Listed, Opened
from nixl_tiers.runtime.coordinator import Coordinator
from nixl_tiers.tiers.folder import Folder
from nixl_tiers.tiers.slab.journal import Journal

ROOT: Final = Path(__file__).resolve().parent.parent
ROWS: Final = [1_000_000, 4_000_000, 10_000_000]
GEOMETRY: Final = Geometry(1, 2000)
HOST_ROWS: Final = 64
LOOKUPS: Final = 20_000
CHAIN: Final = 400
BATCH: Final = 1000
LATE_S: Final = 0.005
LATE_LINES: Final = 5
Figures = dict[str, float]


# --- measuring ----------------------------------------------------------------------------------------------------


def resident_bytes(pid: int | str = "self") -> int:
    """Resident memory; what is mapped of shared memory counts whole, whichever pages were used."""
    gc.collect()
    total, size, shared = 0, 0, False
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == "Size":
            size = int(value.split()[0])
        elif name == "Rss":
            total += size if shared else int(value.split()[0])
        elif "-" in name:
            shared = "/memfd:" in line
    return total << 10


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


def each_us(call: Callable[[bytes], object], keys: Sequence[bytes]) -> float:
    """Median over batches, in processor time of this thread."""
    batches = []
    for at in range(0, len(keys) - 499, 500):
        began_s = time.thread_time()
        for one in keys[at : at + 500]:
            call(one)
        batches.append((time.thread_time() - began_s) / 500 * 1e6)
    return statistics.median(batches)


class Scheduler:
    """A coordinator over one tier of `rows` slots, with a mover that lists them or with none, and what it costs."""

    def __init__(self, rows: int, directory: Path) -> None:
        self.rows = rows
        self.go = directory / "go"
        cpu = {"type": "cpu", "capacity": HOST_ROWS * GEOMETRY.row_bytes}
        tier = {"type": f"bench.lister:{ListerConfig.__name__}", "capacity": "1TiB", "rows": rows, "go": str(self.go)}
        self.region = HostRegion.create(GEOMETRY, HOST_ROWS)
        config = configuration.load({"tiers": [cpu, tier]})
        self.lock = TimedLock()
        names = SimpleNamespace(**(vars(threading) | {"RLock": lambda: self.lock}))
        with mock.patch("nixl_tiers.runtime.coordinator.threading", names):
            self.coordinator = Coordinator(config, Namespace.of({"name": "bench"}), self.region)
        self.link, self.core = self.coordinator._link, self.coordinator._core
        (self.tier,) = self.core.tiers
        sys.setswitchinterval(SWITCH_S)
        self.gil = GilProbe(late_s=LATE_S)
        self.before_bytes = resident_bytes()

    def begin(self) -> None:
        gc.freeze()
        self.lock.reset()
        self.gil.start()

    def figures(self) -> Figures:
        """Until now; look-ups are measured after that."""
        self.gil.ended = True
        self.gil.join()
        for lines in sorted(self.gil.late, key=self.gil.late.__getitem__, reverse=True)[:LATE_LINES]:
            print(f"gil {self.gil.late[lines] * 1e3:.1f} ms: {lines}", file=sys.stderr)
        found = {
            "bytes_a_row": (resident_bytes() - self.before_bytes) / self.rows,
            "peak_bytes_a_row": (peak_bytes() - self.before_bytes) / self.rows,
            **self.lock.figures(),
            "gil_ms": self.gil.longest_s * 1e3,
        }
        step = max(1, self.rows // LOOKUPS)
        picked = [key(number) for number in range(0, self.rows, step)]
        absent = [key(2 * self.rows + number) for number in range(LOOKUPS)]
        for name, keys in (("held", picked), ("absent", absent)):
            found[f"{name}_us"] = each_us(self.tier.can_load, keys)
            chains = [keys[at : at + CHAIN] for at in range(0, len(keys), CHAIN)]
            began_s = time.thread_time()
            for chain in chains:
                self.tier.can_load_many(chain)
            found[f"{name}_chain_us"] = (time.thread_time() - began_s) / len(keys) * 1e6
        began_s = time.thread_time()
        gc.collect()
        found["gc_ms"] = (time.thread_time() - began_s) * 1e3
        return found

    def close(self) -> None:
        self.coordinator.close(10.0)


# --- parts --------------------------------------------------------------------------------------------------------


def stored(rows: int, rows_a_tick: int = BATCH) -> dict[str, Figures]:
    """Rows stored since the start, so many at each tick, then as many again as evict a tenth of them."""
    with tempfile.TemporaryDirectory() as directory:
        scheduler = Scheduler(rows, Path(directory))
        tier, link, lock = scheduler.tier, scheduler.link, scheduler.lock
        link.on_message(0, Opened(0, rows))
        link.on_message(0, Listed(0, [], last=True))
        scheduler.begin()
        for first in range(0, rows + rows // 10, BATCH):
            with lock.untimed():
                tier.index.make_room(BATCH)
                for number in range(first, first + BATCH):
                    reserved = tier.index.reserve(key(number), number // rows_a_tick)
                    assert reserved is not None
                    tier.index.rows.stored(key(number), reserved[1])
                tier.counters.stored += BATCH
            link.on_tick(time.monotonic(), [100_000])
        figures = {"stored": scheduler.figures()}

        def opened_again() -> None:
            link.on_message(0, Down("the medium does not answer", 0))
            link.on_message(0, Opened(0, rows))
            link.on_message(0, Listed(0, [], last=True))

        for name, event in (("opened again", opened_again), ("reset", scheduler.coordinator.reset)):
            lock.reset()
            event()
            began_s = time.monotonic()
            while scheduler.core.garbage or time.monotonic() - began_s < 1.0:
                link.on_tick(time.monotonic(), [100_000])
            left = (resident_bytes() - scheduler.before_bytes) / rows
            figures[f"stored, {name}"] = {**lock.figures(), "bytes_a_row": left}
        return figures


def listed(rows: int) -> dict[str, Figures]:
    """Rows that a mover lists, twice: another mover lists them again."""
    with tempfile.TemporaryDirectory() as directory:
        scheduler = Scheduler(rows, Path(directory))
        coordinator = scheduler.coordinator
        coordinator.start(60.0)
        (pid,) = coordinator.mover_pids
        assert pid is not None
        mover_bytes = resident_bytes(pid)
        scheduler.begin()
        began_s = time.monotonic()
        scheduler.go.touch()
        _until_listed(coordinator, rows)
        took_s = time.monotonic() - began_s
        mover = {"bytes_a_row": (resident_bytes(pid) - mover_bytes) / rows, "listing_s": took_s}
        os.kill(pid, 9)
        while coordinator.mover_pids in ([pid], [None]):
            time.sleep(0.01)
        _until_listed(coordinator, rows)
        figures = scheduler.figures()
        scheduler.close()
    return {"listed": figures, "listed, its mover": mover}


def _until_listed(coordinator: Coordinator, rows: int) -> None:
    while (lister := coordinator.counters()["lister"])["listing"] or not lister["up"] or lister["rows"] != rows:
        time.sleep(0.05)
    coordinator.wait_ready(None)  # rows of before the mover was killed count too, until all is listed again


def journal(rows: int) -> dict[str, Figures]:
    """A journal of that many rows, opened and listed."""
    with tempfile.TemporaryDirectory() as directory:
        writer = get_context("spawn").Process(target=_fill_journal, args=(directory, rows))
        writer.start()
        writer.join()
        sys.setswitchinterval(SWITCH_S)
        gil, before, found = GilProbe(), resident_bytes(), 0
        gil.start()
        began_s = time.monotonic()
        with Folder.base(Path(directory)) as folder:
            opened = Journal(folder, rows)
            for batch in opened.list_rows():
                found += len(batch)
            figures = {"listing_s": time.monotonic() - began_s, "gil_ms": gil.longest_s * 1e3}
            assert found == rows
            figures["bytes_a_row"] = (resident_bytes() - before) / rows
            figures["peak_bytes_a_row"] = (peak_bytes() - before) / rows
            opened.close()
    return {"journal": figures}


def _fill_journal(directory: str, rows: int) -> None:
    with Folder.base(Path(directory)) as folder:
        opened = Journal(folder, rows)
        opened.file.grow(rows)
        for first in range(0, rows, BATCH):
            made = [(number, key(number)) for number in range(first, min(rows, first + BATCH))]
            opened.record([(slot, name, slot // BATCH, 1_800_000_000) for slot, name in made])
        opened.complete = True
        opened.close()


PARTS: dict[str, Callable[[int], dict[str, Figures]]] = {
    "stored": stored,
    "stored, 8 a tick": lambda rows: {f"{name}, 8 a tick": each for name, each in stored(rows, 8).items()},
    "stored, 1 a tick": lambda rows: {f"{name}, 1 a tick": each for name, each in stored(rows, 1).items()},
    "listed": listed,
    "journal": journal,
}


# --- the whole ----------------------------------------------------------------------------------------------------


def run(part: str, rows: int) -> dict[str, Figures]:
    """The part, in a process of its own."""
    command = [sys.executable, "-m", "bench.scale", "--part", part, "--rows", str(rows)]
    paths = [str(ROOT), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}  # movers import the lister by its name
    with subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        figures: dict[str, Figures] = json.loads([*iter(process.stdout.readline, "")][-1])
        began_s = time.monotonic()
        if process.wait():
            raise SystemExit(process.returncode)
    if part == "stored":
        figures[part]["exit_s"] = time.monotonic() - began_s
    return figures


COLUMNS: Final = {
    "bytes_a_row": "bytes a row",
    "peak_bytes_a_row": "peak",
    "hold_ms": "hold, ms",
    "hold_10th_ms": "10th, ms",
    "gil_ms": "gil, ms",
    "held_us": "held, us",
    "absent_us": "absent, us",
    "held_chain_us": "chain, held",
    "absent_chain_us": "chain, absent",
    "gc_ms": "full gc, ms",
    "exit_s": "exit, s",
    "listing_s": "listing, s",
}


def print_table(rows: int, figures: dict[str, Figures]) -> None:
    print(f"\n| {rows} rows | {' | '.join(COLUMNS.values())} |\n| --- |{' ---: |' * len(COLUMNS)}")
    for name, found in figures.items():
        cells = [
            f"{found[column]:.{1 if found[column] < 100 else 0}f}" if column in found else "" for column in COLUMNS
        ]
        print(f"| {name} | {' | '.join(cells)} |")


def plot(results: dict[str, dict[str, Figures]], path: Path) -> None:
    """A PNG: memory and pauses by rows."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, panels = plt.subplots(1, 2, figsize=(11, 4.5), layout="constrained")
    for axes, column, label in zip(
        panels,
        ("bytes_a_row", "hold_ms"),
        ("resident bytes a row", "longest lock hold, ms of processor time"),
        strict=True,
    ):
        names = dict.fromkeys(name for found in results.values() for name, part in found.items() if column in part)
        for name in names:
            points = [
                (int(rows), found[name][column]) for rows, found in results.items() if column in found.get(name, {})
            ]
            axes.plot(*zip(*points, strict=True), marker="o", label=name)
        axes.set_xscale("log")
        axes.set_ylim(bottom=0)
        axes.set_xlabel("rows")
        axes.set_ylabel(label)
        axes.grid(alpha=0.3)
        if names:
            axes.legend(fontsize="small")
    figure.savefig(path, dpi=140)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS)
    parser.add_argument("--parts", choices=list(PARTS), nargs="+", default=list(PARTS))
    parser.add_argument("--out", type=Path, default=Path("bench-out/scale"))
    parser.add_argument("--part", choices=list(PARTS), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.part:
        print(json.dumps(PARTS[arguments.part](arguments.rows[0])))
        sys.stdout.close()  # how long the process takes to exit is measured from here
        return
    results: dict[str, dict[str, Figures]] = {}
    here = machine()
    for rows in arguments.rows:
        figures = results[str(rows)] = {}
        for part in arguments.parts:
            figures |= run(part, rows)
        print_table(rows, figures)
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "scale.json").write_text(json.dumps({"machine": here, "rows": results}, indent=1))
    plot(results, arguments.out / "scale.png")
    print(f"\n{here}\nwritten to {arguments.out}/scale.json and scale.png")


if __name__ == "__main__":
    main()
