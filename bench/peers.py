"""Storage engines beside each other: our file and S3 tiers, and what else moves rows between memory, files and S3.

    python -m bench.peers [--quick] [--path DIR] [--rows 65536 262144 ...] [--pages 4k scattered huge] [--rounds 7]
        [--megabytes 256] [--s3-megabytes 128] [--sides slabs vllm-1 ...] [--server weed|memory|moto
        | --endpoint URL --bucket B] [--out bench-out/peers]

Sides on files, all with O_DIRECT, on one region:

- `slabs`, `files`: our file tier in both layouts; every row is sealed and verified;
- `threads`: four threads with one call a row, in one file;
- `vllm-1`: vLLM's functions as vLLM drives them, all rows of a request in one job on one thread; `vllm-16`: the rows
  split over its 16 threads. Neither seals nor verifies;
- `lmcache`: LMCache's C++ adapter for files (its package has to be installed, see bench/lmcache_sides.py);
- `fio`: the best of several ways, with requests of a row's size: the limit of the disk, or near it.

Sides on S3: `s3` (our tier), `boto3` (16 threads), `lmcache-s3`. Without --endpoint: on a server on this machine, which
shares its processors with them. A SeaweedFS (`weed`) takes most of them, `memory` next to nothing (bench/memory_s3.py).

What cannot run here is listed with the reason. Sides take turns, a round at a time; figures are medians with quartiles.
KB/request: what the disk got, by /proc/diskstats, with all other traffic of that disk. CPU: seconds a GB, of all
processes that work for a side; server: those of the S3 server, where it is on this machine. Ratios: the median of each
round's, above 1 where ours is faster. GB/s count payload, not seals. Before the rounds each side's rows are compared
with what it has stored. Writes peers.json and peers.png, after each size what there is so far.

`huge` pages: where the machine gives them (`nixl-tiers doctor` says how); the others are forced.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Final

import numpy as np

from bench import s3_tier
from bench.file_sides import FileTier, Fio, Threads, Vllm
from bench.lmcache_sides import lmcache_files, lmcache_s3
from bench.machine import file_system, machine
from bench.pages import PAGES, Unavailable, make_region
from bench.rounds import DIRECTIONS, Side, Spread, Turn, kb_a_request, rates, ratio, take_turns
from nixl_tiers.base.chunk import PAGE, Geometry
from nixl_tiers.config.schema import S3Config
from nixl_tiers.memory.pages import transparent_setting
from nixl_tiers.memory.region import HostRegion

ROWS: Final = [64 << 10, 256 << 10, 1 << 20, 2880 << 10, 8 << 20]
FILE_TIERS: Final = ["slabs", "files"]
SIDES: Final = {
    "files": [*FILE_TIERS, "threads", "vllm-1", "vllm-16", "lmcache", "fio"],
    "S3": ["s3", "boto3", "lmcache-s3"],
}
OURS: Final = [*FILE_TIERS, "s3"]
AGAINST: Final = ("vllm-1", "vllm-16", "fio", "threads", "boto3")
HEAD: Final = (
    "| row | | side | GB/s (quartiles) | KB/request | CPU s/GB | server |" + "".join(f" / {name} |" for name in AGAINST)
    + "\n| ---: | --- | --- | --- | ---: | ---: | ---: |" + " ---: |" * len(AGAINST)
)  # fmt: skip
MakeSide = Callable[[str, HostRegion, int], Side]


@dataclass(frozen=True)
class Result:
    """What one side took in one direction."""

    medium: str
    pages: str
    huge_share: float  # of the region that lies in pages of 2 MiB
    payload_bytes: int
    rows: int
    direction: str
    side: str
    gb_s: Spread
    kb_a_request: float
    cpu_s_a_gb: float
    server_cpu_s_a_gb: float
    against: dict[str, float]
    turns: list[Turn]

    def line(self) -> str:
        low, median, high = self.gb_s
        ratios = " | ".join(f"{self.against[name]:.2f}" if name in self.against else "" for name in AGAINST)
        requests = f"{self.kb_a_request:.0f}" if self.medium == "files" else ""
        server = f"{self.server_cpu_s_a_gb:.2f}" if self.server_cpu_s_a_gb else ""
        return (
            f"| {self.payload_bytes >> 10} KiB | {self.direction} | {self.side}"
            f" | {median:.3g} ({low:.3g} to {high:.3g}) | {requests} | {self.cpu_s_a_gb:.2f} | {server} | {ratios} |"
        )


class Rows:
    """The rows of a region, and what they should hold."""

    def __init__(self, region: HostRegion, payload_bytes: int) -> None:
        self._rows = region.rows_view[:, :payload_bytes]
        self._noise = np.random.default_rng(0).integers(0, 256, payload_bytes, np.uint8)

    def fill(self) -> None:
        for number, row in enumerate(self._rows):
            np.add(self._noise, np.uint8(number & 0xFF), out=row)

    def check(self, name: str, side: Side) -> None:
        """SystemExit unless `side` brings the bytes back that it has stored. fio moves bytes of its own."""
        if isinstance(side, Fio):
            return
        self.fill()
        side.store()
        self._rows[:] = 0
        side.load()
        for number, row in enumerate(self._rows):
            if not np.array_equal(row, self._noise + np.uint8(number & 0xFF)):
                raise SystemExit(f"{name}: row {number} has other bytes than were stored")


def file_side(folder: Path, name: str, region: HostRegion, payload_bytes: int) -> Side:
    """Raises Unavailable."""
    own = folder / name
    own.mkdir()
    kind, _, way = name.partition("-")
    if name in OURS:
        return FileTier(own, region, name)
    if kind == "vllm":
        return Vllm(own, region, payload_bytes, jobs=int(way))
    if kind == "lmcache":
        return lmcache_files(own, region, payload_bytes)
    if kind == "threads":
        return Threads(own, region, payload_bytes)
    return Fio(own, region.rows, payload_bytes)


def s3_side(endpoint: str, bucket: str, name: str, region: HostRegion, payload_bytes: int) -> Side:
    """Raises Unavailable."""
    config = S3Config(type="s3", bucket=bucket, prefix=f"bench-{name}", endpoint=endpoint, capacity=1 << 40)
    if name == "s3":
        return s3_tier.Tier(config, region.geometry, region)
    if name == "boto3":
        return s3_tier.Boto(config, region)
    return lmcache_s3(config, region, payload_bytes)


class Bench:
    """Results so far, of the options that a user chose."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.about = {
            **machine(),
            "file_system": file_system(options.path),
            "huge_pages_of_shared_memory": transparent_setting() or "unknown",
        }
        self.results: list[Result] = []
        self.unavailable: dict[str, str] = {}
        self.notes: list[str] = []

    def on_files(self) -> None:
        for pages in self.options.pages:
            for payload_bytes in self.options.rows:
                with tempfile.TemporaryDirectory(dir=self.options.path) as folder:
                    self._measure("files", pages, payload_bytes, partial(file_side, Path(folder)))

    def on_s3(self) -> None:
        with s3_tier.place(self.options.endpoint, self.options.bucket, self.options.server) as (url, bucket, server):
            for payload_bytes in self.options.rows:
                self._measure("S3", "4k", payload_bytes, partial(s3_side, url, bucket), server)

    def _measure(self, medium: str, pages: str, payload_bytes: int, make: MakeSide, server: int | None = None) -> None:
        """All sides of a medium on one region with rows of this size. `server`: its process ID, if there is one."""
        megabytes = self.options.megabytes if medium == "files" else self.options.s3_megabytes
        count = max(1, (megabytes << 20) // payload_bytes)
        with ExitStack() as stack:
            try:
                region = stack.enter_context(make_region(Geometry(1, payload_bytes), count, pages))
            except Unavailable as error:
                self._cannot(f"pages {pages}", error)
                return
            rows = Rows(region, payload_bytes)
            sides: dict[str, Side] = {}
            for name in [name for name in SIDES[medium] if name in self.options.sides]:
                try:
                    side = make(name, region, payload_bytes)
                except Unavailable as error:
                    self._cannot(name, error)
                    continue
                stack.callback(side.close)
                sides[name] = side
                rows.check(name, side)
            if not sides:
                return
            turns = take_turns(
                sides, self.options.rounds, before_store=rows.fill, path=self.options.path, server=server
            )
            if isinstance(fio := sides.get("fio"), Fio):
                ways = "; ".join(f"{what}: {way}" for what, way in fio.ways.items())
                self._note(f"fio, rows of {payload_bytes} bytes, {pages}: {ways}")
            huge_share = min(1.0, (region.huge_bytes or 0) / region.nbytes)  # its header counts too
        nbytes = count * payload_bytes
        print(f"\n{medium}, pages: {PAGES[pages]}\n\n{HEAD}")
        for what in DIRECTIONS:
            for name, taken in turns[what].items():
                others = [other for other in AGAINST if other in sides and name in OURS]
                result = Result(
                    medium,
                    pages,
                    huge_share,
                    payload_bytes,
                    count,
                    what,
                    name,
                    gb_s=rates(taken, nbytes),
                    kb_a_request=kb_a_request(taken),
                    cpu_s_a_gb=Spread.of([turn.cpu_s / nbytes * 1e9 for turn in taken]).median,
                    server_cpu_s_a_gb=Spread.of([turn.server_cpu_s / nbytes * 1e9 for turn in taken]).median,
                    against={other: ratio(taken, turns[what][other]) for other in others},
                    turns=taken,
                )
                self.results.append(result)
                print(result.line(), flush=True)
        self.save()

    def save(self) -> None:
        """What there is so far, so that a run may be ended early."""
        found = {
            "machine": self.about,
            "options": {name: str(value) for name, value in vars(self.options).items()},
            "unavailable": self.unavailable,
            "notes": self.notes,
            "results": [asdict(result) for result in self.results],
        }
        (self.options.out / "peers.json").write_text(json.dumps(found, indent=1))
        if self.results:
            plot(self.results, self.options.out / "peers.png")

    def _note(self, text: str) -> None:
        print(text, flush=True)
        self.notes.append(text)

    def _cannot(self, name: str, error: Unavailable) -> None:
        if name not in self.unavailable:
            print(f"{name}: unavailable: {error}", flush=True)
        self.unavailable[name] = str(error)


def plot(results: list[Result], path: Path) -> None:
    """A PNG: GB/s by row size, a panel for each direction and kind of pages."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    columns = list(dict.fromkeys((result.medium, result.pages) for result in results))
    colours = dict(
        zip((name for names in SIDES.values() for name in names), plt.get_cmap("tab20").colors, strict=False)
    )
    size = (5.5 * len(columns) + 1.5, 8)
    figure, panels = plt.subplots(len(DIRECTIONS), len(columns), figsize=size, layout="constrained", squeeze=False)
    drawn = {}
    for axes, (what, column) in zip(panels.flat, product(DIRECTIONS, columns), strict=True):
        shown = [result for result in results if result.direction == what and (result.medium, result.pages) == column]
        for name in dict.fromkeys(result.side for result in shown):
            several = [result for result in shown if result.side == name]
            low, median, high = zip(*(result.gb_s for result in several), strict=True)
            drawn[name] = axes.errorbar(
                [result.payload_bytes / 1024 for result in several],
                median,
                yerr=(np.subtract(median, low), np.subtract(high, median)),
                color=colours[name],
                marker="o",
                capsize=3,
                linestyle="-" if name in OURS else "--",
            )
        rows = [row / 1024 for row in dict.fromkeys(result.payload_bytes for result in shown)]
        axes.set_xscale("log", base=2)
        axes.set_xticks(rows, [f"{row:g}" for row in rows])
        axes.set_ylim(bottom=0)
        axes.set_xlabel("row, KiB")
        axes.set_ylabel("GB/s")
        axes.set_title(f"{column[0]}, {what}" + (f", pages: {column[1]}" if column[0] == "files" else ""))
        axes.grid(alpha=0.3)
    figure.legend(drawn.values(), drawn.keys(), loc="outside right center", fontsize="small")
    figure.savefig(path, dpi=140)
    plt.close(figure)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one round of few small rows: shows that all works")
    parser.add_argument("--path", type=Path, default=Path(tempfile.gettempdir()), help="a directory on the disk")
    parser.add_argument("--rows", type=int, nargs="+", help="payload sizes, in bytes; multiples of a page")
    parser.add_argument("--pages", choices=list(PAGES), nargs="+", default=["4k", "huge"])
    parser.add_argument("--sides", choices=[*SIDES["files"], *SIDES["S3"]], nargs="+", help="default: all")
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--megabytes", type=int, help="of files in each turn")
    parser.add_argument("--s3-megabytes", type=int, help="of objects in each turn")
    parser.add_argument("--server", choices=list(s3_tier.SERVERS), default="weed", help="the S3 server to start here")
    parser.add_argument("--endpoint", help="an S3 server instead; credentials come from the AWS chain")
    parser.add_argument("--bucket", default="kv-bench", help="its bucket; objects go below bench-* and are removed")
    parser.add_argument("--out", type=Path, default=Path("bench-out/peers"))
    options = parser.parse_args()
    small = options.quick
    options.rows = options.rows or (ROWS[:1] if small else ROWS)
    options.rounds = options.rounds or (1 if small else 7)
    options.megabytes = options.megabytes or (1 if small else 256)
    options.s3_megabytes = options.s3_megabytes or (1 if small else 128)
    options.sides = options.sides or [*SIDES["files"], *SIDES["S3"]]
    if any(row % PAGE for row in options.rows):
        parser.error(f"--rows: O_DIRECT needs multiples of {PAGE}")
    return options


def main() -> None:
    options = parse()
    os.environ.setdefault("NIXL_LOG_LEVEL", "WARN")
    options.out.mkdir(parents=True, exist_ok=True)
    bench = Bench(options)
    if set(options.sides) & set(SIDES["files"]):
        bench.on_files()
    if set(options.sides) & set(SIDES["S3"]):
        bench.on_s3()
    bench.save()
    print(f"\n{bench.about}\nwritten to {options.out}/peers.json and peers.png")


if __name__ == "__main__":
    main()
