"""The mover process: its messages, heartbeat and back-pressure, and that it always exits."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from nixl_tiers.base.chunk import Geometry, Outcome
from nixl_tiers.base.times import PRODUCTION, Times
from nixl_tiers.mover.protocol import (
    Heartbeat,
    Stop,
    Store,
)
from nixl_tiers.tiers.base import Move
from tests.mover.harness import MoverProcess, has_exited, key_of, wait_until
from tests.support.file_tier import file_tier
from tests.support.times import changed

GEOMETRY = Geometry(1, 60_000)


def stub(name: str, tmp_path: Path, times: Times = PRODUCTION) -> MoverProcess:
    tier: dict[str, object] = {
        "type": "tests.mover.stub_tiers:StubConfig",
        "stub": name,
        "closed": str(tmp_path / "closed"),
        "wake": str(tmp_path / "wake"),
    }
    return MoverProcess(tier, GEOMETRY, 8, times=times)


@pytest.mark.parametrize("end", ["sigterm", "hang up", "stop"])
def test_it_exits_when_asked_and_keeps_stored_rows(tmp_path: Path, end: str) -> None:
    with MoverProcess(file_tier(tmp_path, 16 << 20), GEOMETRY, 8) as mover:
        mover.open()
        assert set(mover.store(range(8))) == {Outcome.OK}
        if end == "sigterm":
            mover.process.send_signal(signal.SIGTERM)
        elif end == "hang up":
            mover.socket.close()
        else:
            mover.send(Stop())
        assert mover.process.wait(120) == 0
    with MoverProcess(file_tier(tmp_path, 16 << 20), GEOMETRY, 8) as mover:
        mover.open()
        assert len(mover.listed_rows()) == 8


@pytest.mark.parametrize("moment", ["while busy", "at close"])
def test_the_watchdog_ends_an_orphan_whose_call_never_returns(tmp_path: Path, moment: str) -> None:
    with stub("HangsWithInterpreterLock", tmp_path, changed(watchdog_s=2.0)) as mover:
        mover.open()
        if moment == "while busy":
            mover.begin(Store, [Move(0, 0, key_of(0))])
            assert wait_until((tmp_path / "wake").exists)
        mover.socket.close()
        assert mover.process.wait(120) == -signal.SIGALRM


def test_the_watchdog_spares_a_process_that_was_stopped(tmp_path: Path) -> None:
    with stub("InstantTier", tmp_path, changed(watchdog_s=1.5)) as mover:
        mover.open()
        for _ in range(2):  # so that the short timeout is in force; and it survives every time
            before = mover.heartbeats
            while mover.heartbeats < before + 3:
                mover.expect(lambda m: isinstance(m, Heartbeat))
            os.kill(mover.process.pid, signal.SIGSTOP)
            time.sleep(2.5)  # longer than the timeout
            os.kill(mover.process.pid, signal.SIGCONT)
        assert mover.store(range(2)) == [Outcome.OK] * 2


PARENT = """
    import os, sys, time
    from pathlib import Path
    from nixl_tiers.base.chunk import Geometry
    from tests.mover.harness import MoverProcess
    from tests.support.file_tier import file_tier

    mover = MoverProcess(file_tier(Path(sys.argv[1]), 16 << 20), Geometry(1, 60_000), 8)
    mover.open()
    mover.store(range(8))
    child = os.fork()
    if child:
        print(mover.process.pid, child, flush=True)
    time.sleep(600)
"""


def test_it_exits_when_the_parent_is_killed_though_a_child_of_it_holds_the_socket(tmp_path: Path) -> None:
    root = Path(__file__).parents[3]
    parent = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(PARENT), str(tmp_path)],
        stdout=subprocess.PIPE,
        cwd=root,
        env={**os.environ, "PYTHONPATH": str(root)},
    )
    assert parent.stdout is not None
    pid, child = map(int, parent.stdout.readline().split())
    try:
        parent.kill()
        parent.wait()
        assert wait_until(lambda: has_exited(pid))
        assert not has_exited(child)
    finally:
        os.kill(child, signal.SIGKILL)
        parent.stdout.close()
    with MoverProcess(file_tier(tmp_path, 16 << 20), GEOMETRY, 8) as mover:
        mover.open()
        assert len(mover.listed_rows()) == 8
