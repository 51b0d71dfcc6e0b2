"""Which requests began with nothing of vLLM's own prefix cache.

The gates (store_gate.py) ask while that cache may have KV that must not be stored. NixlTiersConnector reports it;
vLLM's own connector shows only at which chunk a request's look-ups begin.
"""

from __future__ import annotations


class OwnHits:
    """`known`: whether beginnings are reported, of all requests that begin since the last `clear`."""

    def __init__(self) -> None:
        self.known = False
        self._none: dict[str, bool] = {}  # requests that began with nothing; whether they load

    def began_at(self, request: str, tokens: int) -> None:
        """vLLM has found so many tokens, of whole blocks, in its own cache for a request; it looks at each new
        beginning, and last in the step in which the request is scheduled, or its load begins."""
        if tokens == 0:
            self._none[request] = False
        else:
            self._none.pop(request, None)

    def load_began(self, request: str) -> None:
        if request in self._none:
            self._none[request] = True

    def scheduled_at(self, request: str, tokens: int) -> None:
        """The first step of a request goes on from so many tokens: without a load, those of a part of a block that vLLM
        found, or another connector's."""
        if tokens and not self._none.get(request, True):
            del self._none[request]

    def has_none(self, request: str) -> bool:
        """False for a request of which nothing is known."""
        return request in self._none

    def ended(self, request: str) -> None:
        self._none.pop(request, None)

    def clear(self) -> None:
        """What the present requests began with is of no use any more: they began before a reset, or a change of the
        weights."""
        self._none.clear()
