"""How long an engine's thread is in its connector: the scheduler's and the worker's side, of any connector of vLLM."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any


class ConnectorTime:
    """Times each call of `methods` of these connectors by the thread that makes this: calls within calls are part of
    them. `waits`: (object, method) in which a connector has that thread sleep, because no request can go on; this is
    not its own time, and added up in `waiting_s`."""

    def __init__(
        self, connectors: Iterable[Any], methods: Iterable[str], waits: Iterable[tuple[Any, str]] = ()
    ) -> None:
        self._seconds: dict[str, float] = {}
        self._thread = threading.get_ident()
        self._outer: str | None = None
        self.waiting_s = 0.0
        names = list(methods)
        for connector in connectors:
            for name in names:
                if callable(inner := getattr(connector, name, None)):
                    setattr(connector, name, self._timed(name, inner))
        for owner, name in waits:
            setattr(owner, name, self._waited(getattr(owner, name)))

    def take_ms(self) -> dict[str, float]:
        """Milliseconds by method since the last call."""
        taken, self._seconds, self.waiting_s = self._seconds, {}, 0.0
        return {name: 1e3 * seconds for name, seconds in taken.items()}

    def _timed(self, name: str, inner: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(inner)
        def call(*arguments: Any, **named: Any) -> Any:
            if self._outer is not None or threading.get_ident() != self._thread:
                return inner(*arguments, **named)
            self._outer, waited_s, began_s = name, self.waiting_s, time.perf_counter()
            try:
                return inner(*arguments, **named)
            finally:
                own_s = time.perf_counter() - began_s - (self.waiting_s - waited_s)
                self._seconds[name] = self._seconds.get(name, 0.0) + own_s
                self._outer = None

        return call

    def _waited(self, inner: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(inner)
        def call(*arguments: Any, **named: Any) -> Any:
            if self._outer is None or threading.get_ident() != self._thread:
                return inner(*arguments, **named)
            began_s = time.perf_counter()
            try:
                return inner(*arguments, **named)
            finally:
                self.waiting_s += time.perf_counter() - began_s

        return call
