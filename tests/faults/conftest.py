"""The tiers of the fault matrix, and its table."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Iterator
from dataclasses import astuple
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from nixl_tiers.mover import backoff, child
from nixl_tiers.testing.servers import MotoServer, S3Server
from tests.faults.arena import CAPACITY, LIMITS, Arena, Line
from tests.faults.interposer import Interposer, build
from tests.support.proxy import FaultProxy

SOAK = "\n## Soak\n"  # what follows it in the page was written by hand, and stays
TABLE = "NIXL_TIERS_FAULTS_TABLE"
_lines: list[Line] = []

Open = Callable[..., Arena]


@pytest.fixture(autouse=True)
def short_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A silent mover is given up sooner than in production, and what died often comes back sooner."""
    monkeypatch.setattr(child, "HEARTBEAT_TIMEOUT_S", 4.0)
    monkeypatch.setattr(child, "START_TIMEOUT_S", 20.0)
    monkeypatch.setattr(backoff, "BACKOFF_S", (0.05, 0.2, 0.5, 1.0, 2.0))


@pytest.fixture
def proxy(moto: MotoServer) -> Iterator[FaultProxy]:
    with FaultProxy(moto.port) as proxy:
        yield proxy


@pytest.fixture
def bucket(moto: MotoServer, s3_bucket: Callable[[S3Server], str], s3_credentials: Callable[[S3Server], None]) -> str:
    s3_credentials(moto)
    return s3_bucket(moto)


@pytest.fixture
def on_file(tmp_path: Path) -> Open:
    """An arena over a file tier of a layout: on_file("SIGKILL", "slabs")."""

    def make(fault: str, layout: str, **more: Any) -> Arena:
        line = Line(fault, f"file, {layout}")
        _lines.append(line)
        tier = {"type": "file", "layout": layout, "path": str(tmp_path / "kv"), "capacity": CAPACITY}
        return Arena(line, tier, **more)

    return make


@pytest.fixture
def on_s3(proxy: FaultProxy, bucket: str, s3_prefix: str) -> Open:
    """An arena over an object tier behind the proxy: on_s3("refused", shared=False)."""

    def make(fault: str, *, fields: dict[str, object] | None = None, **more: Any) -> Arena:
        line = Line(fault, "s3")
        _lines.append(line)
        tier = {"type": "s3", "bucket": bucket, "prefix": s3_prefix, "endpoint": proxy.endpoint, "capacity": CAPACITY}
        return Arena(line, tier | (fields or {}), **more)

    return make


@pytest.fixture
def on_tier(request: pytest.FixtureRequest) -> Open:
    """An arena over any tier: on_tier("SIGKILL", "slabs" | "files" | "s3")."""

    def make(fault: str, tier: str, **more: Any) -> Arena:
        if tier == "s3":
            arena: Arena = request.getfixturevalue("on_s3")(fault, **more)
        else:
            arena = request.getfixturevalue("on_file")(fault, tier, **more)
        return arena

    return make


@pytest.fixture(scope="session")
def interpose(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("interpose"))


@pytest.fixture
def disk(interpose: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Interposer]:
    """The disk of every mover that is started from here on."""
    disk = Interposer(interpose, tmp_path, tmp_path / "kv")
    for name, value in disk.env.items():
        monkeypatch.setenv(name, value)
    yield disk
    disk.close()


# --- the table --------------------------------------------------------------------------------------------------------

HEADS = ("fault", "tier", "stall s", "bound s", "recovery s", "drops", "failed", "answers", "new movers", "wrong")


def pytest_terminal_summary(terminalreporter: Any) -> None:
    lines = [line for line in _lines if line.turns]
    if not lines:
        return
    rows = [HEADS, *(tuple(_cell(value) for value in astuple(line)) for line in lines)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEADS))]
    terminalreporter.section("fault matrix")
    for row in rows:
        terminalreporter.line("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)))
    if os.environ.get(TABLE):
        path = Path(os.environ[TABLE])
        _, soak, rest = path.read_text().partition(SOAK) if path.exists() else ("", "", "")
        path.write_text(page(rows) + soak + rest)


def page(rows: list[tuple[str, ...]]) -> str:
    table = [rows[0], tuple("---" for _ in HEADS), *rows[1:]]
    cores, memory = os.cpu_count(), os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") >> 30
    return INTRODUCTION.format(
        date=datetime.now(UTC).date(),
        machine=f"{platform.machine()}, {cores} cores, {memory} GiB, Linux {platform.release().split('-')[0]}",
        limits=f"`wait_s` {LIMITS.wait_s:g} s, jobs {LIMITS.hard_deadline_min_s:g} s, silence {4.0:g} s",
    ) + "".join("| " + " | ".join(row) + " |\n" for row in table)


def _cell(value: object) -> str:
    if value is None:
        return "-"
    return (
        f"{value:.2f}"
        if isinstance(value, float) and value != int(value)
        else f"{value:g}"
        if isinstance(value, (int, float))
        else str(value)
    )


INTRODUCTION = """\
# Fault matrix

`make faults` wrote this page on {date}, on a machine with {machine}.

Each line is a store over one storage tier, with real movers, under a load of gets and puts whose every byte is
checked, while the fault strikes. Asserted in each: no wrong byte, every get and put answered, the tier healed when the
fault had ended (chunks put then came back from it), no process, descriptor, thread or host row left over, capacity and
counters in order, and a store that is opened afterwards finds nothing but right bytes.

- **stall**: the longest that any one get or put took; **bound**: `wait_s`, the longest that storage may hold one up.
- **recovery**: from the end of the fault until chunks that were put then came back from the tier.
- **drops**: rows that were not written to the tier; **failed**: moves that ended in an error.

The limits were shorter than by default: {limits}.

"""
