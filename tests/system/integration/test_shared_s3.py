"""Engines that share a prefix of a bucket find each other's chunks, while both run."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np

import nixl_tiers
from tests.support.servers import S3Server
from tests.support.waiting import until, until_up
from tests.system.integration.test_round_trips import KIB, MIB, check, chunks

# Movers look again every 30 s, and upload only what a listing after their start has left room for.
TIMEOUT_S = 400.0


def test_another_engine_hits_stored_rows_unless_the_salt_differs(
    s3_server: S3Server,
    s3_credentials: Callable[[S3Server], None],
    s3_bucket: Callable[[S3Server], str],
    s3_prefix: str,
) -> None:
    s3_credentials(s3_server)
    objects = {
        "type": "s3",
        "bucket": s3_bucket(s3_server),
        "endpoint": s3_server.endpoint,
        "prefix": s3_prefix,
        "capacity": 256 * MIB,
    }
    cpu = {"type": "cpu", "capacity": 4 * MIB}
    config: dict[str, Any] = {"probe_s": 5.0, "wait_s": 120.0, "tiers": [cpu, objects]}
    keys, rows = chunks(24, 64 * KIB)
    with (
        nixl_tiers.open(config, 64 * KIB, "n") as a,
        nixl_tiers.open(config, 64 * KIB, "n") as b,
        nixl_tiers.open({**config, "salt": "pepper"}, 64 * KIB, "n") as salted,
    ):
        until_up(a, b, salted)
        assert b.locate(keys) == [None] * 24

        tries = itertools.count(1)

        def uploads() -> bool:
            # Before there is an account of the prefix, nothing is written there.
            fresh, its_row = chunks(1, 64 * KIB, seed=next(tries))
            a.put(fresh, its_row)
            return a.flush(10) and a.stats()["s3"]["rows"] > 0

        until(uploads, "the account of the prefix", timeout_s=TIMEOUT_S)
        held = int(a.stats()["s3"]["rows"])
        assert a.put(keys, rows) == 24
        assert a.flush(300)
        assert a.stats()["s3"]["rows"] == held + 24
        # Nothing waits for a listing: existence checks find unknown keys. A busy server may be too late the first time.
        until(lambda: all(b.get(keys, np.zeros_like(rows))), "what the other has stored", timeout_s=TIMEOUT_S)
        check(b, keys, rows)
        assert b.stats()["s3"]["probes"] > 0
        assert b.stats()["s3"]["corrupt"] == 0
        assert salted.stats()["s3"]["rows"] == 0
        assert salted.get(keys, np.zeros_like(rows)) == [False] * 24
