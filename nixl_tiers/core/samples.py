"""Samples of the histograms: durations and sizes of jobs and waits, kept until they are reported."""

from __future__ import annotations

from typing import Final

MAX_SAMPLES: Final = 256  # of one series between two reports: an engine that is idle, or without metrics, takes none


class Samples:
    """By (tier, number). Of more than MAX_SAMPLES between two reports, the first ones are kept: so an idle engine's
    background writes, reported at its next step, cannot grow without bound."""

    def __init__(self) -> None:
        self._values: dict[tuple[str, str], list[float]] = {}

    def observe(self, tier: str, number: str, value: float) -> None:
        values = self._values.setdefault((tier, number), [])
        if len(values) < MAX_SAMPLES:
            values.append(value)

    def take(self) -> dict[tuple[str, str], list[float]]:
        """Those since the last call."""
        values, self._values = self._values, {}
        return values
