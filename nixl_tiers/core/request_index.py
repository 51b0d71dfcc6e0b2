"""RequestIndex: the requests that have looked up, loaded or stored and have not ended, by name."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nixl_tiers.core.requests import Request

if TYPE_CHECKING:
    from nixl_tiers.core.host import HostTier
    from nixl_tiers.core.promotion import Promotion
    from nixl_tiers.core.savings import Savings


class RequestIndex:
    """Makes a request's state at its first use, and lets go of all that it holds at its end."""

    def __init__(self, host: HostTier, promotion: Promotion, savings: Savings) -> None:
        self._host = host
        self._promotion = promotion
        self._savings = savings
        self.by_name: dict[str, Request] = {}
        self.allowed: dict[str, frozenset[int]] = {}  # requests that may not load from every storage tier
        self.queued: set[str] = set()  # requests that wait for their turn
        self.host_only: set[str] = set()  # requests on whose behalf nothing is written to storage tiers

    def get(self, name: str) -> Request:
        request = self.by_name.get(name)
        if request is None:
            request = self.by_name[name] = Request(name, self._host.generation, self.allowed.get(name))
        request.belongs_to(self._host.generation)
        return request

    def looked_up(self, name: str, now: float) -> Request:
        """The request, whose turn has come if it was in line."""
        self.queued.discard(name)
        request = self.get(name)
        if request.in_line:
            self._promotion.turn_comes(request, now)
        if not request.expired:
            request.seen_s = now
        return request

    def finish(self, name: str) -> None:
        """The request has ended: unpin its rows."""
        self.allowed.pop(name, None)
        self.host_only.discard(name)
        self.queued.discard(name)
        self._savings.forget(name)
        request = self.by_name.pop(name, None)
        if request is not None:
            if request.in_line:
                self._promotion.line.leave(request)
            self._promotion.observe_wait(request, loaded=False)
            request.expire()
            self._promotion.release(request)
