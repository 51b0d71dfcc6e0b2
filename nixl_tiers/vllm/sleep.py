"""Copies end before vLLM's sleep mode unmaps the KV blocks that they read or write.

vLLM synchronizes the device first, which covers what is on a stream; what still waits to be submitted is ours to wait
for.
"""

from __future__ import annotations

import functools
import weakref
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable


_swaps: weakref.WeakSet[Any] = weakref.WeakSet()
_patched: set[type] = set()


class Drained(Protocol):
    """What copies in the background."""

    def drain(self) -> None:
        """Return when nothing is queued or in flight."""


def drain_before_sleep(swap: Drained, worker: Any = None) -> None:
    """Have the process's vLLM worker wait for `swap` whenever it is put to sleep. `worker`: its class."""
    if worker is None:
        from vllm.v1.worker.gpu_worker import Worker

        worker = Worker
    _swaps.add(swap)
    if worker not in _patched:
        _patched.add(worker)
        worker.sleep = _drained_first(worker.sleep)


def _drained_first(sleep: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(sleep)
    def drained(*how: Any, **named: Any) -> Any:
        for swap in list(_swaps):
            swap.drain()
        return sleep(*how, **named)

    return drained
