"""Reading numbers out of a /metrics page, as far as we need it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Final, NamedTuple

_LINE: Final = re.compile(r"([A-Za-z_:][A-Za-z0-9_:]*)(?:\{(.*)\})?\s+(\S+)(?:\s+-?\d+)?")
_LABEL: Final = re.compile(r'([A-Za-z_][A-Za-z0-9_]*)="((?:[^"\\]|\\.)*)"')
_ESCAPES: Final = {"\\n": "\n", '\\"': '"', "\\\\": "\\"}


class Sample(NamedTuple):
    """One line: a series at one moment."""

    name: str
    labels: Mapping[str, str]
    value: float


class Page:
    """All samples of one scrape."""

    def __init__(self, text: str) -> None:
        self.samples = list(_samples(text))

    def total(self, name: str, **labels: str) -> float:
        """The sum over all series of this name that carry at least these labels; 0 where there is none."""
        return sum(s.value for s in self.samples if s.name == name and labels.items() <= s.labels.items())


def _samples(text: str) -> Iterator[Sample]:
    for line in text.splitlines():
        if match := _LINE.fullmatch(line.strip()):
            name, labels, value = match.groups()
            yield Sample(name, {key: _plain(raw) for key, raw in _LABEL.findall(labels or "")}, float(value))


def _plain(raw: str) -> str:
    return re.sub(r"\\.", lambda escape: _ESCAPES.get(escape[0], escape[0]), raw)
