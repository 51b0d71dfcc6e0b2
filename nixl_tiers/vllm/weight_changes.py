"""A worker's weights are changed in place: by vLLM's weight updates, a reload, or whoever calls the model's
load_weights. The rank publishes it before and after, since vLLM tells neither its connectors nor its scheduler.
"""

from __future__ import annotations

import functools
import logging
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Final

from nixl_tiers.memory.region import HostRegion
from nixl_tiers.vllm.compat import calling_worker, models_of

log = logging.getLogger(__name__)

# Of vLLM's worker. From a start on, until a finish, the weights may change at any time, also between calls.
STARTS: Final = ("start_weight_update", "start_draft_weight_update")
FINISH: Final = "finish_weight_update"
UPDATE: Final = "update_weights"
CALLS: Final = (*STARTS, UPDATE, FINISH, "reload_weights")

_watches: weakref.WeakSet[WeightChanges] = weakref.WeakSet()


class WeightChanges:
    """The changes of one rank's weights. A call that fails ends its change, too: from then on the weights stay what
    they are, and another call is another change. Within an update only its own calls end it, and no second start does,
    which vLLM refuses."""

    def __init__(self, publish: Callable[..., None]) -> None:
        self._publish = publish
        self._lock = threading.Lock()
        self._calls = 0  # that run: they may be nested, or on several threads
        self._started = False

    def begin(self) -> None:
        with self._lock:
            self._calls += 1
            self._publish(changing=True)

    def end(self, name: str, *, done: bool) -> None:
        with self._lock:
            self._calls -= 1
            if done and name in STARTS:
                self._started = True
            elif name == FINISH or (name == UPDATE and not done):
                self._started = False
            if not (self._calls or self._started):
                self._publish(changing=False)


def watch_weights(region: HostRegion, rank: int, worker: Any = None) -> None:
    """Publish the changes of this process's weights as those of `rank`, until the region is closed. `worker`: vLLM's,
    which has loaded its models; by default the one that this is called from."""
    watch = WeightChanges(partial(region.ranks.publish_weights, rank))
    _watches.add(watch)
    region.at_close(partial(_watches.discard, watch))
    worker = worker or calling_worker()
    if worker is None:
        log.warning("nixl_tiers: this vLLM does not show its worker: restart it after each change of its weights")
        return
    kind = type(worker)
    for name in CALLS:
        if hasattr(kind, name):
            setattr(kind, name, _published(name, getattr(kind, name)))
    for model in models_of(worker):
        if hasattr(model, "load_weights"):
            model.load_weights = _published("load_weights", model.load_weights)


def _published(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
    """`call`, as a change of the weights."""
    if hasattr(call, "publishes_change"):
        return call

    @functools.wraps(call)
    def published(*how: Any, **named: Any) -> Any:
        with _change(name):
            return call(*how, **named)

    published.publishes_change = True  # type: ignore[attr-defined]
    return published


@contextmanager
def _change(name: str) -> Iterator[None]:
    watches, done = list(_watches), False
    for watch in watches:
        watch.begin()
    try:
        yield
        done = True
    finally:
        for watch in watches:
            watch.end(name, done=done)
