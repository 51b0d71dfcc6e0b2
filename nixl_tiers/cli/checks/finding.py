"""One thing that the doctor has found: how it is, and what to change."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class Status(StrEnum):
    OK = "ok"
    ADVICE = "advice"  # it works as configured, and a change would make it faster
    WARNING = "warning"  # it works, and something should be changed: it is not as configured, or may not stay so
    BROKEN = "broken"  # an engine would not start, or would have no use of a tier
    NOT_TRIED = "not tried"


@dataclass(frozen=True, slots=True)
class Finding:
    name: str
    status: Status
    text: str
    change: str = ""
    """What to change, and what that brings."""
    details: dict[str, Any] = field(default_factory=dict)


def ok(name: str, text: str, **details: Any) -> Finding:
    return Finding(name, Status.OK, text, "", details)


def advise(name: str, text: str, change: str = "", **details: Any) -> Finding:
    """What costs nothing but speed."""
    return Finding(name, Status.ADVICE, text, change, details)


def warning(name: str, text: str, change: str = "", **details: Any) -> Finding:
    return Finding(name, Status.WARNING, text, change, details)


def broken(name: str, text: str, change: str = "", **details: Any) -> Finding:
    return Finding(name, Status.BROKEN, text, change, details)


def not_tried(name: str, text: str, change: str = "", **details: Any) -> Finding:
    return Finding(name, Status.NOT_TRIED, text, change, details)


def exit_code(findings: Iterable[Finding]) -> int:
    """0: all is well, with or without advice; 1: warnings; 2: something is broken."""
    found = {finding.status for finding in findings}
    return 2 if Status.BROKEN in found else int(Status.WARNING in found)
