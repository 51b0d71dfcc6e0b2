"""Kernel launches beside a thread that page-locks memory, and page-locking while a graph is captured."""

from __future__ import annotations

import contextlib
import mmap
import threading
import time
from collections.abc import Callable

import numpy as np

from nixl_tiers.swap.driver import CudaError, Driver
from tools.gpu_day.here import Gpu, Here

FLAGS = 3  # portable and mapped
LAUNCHES = 64  # before they are waited for: a full queue would block


def run(here: Here) -> None:
    gpu, piece_bytes = here.gpu, here.size(1 << 30, 1 << 20)
    launch, span_s = gpu.small_kernel(), here.size(3.0, 0.05)
    memory = mmap.mmap(-1, piece_bytes)
    np.frombuffer(memory, np.uint8)[:] = 1
    address = np.frombuffer(memory, np.uint8).ctypes.data
    here.left_out("latencies: kernels are the CPU's")
    _launches(gpu, launch, span_s / 4)
    here.tell("launch_us_alone", _launches(gpu, launch, span_s))

    stop, times = threading.Event(), list[float]()

    def register() -> None:
        with gpu.device.current() as driver:
            while not (stop.is_set() and times):
                begin_s = time.perf_counter()
                driver.register(address, piece_bytes)
                times.append(time.perf_counter() - begin_s)
                driver.unregister(address)

    thread = threading.Thread(target=register)
    thread.start()
    beside = _launches(gpu, launch, span_s)
    stop.set()
    thread.join()
    here.tell("launch_us_beside_registering", beside)
    here.tell("register_1_gib_s", {"median": float(np.median(times)), "max": max(times), "pieces": len(times)})
    # The mode that may break the capture comes last.
    here.tell("capture_beside_relaxed", _capture(gpu, launch, lambda driver: driver.register(address, piece_bytes)))
    with contextlib.suppress(CudaError):  # there is nothing to undo where it was refused
        gpu.driver.unregister(address)
    plain = (address, piece_bytes, FLAGS)
    here.tell(
        "capture_beside_plain", _capture(gpu, launch, lambda driver: driver._call("cuMemHostRegister_v2", *plain))
    )


def _launches(gpu: Gpu, launch: Callable[[], object], span_s: float) -> dict[str, float]:
    """Microseconds that a launch takes its caller."""
    times, end_s = list[float](), time.perf_counter() + span_s
    while time.perf_counter() < end_s:
        for _ in range(LAUNCHES):
            begin_s = time.perf_counter()
            launch()
            times.append(time.perf_counter() - begin_s)
        gpu.after().synchronize()
    median, p99 = np.percentile(times, (50, 99)) * 1e6
    return {"median": round(float(median), 1), "p99": round(float(p99), 1), "max": round(max(times) * 1e6, 1)}


def _capture(gpu: Gpu, launch: Callable[[], object], register: Callable[[Driver], None]) -> dict[str, str]:
    """What became of a registration by another thread during a capture, of the capture, and of the graph."""
    found = {"registration": "good", "capture": "good", "replay": "good"}

    def beside() -> None:
        try:
            with gpu.device.current() as driver:
                register(driver)
        except CudaError as error:
            found["registration"] = str(error)

    def work() -> None:
        launch()
        thread = threading.Thread(target=beside)
        thread.start()
        thread.join()
        launch()

    stage = "capture"
    try:
        graph = gpu.graph(work)
        stage = "replay"
        graph.replay()
        gpu.after().synchronize()
    except RuntimeError as error:
        found[stage] = str(error).splitlines()[0]
        found.pop("replay", None)
    return found
