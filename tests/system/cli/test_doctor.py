"""`nixl-tiers doctor [CONFIG]` on real directories and S3 servers, with faults planted one by one."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import nixl_tiers
from nixl_tiers.base.chunk import Geometry
from nixl_tiers.cli.checks import bucket, directory, tiers, trial
from nixl_tiers.cli.checks.finding import Status
from nixl_tiers.cli.checks.trial import NAME
from nixl_tiers.config.schema import S3Config
from nixl_tiers.memory.region import HostRegion
from nixl_tiers.tiers.s3.budget import COUNTER_NAME, USAGE_NAME
from nixl_tiers.tiers.s3.compat import JANITOR_NAME, OWNER_NAME
from tests.cli.test_doctor import named, objects, quiet_machine, s3_tier, scratch_in
from tests.mover.harness import has_exited
from tests.support.file_tier import file_config, file_tier
from tests.support.proxy import FaultKind, FaultProxy, ProxyFault
from tests.support.servers import S3Server, SeaweedServer, free_ports
from tests.support.waiting import until, until_up

__all__ = ["quiet_machine"]  # fixtures

SLOW_MACHINE_S = 300.0


# --- children ---------------------------------------------------------------------------------------------------------


def test_tier_that_hangs_is_broken_after_the_deadline(tmp_path: Path) -> None:
    (tmp_path / "kv").mkdir()
    found = named(tiers.examine(tmp_path, file_config(tmp_path / "kv", "1GiB"), deadline_s=0.1))
    assert found["examination"].status is Status.BROKEN
    assert "did not return within 0.1 s" in found["examination"].text
    assert scratch_in(tmp_path / "kv") == []


# --- directories ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["slabs", "files"])
def test_directory_is_tried_and_left_as_it_was(layout: str, tmp_path: Path) -> None:
    path = tmp_path / "kv"
    found = named(tiers.examine(tmp_path, file_config(path, "1GiB", layout=layout), SLOW_MACHINE_S))
    assert found[NAME].status in (Status.OK, Status.ADVICE), found  # advice: this disk is slow
    assert "64 rows of 1 MiB written" in found[NAME].text
    assert found[NAME].details["read_bytes_per_s"] > 0
    assert not path.exists()
    assert scratch_in(tmp_path) == []


def test_trial_sees_one_wrong_byte_of_any_cell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which the tier has verified before: here it is put wrong behind its back."""
    regions: list[HostRegion] = []
    create, timed = HostRegion.create, trial._timed

    def kept(*given: Any) -> HostRegion:
        regions.append(create(*given))
        return regions[-1]

    def spoilt(tier: Any, start: Any, what: str) -> float:
        seconds = timed(tier, start, what)
        if what.startswith("read"):
            regions[-1].rows_view[1, 8192 + 4999] ^= 1  # the last byte of the second cell
        return seconds

    monkeypatch.setattr(HostRegion, "create", kept)
    geometry = Geometry(cells=2, cell_payload=5000)
    config = file_config(tmp_path / "kv", "1MiB")
    (tmp_path / "kv").mkdir()
    assert trial.write_read_verify(config, 2, geometry).status in (Status.OK, Status.ADVICE)
    monkeypatch.setattr(trial, "_timed", spoilt)
    found = trial.write_read_verify(config, 2, geometry)
    assert (found.status, found.text) == (Status.BROKEN, "bytes that were read differ from those that were written")


def test_nothing_is_written_beside_an_engine(tmp_path: Path) -> None:
    storage = file_tier(tmp_path, "64MiB")
    config = {"tiers": [{"type": "cpu", "capacity": "8MiB"}, storage]}
    with nixl_tiers.open(config, chunk_bytes=1 << 20, namespace="engine") as store:
        until_up(store)
        before = tmp_path.stat().st_mtime_ns
        found = named(directory.examine(file_config(tmp_path, "1GiB"), "token"))
        assert tmp_path.stat().st_mtime_ns == before
    assert found[NAME].status is Status.NOT_TRIED
    assert found[NAME].text == f"an engine uses {tmp_path} (part-0): nothing was written here"
    assert directory.parts_in_use(tmp_path) == ""


# --- buckets ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def place(
    s3_server: S3Server,
    s3_credentials: Callable[[S3Server], None],
    s3_bucket: Callable[[S3Server], str],
    s3_prefix: str,
) -> S3Config:
    s3_credentials(s3_server)
    return s3_tier(s3_server.endpoint, s3_bucket(s3_server), s3_prefix)


def test_bucket_is_tried_and_left_as_it_was(place: S3Config, s3_server: S3Server, tmp_path: Path) -> None:
    found = named(tiers.examine(tmp_path, place, SLOW_MACHINE_S))
    assert [name for name in ("connection", "list", "head", "get", "put", "delete") if found[name].status != "ok"] == []
    assert found["conditional put"].status is Status.OK
    assert found[NAME].status in (Status.OK, Status.ADVICE), found
    assert "16 rows of 1 MiB written" in found[NAME].text
    assert objects(s3_server, place) == []


@pytest.fixture
def proxied(
    seaweedfs: SeaweedServer,
    s3_credentials: Callable[[S3Server], None],
    s3_bucket: Callable[[S3Server], str],
    s3_prefix: str,
) -> Iterator[tuple[S3Config, FaultProxy]]:
    s3_credentials(seaweedfs)
    with FaultProxy(seaweedfs.port) as proxy:
        yield s3_tier(proxy.endpoint, s3_bucket(seaweedfs), s3_prefix), proxy


DENIED = ProxyFault(FaultKind.ERROR_STATUS, status=403, code="AccessDenied")
SCRATCH = bucket.SCRATCH_PREFIX


@pytest.mark.parametrize(
    ("right", "action", "fault"),
    [
        ("put", "s3:PutObject", replace(DENIED, methods=frozenset({"PUT"}))),
        ("get", "s3:GetObject", replace(DENIED, methods=frozenset({"GET"}), target=SCRATCH)),
        ("head", "s3:GetObject", replace(DENIED, methods=frozenset({"HEAD"}), target=SCRATCH)),
        ("delete", "s3:DeleteObject", replace(DENIED, methods=frozenset({"POST"}), target="delete")),
        ("list", "s3:ListBucket", replace(DENIED, methods=frozenset({"GET"}), target="list-type")),
    ],
)
def test_denied_right_is_named(
    right: str, action: str, fault: ProxyFault, proxied: tuple[S3Config, FaultProxy]
) -> None:
    config, proxy = proxied
    proxy.inject(fault)
    found = named(bucket.examine(config, "token"))
    assert {name for name, finding in found.items() if finding.status is Status.BROKEN} == {right}, found
    assert action in found[right].change
    assert config.bucket in found[right].change
    assert found[NAME].status is Status.NOT_TRIED


def test_corrupted_rows_are_broken(proxied: tuple[S3Config, FaultProxy]) -> None:
    config, proxy = proxied
    proxy.inject(
        *(
            ProxyFault(FaultKind.BIT_FLIP, target=name, probability=0.0)
            for name in (USAGE_NAME, OWNER_NAME, JANITOR_NAME)
        ),
        ProxyFault(FaultKind.BIT_FLIP, target=COUNTER_NAME, probability=0.0),
        ProxyFault(FaultKind.BIT_FLIP, methods=frozenset({"GET"}), target=f"{SCRATCH}token/"),  # no listing
    )
    found = named(bucket.examine(config, "token"))
    assert found[NAME].status is Status.BROKEN
    assert "rows were not read and verified (CORRUPT" in found[NAME].text


def test_missing_bucket_and_dead_server_are_broken(
    seaweedfs: SeaweedServer, s3_credentials: Callable[[S3Server], None]
) -> None:
    s3_credentials(seaweedfs)
    (missing,) = bucket.examine(s3_tier(seaweedfs.endpoint, "no-such-bucket", "p"), "token")
    assert (missing.name, missing.status) == ("connection", Status.BROKEN)
    assert 'there is no bucket "no-such-bucket"' in missing.text
    (dead,) = bucket.examine(s3_tier(f"http://127.0.0.1:{free_ports(1)[0]}", "bucket", "p"), "token")
    assert (dead.name, dead.status) == ("connection", Status.BROKEN)
    assert "does not answer" in dead.text


# --- what examines ----------------------------------------------------------------------------------------------------

STEPS = """
import os, sys, time
from pathlib import Path
from nixl_tiers.cli.children import ProbeFailed, run_step, say

def wait(given):
    Path(given[0]).write_text(str(os.getpid()))
    time.sleep(300)  # longer than the test waits

def chatter(given):
    print('{"error": "printed by a library"}', flush=True)
    say(found=1)
    raise ProbeFailed("the call failed")

run_step({"wait": wait, "chatter": chatter}, sys.argv[1:])
"""


def test_child_ends_with_its_parent(tmp_path: Path) -> None:
    (tmp_path / "steps.py").write_text(STEPS)
    number = tmp_path / "pid"
    start = f"Children(Path({str(tmp_path)!r}), 'steps', 600).run('wait', {str(number)!r})"
    code = f"from pathlib import Path; from nixl_tiers.cli.children import Children; {start}"
    with subprocess.Popen([sys.executable, "-c", code]) as parent:
        try:
            until(lambda: number.exists() and number.read_text(), "the child to start")
        finally:
            parent.kill()
    until(lambda: has_exited(int(number.read_text())), "the child to end")
