"""Several movers on one directory of row files: they see each other's rows, and only whole ones."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

from nixl_tiers.base.chunk import Geometry, Outcome, object_name
from nixl_tiers.memory.region import HostRegion
from nixl_tiers.memory.seal import Sealer, Verdict
from nixl_tiers.mover.protocol import Store
from nixl_tiers.tiers.base import Move
from nixl_tiers.tiers.disk import INCOMING
from nixl_tiers.tiers.rowfile.names import ORPHAN_S, TempNames
from tests.mover.harness import NAMESPACE, MoverProcess, key_of, payload, wait_until
from tests.support.file_tier import files_tier

GEOMETRY = Geometry(1, 120_000)
CAPACITY = 64 << 20
ROWS = 64


def mover_on(path: Path, capacity: int = CAPACITY, region: HostRegion | None = None) -> MoverProcess:
    return MoverProcess(files_tier(path, capacity), GEOMETRY, ROWS, region)


def row_of(path: Path, number: int) -> Path:
    return path / NAMESPACE.hex() / f"{object_name(key_of(number))}.row"


def test_rows_are_found_after_a_restart_under_any_slot(tmp_path: Path) -> None:
    with mover_on(tmp_path) as mover:
        mover.open()
        assert mover.listed_rows() == []
        assert mover.there(range(40)) == []
        assert set(mover.store(range(40))) == {Outcome.OK}
        assert set(mover.load(range(40), slots=range(100, 140))) == {Outcome.OK}
        mover.stop()
    with mover_on(tmp_path) as mover:
        mover.open()
        assert mover.listed_rows() == []
        assert mover.there(range(60)) == list(range(40))
        assert set(mover.load(range(40))) == {Outcome.OK}
    assert row_of(tmp_path, 7).stat().st_mode & 0o777 == 0o600
    assert row_of(tmp_path, 7).parent.stat().st_mode & 0o777 == 0o700
    assert list((tmp_path / INCOMING).iterdir()) == []


def test_two_movers_see_each_others_stores_and_deletions(tmp_path: Path) -> None:
    with mover_on(tmp_path) as first, mover_on(tmp_path) as second:
        for mover in (first, second):
            mover.open()
            assert mover.listed_rows() == []
        assert set(first.store(range(20))) == {Outcome.OK}
        assert second.there(range(30)) == list(range(20))
        assert set(second.load(range(20))) == {Outcome.OK}
        assert set(second.store(range(20, 30))) == {Outcome.OK}
        assert first.there(range(20, 40)) == list(range(20, 30))
        assert set(first.load(range(30))) == {Outcome.OK}
        for number in (3, 25):
            row_of(tmp_path, number).unlink()
        assert second.there(range(30)) == [number for number in range(30) if number not in {3, 25}]
        assert second.load([3, 4]) == [Outcome.MISSING, Outcome.OK]
        # Either may store it again.
        assert second.store([3]) == [Outcome.OK]
        assert first.load([3]) == [Outcome.OK]
        assert first.store([3]) == [Outcome.FOUND]


def test_what_is_no_whole_row_of_this_user_is_not_there(tmp_path: Path) -> None:
    with mover_on(tmp_path) as mover:
        mover.open()
        mover.listed_rows()
        mover.store(range(6))
        os.truncate(row_of(tmp_path, 1), 4096)
        row_of(tmp_path, 2).rename(row_of(tmp_path, 2).with_suffix(".kept"))
        row_of(tmp_path, 2).symlink_to(row_of(tmp_path, 2).with_suffix(".kept"))
        row_of(tmp_path, 3).unlink()
        row_of(tmp_path, 3).mkdir()
        assert mover.there(range(6)) == [0, 4, 5]


def test_two_movers_may_store_the_same_row_at_once(tmp_path: Path) -> None:
    with mover_on(tmp_path) as first, mover_on(tmp_path) as second:
        for mover in (first, second):
            mover.open()
            mover.listed_rows()
        for _ in range(10):
            jobs = []
            for mover in (first, second):
                moves = []
                for row in range(16):
                    mover.region.rows_view[row] = payload(row, GEOMETRY)
                    moves.append(Move(row, row, key_of(row), tick=1, seal=True))
                jobs.append(mover.begin(Store, moves))
            assert set(first.finished(jobs[0]) + second.finished(jobs[1])) <= {Outcome.OK, Outcome.FOUND}
            assert set(first.load(range(16)) + second.load(range(16))) == {Outcome.OK}
            for path in tmp_path.rglob("*.row"):
                path.unlink()
        assert not any((tmp_path / INCOMING).iterdir())


def test_kill_during_stores_leaves_only_whole_rows(tmp_path: Path) -> None:
    rng = random.Random(3)
    sealer = Sealer(GEOMETRY, NAMESPACE, 0)
    stored, hits = 0, 0
    with HostRegion.create(GEOMETRY, ROWS) as region:
        for _ in range(6):
            with mover_on(tmp_path, region=region) as mover:
                mover.open()
                mover.listed_rows()
                found = mover.there(range(stored))
                for start in range(0, len(found), ROWS):
                    outcomes = mover.load(found[start : start + ROWS])
                    assert set(outcomes) == {Outcome.OK}  # SIGKILL loses no page: a file with a row name is whole
                    hits += len(outcomes)
                for row in range(ROWS):
                    region.rows_view[row] = payload(stored + row, GEOMETRY)
                for start in range(0, ROWS, 8):
                    rows = range(start, start + 8)
                    mover.begin(Store, [Move(n, n, key_of(stored + n), tick=stored + n, seal=True) for n in rows])
                stored += ROWS
                time.sleep(rng.uniform(0, 0.05))  # anywhere in it: the assertions hold wherever it is
                assert wait_until(lambda: any(tmp_path.rglob("*.row")))  # else no round might store any
                mover.kill()
            for path in tmp_path.rglob("*.row"):
                row = np.frombuffer(path.read_bytes(), np.uint8)
                assert sealer.verify(row, bytes.fromhex(path.stem)) is Verdict.OK
        assert hits > 0
        with mover_on(tmp_path, region=region) as mover:
            mover.open()
            mover.listed_rows()
            assert wait_until(lambda: list((tmp_path / INCOMING).iterdir()) == [])  # orphans are deleted


def test_orphaned_temporary_files_are_deleted_and_others_stay(tmp_path: Path) -> None:
    (tmp_path / INCOMING).mkdir(parents=True)

    def leave(name: str, age_s: float) -> Path:
        path = tmp_path / INCOMING / name
        path.write_bytes(bytes(4096))
        os.utime(path, (time.time() - age_s,) * 2)
        return path

    ours = TempNames().prefix + "0.tmp"
    make_orphan_name = [
        sys.executable,
        "-c",
        "from nixl_tiers.tiers.rowfile.names import TempNames; print(TempNames().prefix + '0.tmp')",
    ]
    dead = subprocess.run(make_orphan_name, check=True, capture_output=True, text=True).stdout.strip()
    elsewhere = "elsewhere-" + ours.partition("-")[2]
    kept = [leave(ours, 5.0), leave(elsewhere, ORPHAN_S / 2)]
    kept += [leave(name, 2 * ORPHAN_S) for name in ("thesis.tmp", "probe-1.tmp", ours + ".bak")]  # foreign ones
    swept = [leave(dead, 5.0), leave("elsewhere2-" + ours.partition("-")[2], 2 * ORPHAN_S)]
    swept.append(leave(f"probe-{16 * '0'}.tmp", 2 * ORPHAN_S))
    with mover_on(tmp_path) as mover:
        mover.open()
        mover.listed_rows()
        assert wait_until(lambda: not any(path.exists() for path in swept))
        assert all(path.exists() for path in kept)
        os.utime(kept[1], (time.time() - 2 * ORPHAN_S,) * 2)
        for first in range(0, 10 * ROWS, ROWS):  # sweeps
            assert set(mover.store(range(first, first + ROWS))) == {Outcome.OK}
        assert wait_until(lambda: not kept[1].exists())
        assert kept[0].exists()
