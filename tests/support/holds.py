"""How much is done in each hold of a core: function calls, which depend on neither the machine nor its load."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from nixl_tiers.core.manager import TierManager
from nixl_tiers.runtime.coordinator import Coordinator
from nixl_tiers.runtime.hold import Hold


class CountedHold(Hold):
    """In place of a coordinator's hold, on one thread."""

    longest = 0
    """The most calls in a hold, since it was set to 0."""
    _calls = _depth = 0

    def __enter__(self) -> TierManager:
        self._depth += 1
        return super().__enter__()

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)  # type: ignore[arg-type]
        self._depth -= 1
        if not self._depth:
            self.longest = max(self.longest, self._calls)
            self._calls = 0

    def count(self, frame: FrameType, event: str, _: object) -> None:
        self._calls += self._depth > 0 and event in {"call", "c_call"}


@contextmanager
def counted(coordinator: Coordinator) -> Iterator[CountedHold]:
    hold: Any = coordinator._hold
    hold.__class__ = CountedHold  # front ends keep the object
    before = sys.getprofile()
    sys.setprofile(hold.count)
    try:
        yield hold
    finally:
        sys.setprofile(before)
        hold.__class__ = Hold
