"""NVIDIA's cuFile in compatibility mode, through NIXL's GDS_MT plugin, with the GPU's own memory: every byte compared.

Says nothing about GPU-direct speed."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from nixl_tiers.tiers.nixl_agent import Agent, AgentError
from tests.support.no_gpu import NoCuFileError, NoGpu, build, counters
from tools.gpu_day.carried import PACKED
from tools.gpu_day.here import Here, Skip
from tools.gpu_day.report import FAKE

READY = "NIXL_TIERS_GPU_DAY_CUFILE"  # the folder for files, in a process that has the environment that cuFile needs
POLL_S = 1e-4


def run(here: Here) -> None:
    if READY not in os.environ:
        _restart(here)
    gpu, piece = here.gpu, here.size(16 << 20, 64 << 10)
    pieces = here.size(32, 4)
    here.left_out("cuFile's DMA, and times: device memory is the CPU's")
    try:
        agent = Agent.gds_mt()
    except AgentError as error:
        raise Skip(f"{error}: packed for another Python, or libraries are missing") from error
    file = Path(os.environ[READY]) / "rows"
    nbytes = piece * pieces
    file.write_bytes(bytes(nbytes))
    with gpu.device.current() as driver:  # cuFile registers memory of the current context
        slots = [driver.allocate(piece) for _ in range(pieces)]
        wanted = np.random.default_rng(0).integers(0, 256, nbytes, np.uint8)
        for number, slot in enumerate(slots):
            driver.upload(slot, wanted[number * piece :][:piece])
            agent._register([(slot, piece, 0, "")], "VRAM")
        device = agent.register_file(str(file), nbytes, direct=True).devices[0]
        local = np.array([[slot, piece, 0] for slot in slots], np.uint64)
        remote = np.array([[number * piece, piece, device] for number in range(pieces)], np.uint64)
        before = counters()
        for operation in ("WRITE", "READ"):
            seconds = _move(here, agent._api, operation, local, remote)
            here.tell(f"{operation.lower()}_gb_per_s", nbytes / seconds / 1e9)
            if operation == "WRITE":
                here.tell("file", "right" if np.array_equal(np.fromfile(file, np.uint8), wanted) else "WRONG BYTES")
                for slot in slots:
                    driver.fill(slot, 0x77, piece)
        found = np.empty(nbytes, np.uint8)
        for number, slot in enumerate(slots):
            driver.download(slot, found[number * piece :][:piece])
        here.tell("gpu_memory", "right" if np.array_equal(found, wanted) else "WRONG BYTES")
        after = counters()
        here.tell("through_cufile", {"written": after.written - before.written, "read": after.read - before.read})
    shutil.rmtree(file.parent)


def _move(here: Here, api: Any, operation: str, local: Any, remote: Any) -> float:
    lists = api.get_xfer_descs(local, "VRAM"), api.get_xfer_descs(remote, "FILE")
    handle = api.initialize_xfer(operation, *lists, "mover", backends=["GDS_MT"])
    begin_s = time.perf_counter()
    state = api.transfer(handle)
    while state == "PROC" and here.left_s > 0:
        time.sleep(POLL_S)
        state = api.check_xfer_state(handle)
    if state != "DONE":
        raise RuntimeError(f"{operation} ended as {state}")
    return time.perf_counter() - begin_s


def _restart(here: Here) -> None:
    """This process again, with cuFile's libraries and its configuration. Does not return."""
    flavours = [name for name in ("nixl_cu13", "nixl_cu12") if importlib.util.find_spec(name)]
    if not flavours:
        raise Skip("there is no NIXL here: `make gpu-day-wheels` packs it")
    runtime = f"libcudart.so.{flavours[0][-2:]}"
    folder = Path(tempfile.mkdtemp(prefix="gpu-day-"))
    libraries = [_folder_of("libcufile.so.0")] + ([] if here.rehearsed else [_folder_of(runtime)])
    try:
        shim = build(folder)
    except NoCuFileError:
        shim = PACKED / "built" / "no_gpu.so"
    if not shim.exists() and not Path("/proc/modules").exists():
        raise Skip("cuFile would spin for ever: there is no /proc/modules, and no C compiler for what stands in for it")
    # cuFile takes no file of an overlay.
    on_disk = os.major(folder.stat().st_dev)
    place = tempfile.mkdtemp(prefix="cufile-", dir=None if on_disk else "/dev/shm")
    fake = os.environ.get(FAKE)
    environment = NoGpu(shim, libraries, folder).environment(Path(place), cuda=Path(fake) if fake else None)
    if not shim.exists():
        del environment["LD_PRELOAD"]
    os.environ.update(environment | {READY: place})
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def _folder_of(library: str) -> Path:
    for place in sys.path:
        for found in Path(place or ".").glob(f"nvidia/*/lib/{library}"):
            return found.parent
    raise Skip(f"there is no {library} here: `make gpu-day-wheels` packs it")
