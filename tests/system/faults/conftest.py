"""Fixtures of the fault matrix: rigs by tier, the S3 proxy, the failing disk; and the table that it writes."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Callable, Iterator, Sequence
from dataclasses import astuple, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.support.file_tier import file_tier
from tests.support.proxy import FaultProxy
from tests.support.servers import MotoServer, S3Server
from tests.system.faults.interposer import Interposer, build
from tests.system.faults.rig import CAPACITY, LIMITS, PATIENCE_S, TIMES, FaultRig, MatrixRow

TABLE = "NIXL_TIERS_FAULTS_TABLE"
_rows: list[MatrixRow] = []

MakeRig = Callable[..., FaultRig]


@pytest.fixture
def patient() -> dict[str, Any]:
    """For rigs that see each kill of a mover: so long no busy machine or disk holds one up, which ends it rightly."""
    limits = replace(LIMITS, hard_deadline_min_s=PATIENCE_S, hard_deadline_max_s=PATIENCE_S, quarantine_share=1.0)
    return {"limits": limits, "times": msgspec.structs.replace(TIMES, heartbeat_timeout_s=PATIENCE_S)}


@pytest.fixture
def proxy(moto: MotoServer) -> Iterator[FaultProxy]:
    with FaultProxy(moto.port) as proxy:
        yield proxy


@pytest.fixture
def bucket(moto: MotoServer, s3_bucket: Callable[[S3Server], str], s3_credentials: Callable[[S3Server], None]) -> str:
    s3_credentials(moto)
    return s3_bucket(moto)


@pytest.fixture
def make_rig(request: pytest.FixtureRequest, tmp_path: Path) -> MakeRig:
    """A rig over any tier: make_rig("SIGKILL", "slabs" | "slabs by NIXL" | "files" | "s3"), or over one with several
    movers: "slabs in directories". The s3 tier is behind the proxy."""

    def make(
        fault: str, name: str, *, capacity: int = CAPACITY, fields: dict[str, object] | None = None, **more: Any
    ) -> FaultRig:
        fields = fields or {}
        layout, _, by = name.partition(" ")
        if name == "s3":
            proxy: FaultProxy = request.getfixturevalue("proxy")
            place = {"bucket": request.getfixturevalue("bucket"), "prefix": request.getfixturevalue("s3_prefix")}
            tier = {"type": "s3", "endpoint": proxy.endpoint, "capacity": capacity, **place, **fields}
        else:
            if by == "by NIXL":
                fields = {"backend": "posix", **fields}
            tier = file_tier(tmp_path / "kv", capacity, layout=layout, **fields)
            if by == "in directories":
                tier["path"] = [str(tmp_path / each) for each in ("kv", "b", "c", "d")]
            name = ", ".join(["file", name, *map(str, fields.values())])
        _rows.append(MatrixRow(fault, name))
        return FaultRig(_rows[-1], tier, **more)

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


def pytest_terminal_summary() -> None:
    measured = [tuple(_cell(value) for value in astuple(row)) for row in _rows if row.requests]
    if measured and os.environ.get(TABLE):
        Path(os.environ[TABLE]).write_text(result(measured))


def result(measured: Sequence[tuple[str, ...]]) -> str:
    """`bench/results/faults.json`, of which `docs/generate.py` makes a page: a row a line, for diffs."""
    cores, memory = os.cpu_count(), os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") >> 30
    head = {
        "title": "Fault matrix",
        "command": "make faults",
        "machine": f"{platform.machine()}, {cores} cores, {memory} GiB, Linux {platform.release().split('-')[0]}",
        "date": str(datetime.now(UTC).date()),
        "load": f"load average {os.getloadavg()[2]:.0f}",
        "note": f"Limits shorter than the defaults: wait_s {LIMITS.wait_s:g} s, hard deadline"
        f" {LIMITS.hard_deadline_min_s:g} s, heartbeat timeout 4 s.",
        "tables": [{"columns": HEADS, "rows": []}],
    }
    lines = ",\n".join(f"        {json.dumps(row)}" for row in measured)
    return json.dumps(head, indent=2).replace('"rows": []', f'"rows": [\n{lines}\n      ]') + "\n"


def _cell(value: object) -> str:
    if isinstance(value, float) and value != int(value):
        return f"{value:.2f}"
    return "-" if value is None else f"{value:g}" if isinstance(value, (int, float)) else str(value)
