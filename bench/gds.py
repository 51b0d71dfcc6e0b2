"""Are loads from files straight into GPU memory worth having on this machine? Measures, and ends with one answer.

    python -m bench.gds --path /mnt/nvme [--out gds-report] [--quick] [--gpu 0] [--rows 262144,2097152] [--depths 1,64]

Compared, in turns: the path that exists (POSIX through the file tier's mover to rows of the page-locked host region,
verified there, then scattered to blocks on the GPU) and GDS_MT, NIXL's plugin of GPUDirect Storage, into GPU memory.
The second one neither verifies nor scatters, so its figures flatter it a little. Rows of 256 KiB to 16 MiB, loads of 1
to 64 rows; alone and beside a load of small kernels like decoding. GB/s, CPU seconds a GB of all processes of a path,
median and 99th percentile of a load. Ceilings by fio, and by NVIDIA's gdsio where it is installed.

What is missing is named as "unavailable: ..." and the rest is measured: without a GPU, the way to host memory alone.
Writes report.md to the directory --out: attach it to an issue. `make test-gds DIR=...` runs all of it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import tempfile
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from bench.engine_process import EngineProcess
from bench.gds_advice import Case, Figures, Findings, ceilings, recommend, report, size, table
from bench.gds_ceilings import fio, gdsio
from bench.gds_paths import PATHS, Setup
from bench.machine import file_system, gpu, machine
from nixl_tiers.cli.gds.report import Report, inspect
from nixl_tiers.cli.gds.verdict import Kind

ROWS: Final = (256 << 10, 1 << 20, 4 << 20, 16 << 20)
QUICK_ROWS: Final = (256 << 10, 2 << 20, 16 << 20)
DEPTHS: Final = (1, 4, 16, 64)
QUICK_DEPTHS: Final = (1, 8, 64)
START_S: Final = 120.0  # for a path to fill its files and to verify a load
EXTRA_S: Final = 60.0

Paths = dict[str, "Child"]


class Child(EngineProcess):
    """A child that is killed if it does not answer: cuFile's driver has spun for ever while it opened."""

    def __init__(self, module: str, *arguments: str, log: Path) -> None:
        super().__init__(module, *arguments, log=log)
        self.ready: dict[str, Any] = {"unavailable": "it was not started"}

    def start(self, deadline_s: float = START_S) -> None:
        try:
            self.ready = self.answer_within(deadline_s)
        except SystemExit as error:
            self.ready = {"unavailable": str(error)}

    def ask(self, request: Any) -> None:
        with contextlib.suppress(BrokenPipeError):
            print(json.dumps(request), file=self._process.stdin, flush=True)

    def answer_within(self, deadline_s: float) -> Any:
        timer = threading.Timer(deadline_s, self._process.kill)
        timer.start()
        try:
            return self.answer()
        finally:
            timer.cancel()


class Bench:
    def __init__(self, arguments: argparse.Namespace, doctor: Report, folder: Path, log: Path) -> None:
        self._arguments, self._folder, self._log = arguments, folder, log
        self.missing: dict[str, str] = {}
        gpus = doctor.probes.gpus.all("gpu")
        self._gpu = arguments.gpu if arguments.gpu in gpus else -1
        if self._gpu < 0:
            self.missing["gpu"] = doctor.probes.gpus.error or "the CUDA driver knows none"
        elif doctor.verdict.kind is Kind.UNAVAILABLE:  # not to be tried: it may hang
            self.missing["direct"] = doctor.verdict.reason
        self.steps_alone: Figures = {}
        self.ceilings: list[dict[str, Any]] = []

    def run(self) -> list[Case]:
        cases = []
        with ExitStack() as stack:
            decode = self._decode(stack)
            for payload_bytes in self._arguments.rows:
                cases += self._size(payload_bytes, decode)
        return cases

    def _decode(self, stack: ExitStack) -> Child | None:
        if self._gpu < 0:
            return None
        child = Child("bench.gds_decode", str(self._gpu), log=self._log)
        stack.callback(child.close)
        child.start()
        if "unavailable" in child.ready:
            self.missing["decode-like load"] = child.ready["unavailable"]
            return None
        child.ask(self._arguments.seconds)
        self.steps_alone = child.answer_within(EXTRA_S)
        return child

    def _size(self, payload_bytes: int, decode: Child | None) -> Iterator[Case]:
        """All depths of one size of rows."""
        with tempfile.TemporaryDirectory(prefix="nixl-tiers-gds-", dir=self._folder) as name, ExitStack() as stack:
            folder = Path(name)
            rows = max(*self._arguments.depths, (self._arguments.megabytes << 20) // payload_bytes)
            paths = self._paths(stack, folder, payload_bytes, rows)
            for depth in self._arguments.depths:
                case = Case(payload_bytes, depth)
                self._rounds(case, paths, decode)
                yield case
            stack.close()
            self._ceilings(folder, payload_bytes)

    def _paths(self, stack: ExitStack, folder: Path, payload_bytes: int, rows: int) -> Paths:
        found = {}
        for kind in PATHS:
            if kind in self.missing:
                continue
            (folder / kind).mkdir()
            setup = Setup(str(folder / kind), payload_bytes, rows, max(self._arguments.depths), self._gpu)
            child = Child("bench.gds_paths", kind, json.dumps(asdict(setup)), log=self._log)
            stack.callback(child.close)
            child.start()  # one after the other, since each fills its files
            if "unavailable" in child.ready:
                self.missing[kind] = child.ready["unavailable"]
                print(f"{kind}: unavailable: {self.missing[kind]}", flush=True)
            else:
                found[kind] = child
        return found

    def _rounds(self, case: Case, paths: Paths, decode: Child | None) -> None:
        """Medians of rounds in which the paths alternate."""
        alone: dict[str, list[Figures]] = {}
        beside: dict[str, list[Figures]] = {}
        steps: dict[str, list[Figures]] = {}
        for number in range(self._arguments.rounds):
            for kind in sorted(paths, reverse=bool(number % 2)):
                try:
                    self._measure(paths[kind], case.depth, alone.setdefault(kind, []))
                    if decode:
                        decode.ask(self._arguments.seconds)
                        self._measure(paths[kind], case.depth, beside.setdefault(kind, []))
                        steps.setdefault(kind, []).append(decode.answer_within(EXTRA_S))
                except SystemExit as error:  # this path has ended, or was killed: the other one is still of use
                    self.missing[kind] = str(error)
                    del paths[kind]
        for into, measured in ((case.alone, alone), (case.beside, beside), (case.steps, steps)):
            into.update({kind: median_of(figures) for kind, figures in measured.items() if figures})
        speeds = (f"{kind} {figures['gb_per_s']:.2f} GB/s" for kind, figures in case.alone.items())
        print(f"{size(case.payload_bytes)}, depth {case.depth}: {', '.join(speeds)}", flush=True)

    def _measure(self, child: Child, depth: int, into: list[Figures]) -> None:
        child.ask([depth, self._arguments.seconds])
        into.append(child.answer_within(self._arguments.seconds + EXTRA_S))

    def _ceilings(self, folder: Path, row_bytes: int) -> None:
        """On a file that fio and gdsio have for themselves, deep enough for both."""
        depth, seconds, threads = max(self._arguments.depths), self._arguments.seconds, 16
        file = folder / "ceiling"
        with file.open("wb") as out:
            for _ in range(self._arguments.megabytes):
                out.write(bytes(1 << 20))
        self._ceiling("fio", row_bytes, depth, fio(file, row_bytes, depth, seconds))
        if self._gpu >= 0:
            self._ceiling("gdsio", row_bytes, threads, gdsio(file, row_bytes, threads, seconds, self._gpu))
        else:
            self.missing.setdefault("gdsio", "there is no GPU")

    def _ceiling(self, program: str, row_bytes: int, depth: int, found: dict[str, Any]) -> None:
        self.ceilings.append({"program": program, "row_bytes": row_bytes, "depth": depth, **found})
        if "unavailable" in found:
            self.missing[program] = found["unavailable"]


def median_of(rounds: list[Figures]) -> Figures:
    return {name: statistics.median(figures[name] for figures in rounds) for name in rounds[0]}


def numbers(text: str) -> list[int]:
    return [int(word) for word in text.split(",")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--path", type=Path, help="a directory on the drives to measure (default: a temporary one)")
    parser.add_argument("--out", type=Path, default=Path("gds-report"), help="where report.md goes")
    parser.add_argument("--quick", action="store_true", help="fewer cases and one round: about two minutes")
    parser.add_argument("--gpu", type=int, default=0, help="the GPU's ordinal")
    parser.add_argument("--rows", type=numbers, help="payload bytes of a row, comma-separated")
    parser.add_argument("--depths", type=numbers, help="rows of one load, comma-separated")
    parser.add_argument("--megabytes", type=int, help="of rows of each size, in each path's files")
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--seconds", type=float, help="of each measurement")
    arguments = parser.parse_args()
    arguments.rows = arguments.rows or (QUICK_ROWS if arguments.quick else ROWS)
    arguments.depths = arguments.depths or (QUICK_DEPTHS if arguments.quick else DEPTHS)
    arguments.rounds = arguments.rounds or (1 if arguments.quick else 3)
    arguments.seconds = arguments.seconds or (1.0 if arguments.quick else 2.0)
    arguments.megabytes = arguments.megabytes or (1024 if arguments.quick else 4096)
    arguments.out.mkdir(parents=True, exist_ok=True)
    log = arguments.out / "log"
    log.unlink(missing_ok=True)
    with tempfile.TemporaryDirectory(prefix="nixl-tiers-gds-", dir=arguments.path) as name:
        folder = Path(name)
        doctor = inspect(arguments.path or folder, arguments.gpu)
        print(f"GPUDirect Storage: {doctor.verdict}", flush=True)
        about = {**machine(), "gpu": gpu() or "none", "directory": arguments.path, "disk": file_system(folder)}
        bench = Bench(arguments, doctor, folder, log)
        cases = bench.run()
    text = "\n".join(doctor.lines())
    found = Findings(about, str(doctor.verdict), text, cases, bench.ceilings, bench.steps_alone, bench.missing)
    print("\n".join((*table(found), *ceilings(found))))
    for what, why in found.missing.items():
        print(f"{what}: unavailable: {why}")
    file = arguments.out / "report.md"
    file.write_text(report(found))
    print(f"report to attach: {file}")
    print(recommend(found))


if __name__ == "__main__":
    main()
