"""Names that a coordinator had before front ends held the core themselves. They go with the release after 0.1."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final

from nixl_tiers.base.chunk import Key, check_key

if TYPE_CHECKING:
    from nixl_tiers.runtime.hold import Hold

_SAME: Final = (  # methods of the core
    "anticipate", "backlog", "end_step", "finish_request", "flushed", "is_being_loaded", "is_queued", "keep_in_host",
    "line_has_room", "pin", "pressure", "queue", "rows_to_come", "set_allowed_tiers", "take_samples",
)  # fmt: skip
_ELSEWHERE: Final = {
    "drop_store": "copies.drop_store",
    "limit_step": "prefill.limit_step",
    "partial": "copies.partial",
    "touch": "engine_hits.add",
    "wait_for_listing": "be_patient",
}
_PATHS: Final = {**{name: name for name in _SAME}, **_ELSEWHERE}


def _checked(key: Key) -> Key:
    check_key(key)
    return key


_CALLS: Final[dict[str, Callable[..., Any]]] = {  # that take the time, or check keys
    "copied": lambda core, now, rows, began_s, **kind: core.copies.copied(rows, now - began_s, now, **kind),
    "lookup": lambda core, now, key, request, position=None, first=0, **check: core.lookup(
        _checked(key), request, position, now, first, **check
    ),
    "prefetch": lambda core, _, keys: core.prefetch([_checked(key) for key in keys]),
    "scan": lambda core, now, request, chain, start, first=0: core.scan(request, chain, start, now, first),
    "source": lambda core, _, key: core.sources([key])[0],
    "still_waits": lambda core, now, request: core.still_waits(request, now),
    "wait_on": lambda core, now, requests, seconds: core.wait_on(requests, now + seconds),
    "where": lambda core, now, key: core.where(_checked(key), now),
}


class DeprecatedCalls:
    """Base of `Coordinator`: each of these names holds the core for one call, and warns."""

    now: Callable[[], float]
    _hold: Hold

    def __getattr__(self, name: str) -> Any:
        if name not in _CALLS and name not in _PATHS and name != "running_s":
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        warnings.warn(f"Coordinator.{name}: use `with coordinator.core() as core`", DeprecationWarning, stacklevel=2)
        if name == "running_s":
            return self.now

        def call(*arguments: Any, **named: Any) -> Any:
            with self._hold as core:
                if name in _PATHS:
                    return attrgetter(_PATHS[name])(core)(*arguments, **named)
                return _CALLS[name](core, self.now(), *arguments, **named)

        return call
