"""A mover that was killed in the middle of its loads writes to no row any more once the supervisor counts it as reaped,
whatever moves the bytes, and though others read its memory's maps at that moment: quarantine ends there."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nixl_tiers.base.chunk import Geometry, Outcome
from nixl_tiers.mover.protocol import Load
from nixl_tiers.tiers.base import Move
from tests.mover.harness import TIMEOUT_S, MoverProcess, key_of
from tests.mover.stub_tiers import DecidedConfig
from tests.support.file_tier import file_tier
from tests.support.no_gpu import NoGpu
from tests.support.servers import MotoServer, S3Server
from tests.support.times import KEEPS_ITS_RECORD

pytestmark = pytest.mark.timeout(900)

GEOMETRY = Geometry(1, 2 << 20)
ROWS = 16  # what a mover of files has on their way at once
MANY_ROWS = 64
CAPACITY = 2 * MANY_ROWS * GEOMETRY.row_bytes
OBSERVED_S = 0.3  # for so long nothing may change
MOST = 100  # until it is seen: two of three show it, one of twelve on a machine that is busy otherwise
DECIDED = f"{DecidedConfig.__module__}:{DecidedConfig.__name__}"
BACKENDS: Mapping[str, dict[str, Any]] = {
    "slabs": {"type": DECIDED, "staged": False},
    "slabs, staged": {"type": DECIDED, "staged": True},
    "slabs by NIXL": {"type": DECIDED, "staged": False, "backend": "posix"},
    "files": {"type": DECIDED, "staged": False, "layout": "files"},
    "gds_mt": {"backend": "gds_mt"},
    "s3": {},
}
"""All that a mover can move bytes with."""

Tier = dict[str, object]


@pytest.fixture
def make_tier(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Tier]:
    """make_tier("slabs by NIXL"): a tier of BACKENDS."""

    def make(backend: str) -> Tier:
        if backend != "s3":
            if backend == "gds_mt":
                no_gpu: NoGpu = request.getfixturevalue("no_gpu")
                if not os.major(tmp_path.stat().st_dev):
                    pytest.skip("cuFile needs temporary files on a block device")
                for name, value in no_gpu.environment(tmp_path).items():
                    monkeypatch.setenv(name, value)
            return file_tier(tmp_path / "kv", CAPACITY, **BACKENDS[backend])
        moto: MotoServer = request.getfixturevalue("moto")
        request.getfixturevalue("s3_credentials")(moto)
        bucket: Callable[[S3Server], str] = request.getfixturevalue("s3_bucket")
        tier: Tier = {"type": "s3", "bucket": bucket(moto), "prefix": request.getfixturevalue("s3_prefix")}
        return tier | {"endpoint": moto.endpoint, "capacity": CAPACITY}

    return make


def uses_io_uring(pid: int) -> bool:
    """Whether a process has a ring open or mapped."""
    links = Path(f"/proc/{pid}/maps").read_text().splitlines()
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # it was closed meanwhile
            links.append(str(link.readlink()))
    return any("io_uring" in link for link in links)


READER = """
import sys
while True:
    try:
        with open(f"/proc/{sys.argv[1]}/smaps_rollup", "rb", buffering=0) as maps:
            maps.read(1 << 16)
    except OSError:
        break
    print(flush=True)
"""


@contextlib.contextmanager
def reader(pid: int) -> Iterator[None]:
    """Another process reads the maps of this one's memory, over and over."""
    with subprocess.Popen([sys.executable, "-S", "-c", READER, str(pid)], stdout=subprocess.PIPE) as reads:
        assert reads.stdout is not None
        reads.stdout.readline()
        try:
            yield
        finally:
            reads.kill()


def changes_after_kill(tier: Tier, *, kill: Callable[[MoverProcess], None], count: int = ROWS) -> bool:
    """Kill a mover when the first of its rows have arrived; whether a byte changes after `kill`."""
    with MoverProcess(tier, GEOMETRY, count, engine="one", times=KEEPS_ITS_RECORD) as mover:
        mover.open()
        # A bucket lists nothing, and rows that are there would be written, and counted, once more.
        if not mover.listed_rows() and mover.load([0]) != [Outcome.OK]:
            assert mover.store(range(count)) == [Outcome.OK] * count
        assert not uses_io_uring(mover.process.pid)
        rows = mover.region.rows_view
        one_in_each_page = rows.view(np.uint64)[:, 1::512]
        with reader(mover.process.pid):
            rows[:] = 0
            mover.begin(Load, [Move(number, number, key_of(number)) for number in range(count)])
            until_s = time.monotonic() + TIMEOUT_S
            while not one_in_each_page.any():
                assert time.monotonic() < until_s
            kill(mover)
            first, whole = one_in_each_page.copy(), rows.copy()  # the first is quicker
            time.sleep(OBSERVED_S)
            return bool((one_in_each_page != first).any() or (rows != whole).any())


@pytest.mark.parametrize("backend", BACKENDS)
def test_nothing_changes_once_a_killed_mover_is_reaped(make_tier: Callable[..., Tier], backend: str) -> None:
    assert not changes_after_kill(make_tier(backend), kill=MoverProcess.kill)


@pytest.mark.faults
def test_a_mover_that_is_taken_for_quiet_when_its_process_is_reaped_changes_rows(
    make_tier: Callable[..., Tier],
) -> None:
    def reaped_alone(mover: MoverProcess) -> None:
        mover.process.kill()
        mover.process.wait()

    tier = make_tier("slabs")
    assert any(changes_after_kill(tier, kill=reaped_alone, count=MANY_ROWS) for _ in range(MOST))
