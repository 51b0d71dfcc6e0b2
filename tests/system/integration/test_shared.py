"""Engines that share a directory find each other's chunks, while both run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

import nixl_tiers
from tests.support.file_tier import files_tier
from tests.support.waiting import until_up
from tests.system.integration.test_round_trips import KIB, MIB, check, chunks


def test_another_engine_hits_stored_rows_unless_the_salt_differs(tmp_path: Path) -> None:
    files = files_tier(tmp_path / "kv", 32 * MIB)
    shared: dict[str, Any] = {"tiers": [{"type": "cpu", "capacity": 4 * MIB}, files], "wait_s": 120.0, "probe_s": 60.0}
    keys, rows = chunks(80, 64 * KIB)  # more than a host tier holds
    with (
        nixl_tiers.open(shared, 64 * KIB, "n") as a,
        nixl_tiers.open(shared, 64 * KIB, "n") as b,
        nixl_tiers.open({**shared, "salt": "pepper"}, 64 * KIB, "n") as salted,
    ):
        until_up(a, b, salted)
        assert b.locate(keys) == [None] * 80
        assert a.put(keys, rows) == 80
        assert a.flush(300)
        check(b, keys, rows)
        assert b.stats()["file"]["hits"] >= 80
        assert set(b.locate(keys)) <= {"cpu", "file"}
        assert b.stats()["file"]["corrupt"] == 0
        # And back, and what was deleted is a miss for both.
        more, more_rows = chunks(10, 64 * KIB, seed=1)
        assert b.put(more, more_rows) == 10
        assert b.flush(300)
        check(a, more, more_rows)
        for path in (tmp_path / "kv").rglob("*.row"):
            path.unlink()
        gone = [key for key in keys if b.locate([key]) == ["file"]]
        assert b.get(gone, np.zeros_like(rows[: len(gone)])) == [False] * len(gone)
        assert salted.stats()["file"]["rows"] == 0
        assert salted.get(keys, np.zeros_like(rows)) == [False] * 80
