"""Fixtures of the fault matrix: rigs by tier, the S3 proxy, the failing disk; and the table it prints."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Iterator
from dataclasses import astuple
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from nixl_tiers.mover import child, supervisor
from nixl_tiers.testing.servers import MotoServer, S3Server
from tests.faults.interposer import Interposer, build
from tests.faults.rig import CAPACITY, LIMITS, FaultRig, MatrixRow
from tests.support.file_tier import file_tier
from tests.support.proxy import FaultProxy

SOAK = "\n## Soak\n"  # the page from here on is written by hand, and kept
TABLE = "NIXL_TIERS_FAULTS_TABLE"
_rows: list[MatrixRow] = []

MakeRig = Callable[..., FaultRig]


@pytest.fixture(autouse=True)
def short_timeouts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The watchdog kills a hung mover sooner than in production, and restarts have a shorter backoff."""
    monkeypatch.setattr(child, "HEARTBEAT_TIMEOUT_S", 4.0)
    monkeypatch.setattr(child, "START_TIMEOUT_S", 20.0)
    monkeypatch.setattr(supervisor, "BACKOFF_S", (0.05, 0.2, 0.5, 1.0, 2.0))


@pytest.fixture
def proxy(moto: MotoServer) -> Iterator[FaultProxy]:
    with FaultProxy(moto.port) as proxy:
        yield proxy


@pytest.fixture
def bucket(moto: MotoServer, s3_bucket: Callable[[S3Server], str], s3_credentials: Callable[[S3Server], None]) -> str:
    s3_credentials(moto)
    return s3_bucket(moto)


@pytest.fixture
def file_rig(tmp_path: Path) -> MakeRig:
    """A rig over a file tier: file_rig("SIGKILL", "slabs", fields={"backend": "posix"})."""

    def make(fault: str, layout: str, *, fields: dict[str, object] | None = None, **more: Any) -> FaultRig:
        row = MatrixRow(fault, ", ".join(["file", layout, *map(str, (fields or {}).values())]))
        _rows.append(row)
        return FaultRig(row, file_tier(tmp_path / "kv", CAPACITY, layout=layout, **(fields or {})), **more)

    return make


@pytest.fixture
def s3_rig(proxy: FaultProxy, bucket: str, s3_prefix: str) -> MakeRig:
    """A rig over an S3 tier behind the proxy: s3_rig("connection refused", fields={"shared": False})."""

    def make(fault: str, *, fields: dict[str, object] | None = None, **more: Any) -> FaultRig:
        row = MatrixRow(fault, "s3")
        _rows.append(row)
        tier = {"type": "s3", "bucket": bucket, "prefix": s3_prefix, "endpoint": proxy.endpoint, "capacity": CAPACITY}
        return FaultRig(row, tier | (fields or {}), **more)

    return make


@pytest.fixture
def make_rig(request: pytest.FixtureRequest) -> MakeRig:
    """A rig over any tier: make_rig("SIGKILL", "slabs" | "files" | "s3")."""

    def make(fault: str, tier: str, **more: Any) -> FaultRig:
        if tier == "s3":
            rig: FaultRig = request.getfixturevalue("s3_rig")(fault, **more)
        else:
            rig = request.getfixturevalue("file_rig")(fault, tier, **more)
        return rig

    return make


@pytest.fixture(scope="session")
def interpose(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("interpose"))


@pytest.fixture
def disk(interpose: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Interposer]:
    """The disk as every mover sees it that is started from here on."""
    disk = Interposer(interpose, tmp_path, tmp_path / "kv")
    for name, value in disk.env.items():
        monkeypatch.setenv(name, value)
    yield disk
    disk.close()


# --- the table --------------------------------------------------------------------------------------------------------

HEADS = (
    "fault", "tier", "longest stall (s)", "deadline (s)", "recovery (s)", "dropped rows", "failed moves", "requests",
    "mover restarts", "wrong chunks",
)  # fmt: skip


def pytest_terminal_summary(terminalreporter: Any) -> None:
    measured = [row for row in _rows if row.requests]
    if not measured:
        return
    rows = [HEADS, *(tuple(_cell(value) for value in astuple(row)) for row in measured)]
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
        limits=f"`wait_s` {LIMITS.wait_s:g} s, hard deadline {LIMITS.hard_deadline_min_s:g} s, heartbeat timeout 4 s",
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

Each row is a store over one storage tier, with real movers, under a load of gets and puts whose every byte is
verified, while a fault is injected. Asserted in each: no wrong byte; every get and put is answered; the tier heals
after the fault (chunks that are put then are read back from it); no process, descriptor, thread or host row leaks;
capacity and counters are right; and a store that is opened afterwards reads no wrong byte.

- **longest stall**: the longest get or put; **deadline**: `wait_s`, the longest that storage may delay a request.
- **recovery**: from the end of the fault until chunks that were put then were read back from the tier.
- **dropped rows**: rows that were not written to the tier; **failed moves**: moves that ended in an error.
- **requests**: gets under load, all answered; **wrong chunks**: hits with a wrong byte.

Rows with `gds_mt` run NVIDIA's cuFile in its compatibility mode, without a GPU ([GPUDirect Storage](gds.md)): they say
nothing about GPU-direct speed.

The limits were shorter than the defaults: {limits}.

"""
