"""Streams: loads that are prepared while some of their rows are still to come (docs/internals/streams.md)."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from nixl_tiers.core.state import CascadeState


class StreamWords(Protocol):
    """The words of rows and the limits of streams, which workers read while they copy."""

    def waits(self, row: int) -> None:
        """The host row of this number waits for the mover that loads it."""

    def limit(self, slot: int, stream: int, place: int) -> None:
        """From this place of the stream's rows on, nothing will come."""


class StreamPlan(NamedTuple):
    """Of a load that is a stream: its number, and that of the slot for its limit; `coming`: the places in the load's
    rows of those that are still to come, ascending; until `deadline_s`, in the core's time."""

    slot: int
    stream: int
    coming: tuple[int, ...]
    deadline_s: float


class Streams:
    """The open streams, of a request one at a time."""

    def __init__(self, state: CascadeState, words: StreamWords | None) -> None:
        """`words`: None if there are to be no streams."""
        self._state = state
        self.words = words

    def cut(self, name: str, place: int = 0, reason: str = "aborted") -> None:
        """Of this request's stream, if it has one, nothing comes from `place` on."""

    def cut_all(self, reason: str) -> None:
        """The same of all streams, from their beginning on."""
