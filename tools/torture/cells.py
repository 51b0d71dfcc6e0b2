"""The steps of each cell of cells.toml, with its fault (`fault`) or, as its control, without."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Final

from tests.support.proxy import FaultKind, FaultProxy, ProxyFault
from tests.support.servers import seaweedfs_server
from tools.torture.disks import PassThrough, lacking, small_disk
from tools.torture.places import Bucket, flip, swap
from tools.torture.rig import PROMPT_ROWS, PROMPTS, NotApplicable, Run, prompts, runs, shared_memory, started_by
from tools.torture.sides import Running

MIB: Final = 1 << 20
DISK_MIB, LIMIT_BYTES, DISK_PROMPTS = 64, 48 * MIB, 77  # 192 MiB of prompts
# Of 2.5 MiB each: less than a fifth of the limit in each second, at which LMCache looks what to evict.
DISK_PAUSE_S = 0.4
STORES_S, LEFT_S = 30.0, 10.0
RESETS: Final = (2, 3, 4)


# --- rows changed while no engine runs --------------------------------------------------------------------------------


def flipped_byte(run: Run, fault: bool) -> None:
    _changed(run, lambda: flip(run.place) if fault else 0)


def swapped_rows(run: Run, fault: bool) -> None:
    _changed(run, lambda: swap(run.place) if fault else 0)


def _changed(run: Run, change: Callable[[], int]) -> None:
    if run.side.on == "s3":
        _on_s3(run)
    run.fill_once()
    changed = change()
    run.met = lambda: changed
    run.restart().stop()


def other_kv_dtype(run: Run, fault: bool) -> None:
    if "avx512f" not in Path("/proc/cpuinfo").read_text():
        raise NotApplicable("not run: vLLM for CPUs needs AVX-512 for KV caches in fp8")
    run.settings = {"kv_cache_dtype": "fp8_e5m2" if fault else "fp8_e4m3"}
    run.fill_once()
    run.settings = {"kv_cache_dtype": "fp8_e4m3"}
    run.restart().stop()


def other_weights(run: Run, fault: bool) -> None:
    run.fill_once()
    if fault:
        run.use_weights("second")
    run.restart().stop()


# --- file systems -----------------------------------------------------------------------------------------------------


def write_errors(run: Run, fault: bool) -> None:
    files = _fuse(run)
    files.let("eio" if fault else "none")
    run.fill()
    files.let("none")
    run.restart().stop()


def hanging_disk(run: Run, fault: bool) -> None:
    files = _fuse(run)
    run.fill_once()
    try:
        running = run.restart(after=lambda _: files.let("hang") if fault else None)
    finally:
        files.let("none")
    running.stop()


def _fuse(run: Run) -> PassThrough:
    if problem := lacking():
        raise NotApplicable(f"not run: {problem}")
    files = PassThrough(run.folder)
    run.stack.callback(files.close)
    run.stack.callback(files.let, "none")
    run.met = files.met
    run.where = files.place / "place"
    run.where.mkdir()
    return files


def bounded_disk(run: Run, fault: bool) -> None:
    run.capacity, run.pause_s = LIMIT_BYTES, DISK_PAUSE_S
    most = _fill_disk(run, fault)
    run.note = f"limit {LIMIT_BYTES // MIB} MiB, at most {most / MIB:.1f} MiB used"
    run.no_limit = fault and not run.side.limit
    if fault and run.side.limit and most > LIMIT_BYTES:
        run.above = f"{(most - LIMIT_BYTES) / MIB:.1f} MiB"


def full_disk(run: Run, fault: bool) -> None:
    run.capacity = 2 * DISK_MIB * MIB
    most = _fill_disk(run, fault)
    run.note = f"{most / MIB:.1f} MiB of {DISK_MIB} used"


def _fill_disk(run: Run, fault: bool) -> int:
    """Returns the most bytes that were in use."""
    if os.geteuid():
        raise NotApplicable("not run: needs root")
    disk = run.stack.enter_context(small_disk(run.folder, DISK_MIB))
    run.where = disk / "place"
    run.where.mkdir()
    stop, samples = threading.Event(), [0]

    def used() -> int:
        status = os.statvfs(disk)
        return (status.f_blocks - status.f_bfree) * status.f_frsize

    def sample(empty: int) -> None:
        while not stop.wait(0.005):
            samples.append(used() - empty)

    thread = threading.Thread(target=sample, args=(used(),))
    thread.start()
    try:
        run.fill(DISK_PROMPTS if fault else PROMPTS)
        # What was asked last is what an eviction by age has left.
        running = run.start()
        if fault:
            run.ask(running, DISK_PROMPTS, DISK_PROMPTS - PROMPTS, again=True)
        else:
            run.ask(running, again=True)
        running.stop()
    finally:
        stop.set()
        thread.join()
    return max(samples)


# --- processes --------------------------------------------------------------------------------------------------------


def kill_9(run: Run, fault: bool) -> None:
    before = set(shared_memory())
    running = run.start()
    run.ask(running, PROMPTS // 2)
    stored = run.settle(running, PROMPTS // 2 * PROMPT_ROWS)
    if fault:
        running.engine.begin_at_once(prompts()[PROMPTS // 2 :])
        until = time.monotonic() + STORES_S
        while (more := len(run.place.rows()) - stored) <= 0 and time.monotonic() < until:
            time.sleep(0.001)
        under_way = more > 0 and not running.engine.answers
        run.met = lambda: int(under_way)
        helpers = started_by(running.engine.pid)
        running.engine.kill()
        until = time.monotonic() + LEFT_S
        while (alive := [pid for pid in helpers if runs(pid)]) and time.monotonic() < until:
            time.sleep(0.1)
        running.stop_server()
        run.left = f"{len(alive)} processes" if alive else ""
        run.note = f"{stored} rows before, {len(helpers)} processes of the engine's own. "
        for pid in alive:
            os.kill(pid, signal.SIGKILL)
    else:
        running.stop()
    again = run.start()
    run.ask(again, PROMPTS // 2, again=True)
    run.ask(again, PROMPTS, PROMPTS // 2)  # whatever is there of what was being stored
    again.stop()
    left = {name: size for name, size in shared_memory().items() if name not in before}
    for name in left:  # as nobody else does
        with suppress(FileNotFoundError):
            (Path("/dev/shm") / name).unlink()
    if left:
        run.left = f"{sum(left.values()) / MIB:.0f} MiB in /dev/shm"


def dead_mover(run: Run, fault: bool) -> None:
    def kill(running: Running) -> None:
        pids = running.helpers()
        if fault and not pids:
            raise NotApplicable("threads of the engine move its rows: no process of their own")
        for pid in pids if fault else []:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    run.fill_once()
    run.restart(after=kill).stop()


def reset(run: Run, fault: bool) -> None:
    resets = RESETS if fault else ()
    run.fill_once()
    running = run.start()
    run.ask_at_once(running, resets, again=True)  # which load
    run.ask_at_once(running, resets, PROMPTS)  # which store
    run.ask(running)
    run.settle(running, 2 * PROMPTS * PROMPT_ROWS)
    running.stop()
    running = run.start()
    run.ask(running, 2 * PROMPTS)
    running.stop()


def two_engines(run: Run, fault: bool) -> None:
    run.engines = 2
    one = run.start()
    if fault:
        other = run.beside(one)
        run.ask_both(one, other)
        run.settle(other, PROMPTS * PROMPT_ROWS)
        other.engine.stop()
    else:
        run.ask(one)
    run.settle(one, PROMPTS * PROMPT_ROWS)
    one.stop()
    run.restart().stop()


# --- S3 ---------------------------------------------------------------------------------------------------------------


def s3_503(run: Run, fault: bool) -> None:
    _s3_fault(run, fault, ProxyFault(FaultKind.ERROR_STATUS))


def s3_lies(run: Run, fault: bool) -> None:
    _s3_fault(run, fault, ProxyFault(FaultKind.BIT_FLIP, methods=frozenset(["GET"])))


def s3_stops(run: Run, fault: bool) -> None:
    _s3_fault(run, fault, ProxyFault(FaultKind.BLACK_HOLE))


def _s3_fault(run: Run, fault: bool, injected: ProxyFault) -> None:
    proxy = _on_s3(run)
    run.fill_once()
    run.met = proxy.injected.total
    try:
        running = run.restart(after=lambda _: proxy.inject(injected) if fault else None)
    finally:
        proxy.clear()
    running.stop()


def _on_s3(run: Run) -> FaultProxy:
    server = run.stack.enter_context(seaweedfs_server())
    proxy = run.stack.enter_context(FaultProxy(server.port))
    run.where = Bucket(server, server.make_bucket("torture"), proxy.endpoint, server.env)
    return proxy


STEPS: Final[dict[str, Callable[[Run, bool], None]]] = {
    "flipped-byte": flipped_byte,
    "swapped-rows": swapped_rows,
    "other-kv-dtype": other_kv_dtype,
    "other-weights": other_weights,
    "write-errors": write_errors,
    "hanging-disk": hanging_disk,
    "bounded-disk": bounded_disk,
    "full-disk": full_disk,
    "kill-9": kill_9,
    "dead-mover": dead_mover,
    "reset": reset,
    "two-engines": two_engines,
    "s3-503": s3_503,
    "s3-lies": s3_lies,
    "s3-stops": s3_stops,
}
