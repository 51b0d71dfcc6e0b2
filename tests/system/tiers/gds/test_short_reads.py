"""Files that have become shorter, with `backend: gds_mt`: a short read is never a hit.

cuFile compatibility mode, no GPU: says nothing about GPU-direct speed.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from nixl_tiers.base.chunk import Geometry, Outcome
from nixl_tiers.mover.protocol import Down, Opened
from tests.mover.harness import MoverProcess, shard_dir
from tests.support.file_tier import file_tier
from tests.support.no_gpu import NoGpu

GEOMETRY = Geometry(1, 120_000)
CAPACITY = 24 << 20
ROWS = 24


@pytest.fixture
def cufile(no_gpu: NoGpu, cufile_place: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where movers have cuFile."""
    for name, value in no_gpu.environment(cufile_place).items():
        monkeypatch.setenv(name, value)
    return cufile_place


def stored(path: Path) -> MoverProcess:
    mover = MoverProcess(file_tier(path, CAPACITY, backend="gds_mt"), GEOMETRY, ROWS)
    mover.open()
    mover.listed_rows()
    assert set(mover.store(range(ROWS))) == {Outcome.OK}
    assert "libcufile.so.0" in Path(f"/proc/{mover.process.pid}/maps").read_text()
    return mover


def test_slab_cut_short_takes_the_tier_down_and_the_rest_is_served(cufile: Path) -> None:
    with stored(cufile) as mover:
        slab = shard_dir(cufile) / "slab-00000.kv"
        os.truncate(slab, ROWS // 2 * GEOMETRY.row_bytes + 4096)
        outcomes = mover.load(range(ROWS))
        assert set(outcomes[: ROWS // 2]) <= {Outcome.OK, Outcome.FAILED}  # FAILED: the tier has noticed it before
        assert Outcome.OK not in outcomes[ROWS // 2 :]
        down = mover.expect(lambda m: isinstance(m, Down))
        assert isinstance(down, Down)
        assert down.reason == f"{slab} has been cut short"
        mover.expect(lambda m: isinstance(m, Opened))
        mover.listed_rows()
        outcomes = mover.load(range(ROWS))
        assert set(outcomes[: ROWS // 2]) == {Outcome.OK}
        assert Outcome.OK not in outcomes[ROWS // 2 :]
        assert set(mover.store(range(ROWS))) == {Outcome.OK}
        assert set(mover.load(range(ROWS))) == {Outcome.OK}
