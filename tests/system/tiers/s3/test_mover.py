"""The S3 tier in a real mover process: restart after a kill, recovery, refusal, no secrets in logs."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nixl_tiers.base.chunk import Geometry, Outcome
from nixl_tiers.mover.protocol import Down, Open
from nixl_tiers.tiers.nixl_agent import STORE_NICE
from tests.mover.harness import NAMESPACE, MoverProcess
from tests.support.servers import SECRET_KEY, S3Server, SeaweedServer

GEOMETRY = Geometry(cells=2, cell_payload=128 << 10, sub_blocks=4)


def nice_values(pid: int) -> dict[int, int]:
    """By thread."""
    values = {}
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(FileNotFoundError):  # it has ended meanwhile
            values[int(task.name)] = int((task / "stat").read_text().rpartition(")")[2].split()[16])
    return values


def s3_tier(endpoint: str, bucket: str, **fields: Any) -> dict[str, object]:
    kind = "tests.mover.stub_tiers:FastBudgetConfig"
    return {"type": kind, "endpoint": endpoint, "bucket": bucket, "capacity": 64 * 100 * GEOMETRY.row_bytes} | fields


def test_rows_survive_a_kill_of_their_mover(
    seaweedfs: SeaweedServer,
    s3_credentials: Callable[[S3Server], None],
    s3_bucket: Callable[[S3Server], str],
    s3_prefix: str,
) -> None:
    s3_credentials(seaweedfs)
    tier = s3_tier(seaweedfs.endpoint, s3_bucket(seaweedfs), prefix=s3_prefix)
    numbers = list(range(24))
    with MoverProcess(tier, GEOMETRY, 32, engine="one") as mover:
        assert mover.open() == 12_800
        assert mover.store(numbers) == [Outcome.OK] * 24
        mover.kill()
        with MoverProcess(tier, GEOMETRY, 32, mover.region, engine="one") as successor:
            assert successor.open() == 12_800
            assert successor.load([*numbers, 99]) == [Outcome.OK] * 24 + [Outcome.MISSING]
            assert successor.store([24]) == [Outcome.OK], "once the record of the killed one is stale"
            successor.stop()
            assert SECRET_KEY not in successor.log()


def test_uploading_threads_have_low_priority_and_no_other(
    seaweedfs: SeaweedServer,
    s3_credentials: Callable[[S3Server], None],
    s3_bucket: Callable[[S3Server], str],
    s3_prefix: str,
) -> None:
    s3_credentials(seaweedfs)
    tier = s3_tier(seaweedfs.endpoint, s3_bucket(seaweedfs), prefix=s3_prefix)
    with MoverProcess(tier, GEOMETRY, 8) as mover:
        mover.open()
        ours = os.getpriority(os.PRIO_PROCESS, 0)
        low = min(ours + STORE_NICE, 19)
        before = nice_values(mover.process.pid)
        assert mover.load([99]) == [Outcome.MISSING]
        assert set(nice_values(mover.process.pid).values()) == {ours}, "those that load, and the mover's own"
        assert mover.store([1, 2, 3]) == [Outcome.OK] * 3
        after = nice_values(mover.process.pid)
        started = {thread: nice for thread, nice in after.items() if thread not in before}
        assert list(started.values()).count(low) >= 3, "those that upload"
        assert all(after[thread] == ours for thread in before if thread in after)
        assert after[mover.process.pid] == ours
        assert mover.load([1, 2, 3]) == [Outcome.OK] * 3
        mover.stop()


def test_a_wrong_secret_is_not_in_messages_or_logs(
    seaweedfs: SeaweedServer, monkeypatch: pytest.MonkeyPatch, s3_credentials: Callable[[S3Server], None]
) -> None:
    s3_credentials(seaweedfs)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "w0ngSecretThatMustNotShow")
    with MoverProcess(s3_tier(seaweedfs.endpoint, "readiness"), GEOMETRY, 8) as mover:
        mover.send(Open(NAMESPACE, 0))
        down = mover.expect(lambda message: isinstance(message, Down))
        assert isinstance(down, Down)
        mover.stop()
        assert "refuses these credentials" in down.reason
        assert "w0ng" not in down.reason + mover.log()
