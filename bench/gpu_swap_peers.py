"""What bench/gpu_swap.py compares our strategies with: vLLM's batch for the copy engine, a Triton kernel as vLLM's, and
a loop of torch copies."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import numpy as np

from nixl_tiers.swap.plan import Memory

if TYPE_CHECKING:
    from bench.gpu_swap import Case

Call = Callable[[], None]


class Location(ctypes.Structure):
    """CUmemLocation."""

    _fields_ = (("type", ctypes.c_uint), ("id", ctypes.c_int))


class CopyAttributes(ctypes.Structure):
    """CUmemcpyAttributes."""

    _fields_ = (("order", ctypes.c_uint), ("source", Location), ("destination", Location), ("flags", ctypes.c_uint))


def vllm_batch(case: Case) -> dict[str, Call]:
    """As vLLM 0.32 copies: a descriptor per layer and block, large batches, no overlap hint."""
    machine, driver = case.machine, case.machine.driver
    sizes = np.full(len(case.segments) * case.blocks, case.fragment, np.uint64)

    def run(to_host: bool) -> None:
        blocks = case.block_ids.astype(np.uint64) * np.uint64(case.fragment)
        bases = np.array([segment.address for segment in case.segments], np.uint64)
        pages = (bases[:, None] + blocks[None, :]).ravel()
        rows = np.concatenate(case.rows)
        to, source = (rows, pages) if to_host else (pages, rows)
        attributes = CopyAttributes(order=1 if to_host else 3)
        first, failed = ctypes.c_size_t(0), ctypes.c_size_t(0)
        with machine.device.current():
            step = 32768  # a driver has crashed with larger batches
            for start in range(0, len(to), step):
                part = slice(start, start + step)
                pointers = (to[part].ctypes.data, source[part].ctypes.data, sizes[part].ctypes.data, len(to[part]))
                extra = (ctypes.byref(attributes), ctypes.byref(first), 1, ctypes.byref(failed), machine.streams[0])
                if driver._batch(*pointers, *extra):
                    raise SystemExit("cuMemcpyBatchAsync failed\n")
            driver.synchronize(machine.streams[0])

    return {"store": lambda: run(True), "load": lambda: run(False)}


def torch_contenders(case: Case) -> dict[str, dict[str, Call]]:
    """A Triton kernel of 12 programs over the same descriptors, and a copy_ per layer and block."""
    import torch

    pages = [
        torch.as_tensor(Memory(s.address, (s.blocks or 1, case.fragment), (case.fragment, 1), cuda=True), device="cuda")
        for s in case.segments
    ]
    region = torch.from_numpy(case.machine.region)
    offsets = [(rows - np.uint64(region.data_ptr())).tolist() for rows in case.rows]
    ids = case.block_ids.tolist()

    def loop(to_host: bool) -> None:
        for layer in range(len(case.segments)):
            for block, offset in zip(ids, offsets[layer], strict=True):
                row = region[offset : offset + case.fragment]
                page = pages[layer][block]
                row.copy_(page, non_blocking=True) if to_host else page.copy_(row, non_blocking=True)
        torch.cuda.synchronize()

    found: dict[str, dict[str, Call]] = {}
    if len(case.segments) * case.blocks <= 16384:  # a longer loop takes seconds
        found["torch loop"] = {"store": lambda: loop(True), "load": lambda: loop(False)}
    with suppress(ImportError):
        kernel = triton_kernel()
        chunk = min(8192, 1 << (case.fragment - 1).bit_length())

        def run(to_host: bool) -> None:
            engine, rows = (np.concatenate(side).astype(np.int64) for side in (case.engine, case.rows))
            to, source = (rows, engine) if to_host else (engine, rows)
            sizes = np.full(len(to), case.fragment, np.int64)
            tables = [torch.from_numpy(table).to("cuda", non_blocking=True) for table in (source, to, sizes)]
            kernel[(min(12, len(to)),)](*tables, len(to), CHUNK=chunk // 8)
            torch.cuda.synchronize()

        found["vLLM's Triton"] = {"store": lambda: run(True), "load": lambda: run(False)}
    return found


def triton_kernel() -> Any:
    """Each program copies every n-th descriptor, in chunks of 8-byte words."""
    import triton
    import triton.language as tl

    globals()["tl"] = tl

    @triton.jit
    def copy_jobs(source, to, sizes, jobs, CHUNK: tl.constexpr):  # noqa: N803
        lane = tl.arange(0, CHUNK)
        for job in range(tl.program_id(0), jobs, tl.num_programs(0)):
            left = tl.load(source + job).to(tl.pointer_type(tl.int64))
            right = tl.load(to + job).to(tl.pointer_type(tl.int64))
            words = tl.load(sizes + job) // 8
            for start in range(0, words, CHUNK):
                at = start + lane
                tl.store(right + at, tl.load(left + at, mask=at < words, other=0), mask=at < words)

    return copy_jobs
