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
from typing import Any, ClassVar

import numpy as np
import pytest

from nixl_tiers.base.chunk import Geometry, Outcome
from nixl_tiers.memory.region import HostRegion
from nixl_tiers.mover.protocol import Load
from nixl_tiers.tiers.base import Move, StorageTier
from tests.mover.harness import TIMEOUT_S, MoverProcess, key_of
from tests.mover.stub_tiers import DecidedConfig, decided
from tests.support.file_tier import file_tier
from tests.support.no_gpu import NoGpu
from tests.support.servers import MotoServer, S3Server

pytestmark = pytest.mark.timeout(900)

GEOMETRY = Geometry(1, 2 << 20)
ROWS = 16  # what a mover of files has on their way at once
MANY_ROWS = 64
CAPACITY = 2 * MANY_ROWS * GEOMETRY.row_bytes
OBSERVED_S = 0.3  # for so long nothing may change
KILLS = 12  # under `make faults`
MOST = 100  # until a planted bug is seen: two of three show it, one of twelve on a machine that is busy otherwise
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


class UringConfig(DecidedConfig):
    """A file tier that NIXL moves through io_uring."""

    implementation: ClassVar[str] = f"{__name__}:uring_tier"


def uring_tier(config: UringConfig, geometry: Geometry, region: HostRegion) -> StorageTier:
    from nixl_tiers.tiers.nixl_agent import Agent
    from nixl_tiers.tiers.slab import in_flight

    in_flight.LOADS_BYTES = MANY_ROWS * geometry.row_bytes  # all at once
    Agent.posix = classmethod(lambda cls: cls("POSIX", {"use_uring": "true"}, "FILE"))  # type: ignore[method-assign]
    return decided(config, geometry, region)


@pytest.fixture
def make_tier(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Tier]:
    """make_tier("slabs by NIXL", type=...): a tier of BACKENDS."""

    def make(backend: str, **fields: Any) -> Tier:
        if backend != "s3":
            if backend == "gds_mt":
                no_gpu: NoGpu = request.getfixturevalue("no_gpu")
                if not os.major(tmp_path.stat().st_dev):
                    pytest.skip("cuFile needs temporary files on a block device")
                for name, value in no_gpu.environment(tmp_path).items():
                    monkeypatch.setenv(name, value)
            return file_tier(tmp_path / "kv", CAPACITY, **(BACKENDS[backend] | fields))
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


def changes_after_kill(
    tier: Tier, *, kill: Callable[[MoverProcess], None], count: int = ROWS, io_uring: bool = False
) -> bool:
    """Kill a mover when the first of its rows have arrived; whether a byte changes after `kill`. `io_uring`: whether
    it uses that; then nobody reads its maps meanwhile."""
    with MoverProcess(tier, GEOMETRY, count, engine="one") as mover:
        mover.open()
        # A bucket lists nothing, and rows that are there would be written, and counted, once more.
        if not mover.listed_rows() and mover.load([0]) != [Outcome.OK]:
            assert mover.store(range(count)) == [Outcome.OK] * count
        assert uses_io_uring(mover.process.pid) is io_uring
        rows = mover.region.rows_view
        one_in_each_page = rows.view(np.uint64)[:, 1::512]
        with contextlib.nullcontext() if io_uring else reader(mover.process.pid):
            rows[:] = 0
            mover.begin(Load, [Move(number, number, key_of(number)) for number in range(count)])
            until_s = time.monotonic() + TIMEOUT_S
            while not one_in_each_page.any():
                assert time.monotonic() < until_s
            kill(mover)
            first, whole = one_in_each_page.copy(), rows.copy()  # the first is quicker
            time.sleep(OBSERVED_S)
            return bool((one_in_each_page != first).any() or (rows != whole).any())


@pytest.mark.parametrize("kills", [1, pytest.param(KILLS, marks=pytest.mark.faults)])
@pytest.mark.parametrize("backend", BACKENDS)
def test_nothing_changes_once_a_killed_mover_is_reaped(
    make_tier: Callable[..., Tier], backend: str, kills: int
) -> None:
    tier = make_tier(backend)
    for _ in range(kills):
        assert not changes_after_kill(tier, kill=MoverProcess.kill)


def _reaped_alone(mover: MoverProcess) -> None:
    """As if it were quiet when its process is reaped."""
    mover.process.kill()
    mover.process.wait()


def test_io_uring_is_found(make_tier: Callable[..., Tier]) -> None:
    with MoverProcess(make_tier("slabs by NIXL", type=f"{__name__}:UringConfig"), GEOMETRY, ROWS) as mover:
        mover.open()
        assert uses_io_uring(mover.process.pid)


@pytest.mark.faults
@pytest.mark.parametrize("planted", ["io_uring", "reaped alone"])
def test_planted_bugs_change_rows(make_tier: Callable[..., Tier], planted: str) -> None:
    io_uring = planted == "io_uring"
    tier = make_tier("slabs by NIXL", type=f"{__name__}:UringConfig") if io_uring else make_tier("slabs")
    kill = MoverProcess.kill if io_uring else _reaped_alone
    kills = (changes_after_kill(tier, kill=kill, count=MANY_ROWS, io_uring=io_uring) for _ in range(MOST))
    assert any(kills)
