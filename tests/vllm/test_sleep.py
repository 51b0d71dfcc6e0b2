"""Copies that wait to be submitted end before vLLM's worker sleeps."""

from __future__ import annotations

import gc
import inspect

import pytest

from nixl_tiers.vllm.worker import drain_before_sleep


class Copies:
    def __init__(self, seen: list[str], name: str) -> None:
        self.seen, self.name = seen, name

    def drain(self) -> None:
        self.seen.append(self.name)


def test_every_swap_is_drained_once_before_the_worker_sleeps() -> None:
    seen: list[str] = []

    class Worker:
        def sleep(self, level: int = 1) -> int:
            seen.append("asleep")
            return level

    first, second = Copies(seen, "copies"), Copies(seen, "copies")
    drain_before_sleep(first, Worker)
    drain_before_sleep(second, Worker)
    assert Worker().sleep(2) == 2
    assert seen == ["copies", "copies", "asleep"]
    seen.clear()
    del second
    gc.collect()
    assert Worker().sleep(level=1) == 1
    assert seen == ["copies", "asleep"]
    del first
    gc.collect()


def test_vllms_worker_has_the_method() -> None:
    worker = pytest.importorskip("vllm.v1.worker.gpu_worker", exc_type=ImportError).Worker
    assert list(inspect.signature(worker.sleep).parameters)[:2] == ["self", "level"]
