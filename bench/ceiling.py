"""What a mover of a file tier costs: processor seconds a GB and GB/s of real movers, without a disk that limits them.

    python -m bench.ceiling [--paths DIR ...] [--loop] [--rows 2097152 65536] [--pages 4k huge] [--movers 1 2]
        [--sides native nixl vllm-16 files-16 fio] [--rounds 5] [--megabytes 256] [--quick]
        [--together] [--out bench-out/ceiling]

Sides: `native`, slabs; `nixl`, slabs with `backend: posix`; both seal and verify every row, and stage none.
`vllm-16`: vLLM's functions for files on 16 threads; `files-16`: the same in Python's own calls, for machines without
vLLM. Neither seals nor verifies, and both write new files each round where slabs are overwritten. `fio`: the drives'
own speed, the best of its engines; seconds as the slowest one tells them, without its start.

`--paths`: directories, by default a tmpfs (/dev/shm), which shows what a mover costs without a disk, but copies on the
caller's thread; `--together`: of all directories at once, as `make bench-server` does. `--loop`: also an ext4 on a loop
device over the first of them, as root: there the kernel's workers copy, and a mover pays what it pays with NVMe.
Figures of a real drive: give a directory on it. With several movers each has a directory and a region of its own, in
the paths in turn, `megabytes` each, and as many threads as a mover of a tier with so many directories; the threads of
other sides are shared out among them.

CPU s/GB is of the movers alone (of this process for threads) and hardly depends on what else runs; GB/s does. Medians
of the rounds, in which sides take turns. Writes ceiling.json and ceiling.md. Needs the package's dependencies and NIXL,
no network.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from itertools import product
from pathlib import Path
from typing import Final

from bench.file_sides import FileEach, FileTier, Fio, Vllm
from bench.machine import drives, file_system, machine
from bench.pages import PAGES, Unavailable, make_region
from bench.rounds import Side, Spread, Took, process_seconds, rates, ratio, take_turns
from nixl_tiers.base.chunk import PAGE, Geometry
from nixl_tiers.memory.region import HostRegion
from nixl_tiers.mover.protocol import Load, Store

SIDES: Final = ("native", "nixl", "vllm-16", "files-16", "fio")
OURS: Final = ("native", "nixl")
THREADS: Final = 16
HEAD: Final = (
    "| path | pages | row | movers | | side | GB/s (quartiles) | CPU s/GB | us a row | / 16 threads | / fio |",
    "| --- | --- | ---: | ---: | --- | --- | --- | ---: | ---: | ---: | ---: |",
)


class Movers(Side):
    """Real movers that work at the same time."""

    def __init__(self, folders: list[Path], regions: list[HostRegion], backend: str) -> None:
        self._tiers: list[FileTier] = []
        for folder, region in zip(folders, regions, strict=True):
            self._tiers.append(FileTier(folder, region, "slabs", len(folders), direct=True, backend=backend))
        self.pids = [pid for tier in self._tiers for pid in tier.pids]

    def store(self) -> Took:
        return self._move(Store)

    def load(self) -> Took:
        return self._move(Load)

    def close(self) -> None:
        for tier in self._tiers:
            tier.close()

    def _move(self, kind: type[Store | Load]) -> Took:
        cpu_s, began_s = sum(map(process_seconds, self.pids)), time.perf_counter()
        jobs = [tier.begin(kind) for tier in self._tiers]
        for tier, of_tier in zip(self._tiers, jobs, strict=True):
            tier.wait(of_tier)
        return Took(time.perf_counter() - began_s, sum(map(process_seconds, self.pids)) - cpu_s)


class Together(Side):
    """Sides that work at the same time."""

    def __init__(self, sides: Sequence[Side]) -> None:
        self._sides = sides
        self._pool = ThreadPoolExecutor(len(sides))

    def store(self) -> Took | None:
        return self._all([side.store for side in self._sides])

    def load(self) -> Took | None:
        return self._all([side.load for side in self._sides])

    def close(self) -> None:
        self._pool.shutdown()
        for side in self._sides:
            side.close()

    def _all(self, calls: Sequence[Callable[[], Took | None]]) -> Took | None:
        took = list(self._pool.map(lambda call: call(), calls))
        own = [each for each in took if each is not None]
        return Took(max(each.seconds for each in own), sum(each.cpu_s for each in own)) if own else None


def make_side(name: str, folders: list[Path], regions: list[HostRegion]) -> Side:
    """Raises Unavailable."""
    for folder in folders:
        folder.mkdir(parents=True)
    if name in OURS:
        return Movers(folders, regions, "auto" if name == "native" else "posix")
    row_bytes, threads = regions[0].geometry.cell_payload, max(1, THREADS // len(regions))
    sides: list[Side] = []
    for folder, region in zip(folders, regions, strict=True):
        if name == "fio":
            sides.append(Fio(folder, region.rows, row_bytes))
        elif name == "vllm-16":
            sides.append(Vllm(folder, region, row_bytes, jobs=threads))
        else:
            sides.append(FileEach(folder, region, row_bytes, threads))
    return Together(sides)


@contextmanager
def loop_device(folder: Path, nbytes: int) -> Iterator[Path]:
    """An ext4 on a loop device over a file in `folder`, mounted. Root only."""
    image, place = folder / "image", folder / "mounted"
    place.mkdir()
    with image.open("wb") as file:
        file.truncate(nbytes)
    subprocess.run(["mkfs.ext4", "-q", "-F", "-E", "lazy_itable_init=0", image], check=True)
    subprocess.run(["mount", "-o", "loop", image, place], check=True)
    try:
        yield place
    finally:
        subprocess.run(["umount", place], check=True)
        image.unlink()


def measure(options: argparse.Namespace, paths: dict[str, list[Path]]) -> Iterator[tuple[str, dict[str, object]]]:
    """Lines of the table, and the numbers in them."""
    for place, pages, row_bytes, movers in product(paths, options.pages, options.rows, options.movers):
        count = max(1, (options.megabytes << 20) // row_bytes)
        geometry = Geometry(1, row_bytes)
        nbytes = movers * count * row_bytes
        with ExitStack() as stack:
            try:
                regions = [stack.enter_context(make_region(geometry, count, pages)) for _ in range(movers)]
            except Unavailable as error:
                print(f"pages {pages}: unavailable: {error}", flush=True)
                continue
            for region in regions:
                region.rows_view[:] = 9
            roots = [Path(stack.enter_context(tempfile.TemporaryDirectory(dir=path))) for path in paths[place]]
            sides: dict[str, Side] = {}
            for name in options.sides:
                folders = [roots[number % len(roots)] / name / str(number) for number in range(movers)]
                try:
                    sides[name] = make_side(name, folders, regions)
                except Unavailable as error:
                    print(f"{name}: unavailable: {error}", flush=True)
                    continue
                stack.callback(sides[name].close)
            turns = take_turns(sides, options.rounds, path=paths[place][0])
        threads = next((name for name in ("vllm-16", "files-16") if name in sides), "")
        for direction, name in product(("load", "store"), sides):
            taken = turns[direction][name]
            low, gb_s, high = rates(taken, nbytes)
            cpu = Spread.of([turn.cpu_s / nbytes * 1e9 for turn in taken])
            against = {
                what: ratio(taken, turns[direction][other]) if other in sides and name in OURS else None
                for what, other in (("threads", threads), ("fio", "fio"))
            }
            shown = " | ".join("" if value is None else f"{value:.2f}" for value in against.values())
            line = (
                f"| {place} | {pages} | {row_bytes >> 10} KiB | {movers} | {direction} | {name}"
                f" | {gb_s:.2f} ({low:.2f} to {high:.2f}) | {cpu.median:.3f} | {cpu.median * row_bytes / 1e3:.0f}"
                f" | {shown} |"
            )
            yield line, {
                "path": place, "pages": pages, "row_bytes": row_bytes, "movers": movers, "direction": direction,
                "side": name, "gb_s": (low, gb_s, high), "cpu_s_a_gb": cpu, **against,
            }  # fmt: skip


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--paths", type=Path, nargs="+", default=[Path("/dev/shm")])
    parser.add_argument("--together", action="store_true", help="movers spread over all paths, not a run each")
    parser.add_argument("--loop", action="store_true", help="also an ext4 on a loop device over the first path")
    parser.add_argument("--rows", type=int, nargs="+", help="payload sizes, in bytes; multiples of a page")
    parser.add_argument("--pages", choices=list(PAGES), nargs="+", default=["4k", "huge"])
    parser.add_argument("--movers", type=int, nargs="+", default=[1])
    parser.add_argument("--sides", choices=SIDES, nargs="+", default=SIDES)
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--megabytes", type=int, help="of each mover, in each turn")
    parser.add_argument("--quick", action="store_true", help="one round of few small rows: shows that all works")
    parser.add_argument("--out", type=Path, default=Path("bench-out/ceiling"))
    options = parser.parse_args()
    options.rows = options.rows or ([64 << 10] if options.quick else [2 << 20, 64 << 10])
    options.rounds = options.rounds or (1 if options.quick else 5)
    options.megabytes = options.megabytes or (1 if options.quick else 256)
    if any(row % PAGE for row in options.rows):
        parser.error(f"--rows: O_DIRECT needs multiples of {PAGE}")
    return options


def main() -> None:
    options = parse()
    options.out.mkdir(parents=True, exist_ok=True)
    about = {**machine(), "file_systems": {str(path): file_system(path) for path in options.paths}, "drives": drives()}
    lines = [*(f"- {name}: {value}" for name, value in about.items()), "", *HEAD]
    with ExitStack() as stack:
        paths = {str(path): [path] for path in options.paths}
        if options.together:
            paths = {"all": [*options.paths]}
        if options.loop:
            if not shutil.which("mkfs.ext4"):
                raise SystemExit("--loop needs mkfs.ext4, and root")
            folder = stack.enter_context(tempfile.TemporaryDirectory(dir=options.paths[0]))
            nbytes = 8 * max(options.movers) * (options.megabytes << 20) * len(options.sides) + (256 << 20)
            paths["loop"] = [stack.enter_context(loop_device(Path(folder), nbytes))]
        print(*lines, sep="\n")
        found = []
        for line, numbers in measure(options, paths):
            print(line, flush=True)
            lines.append(line)
            found.append(numbers)
    (options.out / "ceiling.json").write_text(json.dumps({"machine": about, "results": found}, indent=1))
    (options.out / "ceiling.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
