"""Engines that share a directory, or a prefix of a bucket, find each other's chunks, while both run."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import nixl_tiers
from tests.support.file_tier import files_tier
from tests.support.servers import S3Server
from tests.support.waiting import until, until_up
from tests.system.integration.test_round_trips import KIB, MIB, check, chunks

# Movers look again every 30 s, and upload only what a listing after their start has left room for.
TIMEOUT_S = 400.0


@pytest.fixture(params=["files", pytest.param("s3", marks=pytest.mark.s3)])
def shared(request: pytest.FixtureRequest, tmp_path: Path) -> dict[str, Any]:
    if request.param == "files":
        return files_tier(tmp_path / "kv", 256 * MIB)
    server: S3Server = request.getfixturevalue("fast_s3")
    bucket: Callable[[S3Server], str] = request.getfixturevalue("s3_bucket")
    request.getfixturevalue("s3_credentials")(server)
    place = {"bucket": bucket(server), "prefix": request.getfixturevalue("s3_prefix"), "endpoint": server.endpoint}
    return {"type": "s3", "capacity": 256 * MIB, **place}


def test_another_engine_hits_stored_rows_unless_the_salt_differs(shared: dict[str, Any], tmp_path: Path) -> None:
    name = shared["type"]
    config: dict[str, Any] = {
        "tiers": [{"type": "cpu", "capacity": 4 * MIB}, shared],
        "probe_s": 60.0 if name == "file" else 5.0,
        "wait_s": 120.0,
    }
    keys, rows = chunks(80, 64 * KIB)  # more than a host tier holds
    with (
        nixl_tiers.open(config, 64 * KIB, "n") as a,
        nixl_tiers.open(config, 64 * KIB, "n") as b,
        nixl_tiers.open({**config, "salt": "pepper"}, 64 * KIB, "n") as salted,
    ):
        until_up(a, b, salted)
        assert b.locate(keys) == [None] * 80

        tries = itertools.count(1)

        def stores() -> bool:
            # Before there is an account of a prefix, nothing is written there.
            a.put(*chunks(1, 64 * KIB, seed=next(tries)))
            return a.flush(10) and a.stats()[name]["rows"] > 0

        until(stores, "the account of the prefix", timeout_s=TIMEOUT_S)
        held = a.stats()[name]["rows"]
        assert a.put(keys, rows) == 80
        assert a.flush(300)
        assert a.stats()[name]["rows"] == held + 80
        # Nothing waits for a listing: existence checks find unknown keys. A busy server may be too late the first time.
        until(lambda: all(b.get(keys, np.zeros_like(rows))), "what the other has stored", timeout_s=TIMEOUT_S)
        check(b, keys, rows)
        assert b.stats()[name]["probes"] > 0
        assert b.stats()[name]["corrupt"] == 0
        assert salted.stats()[name]["rows"] == 0
        assert salted.get(keys, np.zeros_like(rows)) == [False] * 80
        if name == "file":  # what was deleted is a miss for both
            for path in (tmp_path / "kv").rglob("*.row"):
                path.unlink()
            gone = [key for key in keys if b.locate([key]) == ["file"]]
            assert b.get(gone, np.zeros_like(rows[: len(gone)])) == [False] * len(gone)
