"""Speed of copies between GPU blocks and region rows, as a fraction of one long copy of page-locked memory.

    python -m bench.gpu_swap [--quick] [--fragments 2048,16384] [--blocks 16,512] [--ids random|sequential]
                             [--rounds N] [--json FILE] [--plot FILE]

A block's pages are scattered on the GPU, one per layer (16 layers), and contiguous in its row. Compared with this
package's copy strategies, in the same process and on the same memory: the batch that vLLM hands to the copy engine (a
descriptor per layer and block, built anew for every transfer), a reimplementation of its Triton kernel, and a loop of
torch copies. The bytes that each contender copies are verified, with poisoned destinations, before it is timed. Times
are wall-clock on the host, from the call until the last byte has arrived: they include the CPU's work per transfer.
Needs neither vLLM nor a network.
"""

from __future__ import annotations

import argparse
import json
import mmap
import platform
import statistics
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench.gpu_swap_peers import Call, torch_contenders, vllm_batch
from nixl_tiers.base.chunk import Geometry
from nixl_tiers.swap.cuda import CudaSwap
from nixl_tiers.swap.driver import Device, Driver, open_driver
from nixl_tiers.swap.plan import CopyPlan, Segment, Share
from nixl_tiers.swap.self_check import choose
from nixl_tiers.swap.strategies import NAMES

LAYERS = 16
SUB_BLOCKS = 8  # blocks per row
ROOM_BYTES = 2 << 30  # of the region, and of the GPU's blocks
QUICK_ROOM_BYTES = 1 << 30
FRAGMENTS = (2048, 4096, 8192, 16384, 28672, 65536, 131072, 524288, 2097152)
BLOCKS = (16, 64, 512, 2048, 8192)
DIRECTIONS = ("store", "load")


class Machine:
    """The GPU with its blocks and a page-aligned region, both of `room_bytes`, on which the ceiling is measured."""

    def __init__(self, driver: Driver, room_bytes: int) -> None:
        self.driver = driver
        self.device = Device(driver, 0)
        self.room_bytes = room_bytes
        self._mapping = mmap.mmap(-1, room_bytes * 5 // 4 + (1 << 20))
        with suppress(OSError, AttributeError):
            self._mapping.madvise(mmap.MADV_HUGEPAGE)
        self.region = np.frombuffer(self._mapping, np.uint8)
        self.region[:] = 1
        with self.device.current():
            self.blocks = driver.allocate(room_bytes)
            self.streams = [driver.stream(urgent=False) for _ in range(2)]

    def ceiling(self, nbytes: int) -> dict[str, float]:
        """GB/s of one long copy of page-locked memory in each direction, and of both at once (their sum)."""
        driver, host = self.driver, self.region.ctypes.data
        half = nbytes // 2
        with self.device.current():
            driver.register(host, nbytes)

            def copies(*which: tuple[int, int, int]) -> Call:
                def run() -> None:
                    with self.device.current():
                        for stream, (to, source, size) in zip(self.streams, which, strict=False):
                            driver.copy(to, source, size, stream)
                        for stream in self.streams:
                            driver.synchronize(stream)

                return run

            found = {
                "store": nbytes / best_s(copies((host, self.blocks, nbytes)), 5) / 1e9,
                "load": nbytes / best_s(copies((self.blocks, host, nbytes)), 5) / 1e9,
                "both": nbytes
                / best_s(copies((host, self.blocks, half), (self.blocks + half, host + half, half)), 5)
                / 1e9,
            }
            driver.unregister(host)
        return found


class Case:
    """One fragment size and one number of blocks."""

    def __init__(self, machine: Machine, fragment: int, blocks: int, ids: str) -> None:
        self.machine, self.fragment, self.blocks = machine, fragment, blocks
        geometry = Geometry(1, LAYERS * fragment * SUB_BLOCKS, SUB_BLOCKS)
        room = min(machine.room_bytes // (LAYERS * fragment), machine.region.size // geometry.row_bytes * SUB_BLOCKS)
        self.fits = blocks <= room
        rows = -(-blocks // SUB_BLOCKS)
        self.n_rows = rows
        stride = room * fragment
        self.segments = [
            Segment(machine.blocks + i * stride, fragment, fragment, i * fragment, room) for i in range(LAYERS)
        ]
        rng = np.random.default_rng(0)
        self.block_ids = rng.permutation(room)[:blocks] if ids == "random" else np.arange(blocks)
        order = rng.permutation(rows) if ids == "random" else np.arange(rows)
        if not self.fits:
            return
        self.plan = CopyPlan([self.segments], geometry, Share(0), machine.region.ctypes.data, rows)
        self.places = (order[:, None] * SUB_BLOCKS + np.arange(SUB_BLOCKS)).reshape(-1)[:blocks].astype(np.uint32)
        self.nbytes = blocks * LAYERS * fragment
        self.engine = [
            segment.address + self.block_ids.astype(np.uint64) * np.uint64(fragment) for segment in self.segments
        ]
        cells = self.plan.place_offsets(self.places).astype(np.uint64) + np.uint64(machine.region.ctypes.data)
        self.rows = [cells + np.uint64(segment.offset) for segment in self.segments]

    def check(self, store: Call, load: Call) -> None:
        """Store random bytes, poison the GPU blocks, load them back; rows and blocks of some layers are compared."""
        driver, machine = self.machine.driver, self.machine
        sample = range(0, LAYERS, max(1, LAYERS // 4))
        pages = {i: np.random.default_rng(i).integers(0, 256, self.blocks * self.fragment, np.uint8) for i in sample}
        span = int(self.block_ids.max() + 1) * self.fragment

        def put(layer: int, data: np.ndarray) -> None:
            whole = np.zeros(span, np.uint8)
            whole.reshape(-1, self.fragment)[self.block_ids] = data.reshape(-1, self.fragment)
            with machine.device.current():
                driver.upload(self.segments[layer].address, whole)

        for layer, data in pages.items():
            put(layer, data)
        machine.region[: self.n_rows * self.plan.geometry.row_bytes] = 0xEE
        store()
        for layer, data in pages.items():
            for place, page in zip(self.rows[layer].tolist(), data.reshape(-1, self.fragment), strict=True):
                here = place - machine.region.ctypes.data
                if not np.array_equal(machine.region[here : here + self.fragment], page):
                    raise WrongBytes
            put(layer, np.full_like(data, 0x77))
        load()
        for layer, data in pages.items():
            whole = np.empty(span, np.uint8)
            with machine.device.current():
                driver.download(self.segments[layer].address, whole)
            if not np.array_equal(whole.reshape(-1, self.fragment)[self.block_ids].ravel(), data):
                raise WrongBytes


class WrongBytes(Exception):
    """A contender has copied wrong bytes."""


def ours(case: Case, swap: CudaSwap) -> dict[str, Call]:
    return {
        "store": lambda: swap.store(0, case.block_ids, case.places).wait(),
        "load": lambda: swap.load(0, case.block_ids, case.places).wait(),
    }


def best_s(call: Call, rounds: int) -> float:
    return min(timed(call) for _ in range(rounds))


def timed(call: Call) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def measure(case: Case, ceiling: dict[str, float], rounds: int, has_torch: bool) -> dict[str, Any]:
    """GB/s and fraction of the ceiling, by contender and direction: medians of rounds in which contenders alternate."""
    driver = case.machine.driver
    swaps = {name: CudaSwap(case.plan, compute_stream=lambda: 0, driver=driver, strategies=(name,)) for name in NAMES}
    one = swaps["copy_engine"]
    (chosen,) = choose(one._device, case.plan, one._pinned, one.kernels)
    contenders = {name: ours(case, swap) for name, swap in swaps.items()}
    if driver.batches:
        contenders["vLLM's batch"] = vllm_batch(case)
    if has_torch:
        contenders |= torch_contenders(case)
    result: dict[str, Any] = {
        "fragment_bytes": case.fragment,
        "blocks": case.blocks,
        "chosen": chosen,
        "speeds": {},
    }
    for name in list(contenders):
        try:
            case.check(contenders[name]["store"], contenders[name]["load"])
        except WrongBytes:
            result.setdefault("wrong", []).append(name)
            del contenders[name]
    times: dict[str, dict[str, list[float]]] = {name: {d: [] for d in DIRECTIONS} for name in contenders}
    for _ in range(rounds):
        for name, calls in contenders.items():
            for direction in DIRECTIONS:
                times[name][direction].append(timed(calls[direction]))
    for name, by_direction in times.items():
        speeds = {d: case.nbytes / statistics.median(values) / 1e9 for d, values in by_direction.items()}
        shares = {d: speeds[d] / ceiling[d] for d in DIRECTIONS}
        result["speeds"][name] = {"gb_per_s": speeds, "share": shares}
    for swap in swaps.values():
        swap.close()
    return result


def interference(machine: Machine, quick: bool) -> list[dict[str, Any]]:
    """Latency of a large matrix product, and of small kernels as in decoding, during copies by each strategy."""
    import torch

    case = Case(machine, 8192, 1024, "random")
    big = torch.randn((8192, 8192), device="cuda", dtype=torch.bfloat16)
    small = [torch.randn((4096, 4096), device="cuda", dtype=torch.bfloat16) for _ in range(8)]
    token = torch.randn((32, 4096), device="cuda", dtype=torch.bfloat16)

    def gemm() -> None:
        torch.mm(big, big)

    def decode() -> None:
        state = token
        for weight in small:
            state = torch.tanh(state @ weight)

    # Copies run on a stream of their own, concurrently with the work instead of after it.
    copy_stream = machine.streams[0]
    found = []
    steps = 100 if quick else 400
    for what, step in (("gemm", gemm), ("decode", decode)):
        for name in ("nothing", *NAMES):
            swap = None
            if name != "nothing":
                swap = CudaSwap(
                    case.plan, compute_stream=lambda: copy_stream, driver=machine.driver, strategies=(name,)
                )
            for direction in ("store", "load") if swap else ("",):
                move = getattr(swap, direction) if swap else None
                in_flight: list[Any] = []
                samples = []
                for turn in range(steps + 10):
                    while move and len(in_flight) < 3:
                        in_flight.append(move(0, case.block_ids, case.places))
                    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                    begin.record()
                    step()
                    end.record()
                    end.synchronize()
                    in_flight = [transfer for transfer in in_flight if not transfer.done()]
                    if turn >= 10:
                        samples.append(begin.elapsed_time(end))
                for transfer in in_flight:
                    transfer.wait()
                samples.sort()
                p50, p99 = samples[len(samples) // 2], samples[int(len(samples) * 0.99)]
                found.append({"work": what, "beside": name, "direction": direction, "p50_ms": p50, "p99_ms": p99})
            if swap:
                swap.close()
    return found


def plot(results: list[dict[str, Any]], path: Path) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    most = max(result["blocks"] for result in results)
    figure, axes = plt.subplots(1, 2, figsize=(12, 5), sharey=True)
    for axis, direction in zip(axes, DIRECTIONS, strict=True):
        chosen = [result for result in results if result["blocks"] == min(512, most)] or results
        for name in sorted({name for result in chosen for name in result["speeds"]}):
            points = [
                (r["fragment_bytes"] / 1024, r["speeds"][name]["share"][direction])
                for r in chosen
                if name in r["speeds"]
            ]
            axis.plot(*zip(*points, strict=True), marker="o", label=name)
        axis.set(xscale="log", xlabel="page size of a layer (KiB)", title=direction, ylim=(0, 1.1))
        axis.axhline(1, color="grey", linewidth=0.5)
    axes[0].set_ylabel("fraction of one long page-locked copy")
    axes[1].legend()
    figure.tight_layout()
    figure.savefig(path)


def sweep(
    driver: Driver,
    room_bytes: int,
    fragments: list[int],
    blocks: list[int],
    *,
    ids: str,
    rounds: int,
    has_torch: bool,
    quick: bool,
    deadline_s: float,
) -> dict[str, Any]:
    """Measure the ceiling, the interference with compute, and all cases. Cases skipped by the deadline are counted."""
    began = time.monotonic()
    machine = Machine(driver, room_bytes)
    ceiling = machine.ceiling(min(1 << 30, room_bytes))
    print("one long copy, GB/s: " + ", ".join(f"{name} {speed:.1f}" for name, speed in ceiling.items()), flush=True)
    beside = interference(machine, quick) if has_torch else []
    for one in beside:
        print("{work} beside {beside} {direction}: p50 {p50_ms:.3f} ms, p99 {p99_ms:.3f} ms".format(**one), flush=True)
    results, cut = [], 0
    for fragment in fragments:
        for n in blocks:
            case = Case(machine, fragment, n, ids)
            if not case.fits:
                continue
            if time.monotonic() - began > deadline_s:
                cut += 1
                continue
            result = measure(case, ceiling, rounds, has_torch)
            results.append(result)
            shares = "  ".join(
                f"{name} {speed['share']['store']:.2f}/{speed['share']['load']:.2f}"
                for name, speed in result["speeds"].items()
            )
            print(f"{fragment:8d} B x {n:5d}: {shares}  chosen {result['chosen']}", flush=True)
            for name in result.get("wrong", ()):
                print(f"    {name} COPIED WRONG BYTES", flush=True)
    about = {
        "gpu": driver.device_name(0),
        "driver": driver.version,
        "machine": platform.machine(),
        "date": time.strftime("%Y-%m-%d"),
        "ids": ids,
        "layers": LAYERS,
        "cut_off_by_the_deadline": cut,
    }
    return {**about, "ceiling_gb_per_s": ceiling, "interference": beside, "results": results}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer cases, at most five minutes")
    parser.add_argument("--fragments", help="bytes, comma-separated")
    parser.add_argument("--blocks", help="block counts, comma-separated")
    parser.add_argument("--ids", choices=["random", "sequential"], default="random")
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    arguments = parser.parse_args()
    import torch

    if not torch.cuda.is_available():
        print("no CUDA device: nothing to measure")
        return
    torch.cuda.init()
    fragments = [int(n) for n in arguments.fragments.split(",")] if arguments.fragments else list(FRAGMENTS)
    default = (16, 64, 512) if arguments.quick else BLOCKS
    blocks = [int(n) for n in arguments.blocks.split(",")] if arguments.blocks else list(default)
    rounds = arguments.rounds or (5 if arguments.quick else 11)
    deadline_s = 300.0 if arguments.quick else float("inf")
    found = sweep(
        open_driver(),
        QUICK_ROOM_BYTES if arguments.quick else ROOM_BYTES,
        fragments,
        blocks,
        ids=arguments.ids,
        rounds=rounds,
        has_torch=True,
        quick=arguments.quick,
        deadline_s=deadline_s,
    )
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=1))
    if arguments.plot:
        plot(found["results"], arguments.plot)


if __name__ == "__main__":
    main()
