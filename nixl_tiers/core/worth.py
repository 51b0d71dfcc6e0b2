"""What a load is worth: the seconds of computing that it saves those that wait."""

from __future__ import annotations

from nixl_tiers.core.promotion import RequestIndex
from nixl_tiers.core.state import CascadeState


class Worth:
    """By the prefill estimate; positions are in tokens of a request."""

    def __init__(self, state: CascadeState, requests: RequestIndex) -> None:
        self._state = state
        self._requests = requests

    def compute_s(self, at: int, end: int) -> float | None:
        """Seconds to compute a chain that ends at token `end` from token `at` on, and the token behind it, which the
        engine computes whatever is loaded: so a step is needed for a whole hit too, and none is saved by loading what
        one step computes. None while unknown."""
        return self._state.prefill.seconds(at, end + 1)

    def crowd(self) -> int:
        """How many requests wait while one computes, itself included, as far as they count: those whose turn is
        still to come, or all that are alive. Those that wait for storage lose nothing."""
        if self._state.prefer == "throughput":
            return len(self._requests.by_name)
        return 1 + len(self._requests.queued)

    def saved_s(self, have: int, upto: int, end: int) -> float | None:
        """By a load of a chain that ends at `end` up to token `upto`, of which all up to token `have` is there."""
        rest, kept = self.compute_s(have, end), self.compute_s(upto, end)
        return None if rest is None or kept is None else self.crowd() * (rest - kept)
