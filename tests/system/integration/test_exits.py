"""However a process with an open store ends: no mover outlives it, nothing is left, and it dies of nothing else."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import textwrap
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.support.leaks import MARK, processes_with_mark, shared_memory_names
from tests.support.waiting import until

# What every process begins with. `fds` and `threads` are those of before the store.
BEGIN = """
import gc, os, signal, subprocess, sys, threading, time
import numpy as np
import nixl_tiers
from nixl_tiers.base.times import PRODUCTION
from nixl_tiers.core.turn import Events
from nixl_tiers.store import open_with
from tests.support.times import changed
from tests.support.waiting import serves, until

signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored below a shell's background job
path, endpoint = sys.argv[1:]
KEYS = [b"key-%06d" % n for n in range(8)]
ROWS = np.random.default_rng(1).integers(0, 256, (8, 65536), np.uint8)
CPU = {"type": "cpu", "capacity": "4MiB"}
FILE = {"type": "file", "path": path, "capacity": "64MiB", "min_free": 0}
S3 = {"type": "s3", "bucket": "bucket", "endpoint": endpoint, "capacity": "64MiB"}

def opened(*tiers, times=PRODUCTION):
    store = open_with(times, {"tiers": [CPU, *(tiers or (FILE,))]}, 65536, "n")
    if not tiers:
        until(lambda: serves(store.stats()["file"]), "the file tier")
    assert store.put(KEYS, ROWS) == 8
    until(lambda: all(store.coordinator.mover_pids), "the movers")
    return store

def works(store):
    out = np.zeros_like(ROWS)
    return all(store.get(KEYS, out)) and np.array_equal(out, ROWS) and store.flush(300)

def state():
    return len(os.listdir("/proc/self/fd")), threading.active_count(), children()

def children():
    found = []
    for thread in os.listdir("/proc/self/task"):
        try:
            found += open(f"/proc/self/task/{thread}/children").read().split()
        except (FileNotFoundError, ProcessLookupError):
            pass  # the thread has just ended
    return found

CHILD = '''
import os, signal, sys
from tests.support.waiting import until

parent, *movers = map(int, sys.argv[1:])
assert any("memfd:nixl_tiers" in os.path.realpath(f"/proc/self/fd/{n}") for n in os.listdir("/proc/self/fd"))
os.kill(parent, signal.SIGKILL)
until(lambda: not any(os.path.exists(f"/proc/{pid}/exe") for pid in movers), "the movers to leave")  # zombies have none
'''

before = state()
"""


class Case(NamedTuple):
    """A program, and its exit status."""

    name: str
    code: str
    status: int = 0


CASES = [
    Case("SIGTERM", "store = opened(); os.kill(os.getpid(), signal.SIGTERM)", -signal.SIGTERM),
    Case("SIGKILL", "store = opened(); os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL),
    Case("S3 that never answers", "store = opened(S3)"),
    Case(
        "Ctrl-C while the movers start",
        """
        Events.opened = lambda *_: os.kill(os.getpid(), signal.SIGINT)
        try:
            opened(FILE, S3, times=changed(ready_s=100.0))
        except KeyboardInterrupt:
            until(lambda: state() == before, "everything to be released")
        else:
            sys.exit("was not interrupted")
        """,
    ),
    Case(
        "a child that uses the store",
        """
        store = opened()
        child = os.fork()
        if child == 0:
            for use in (
                lambda: store.put(KEYS, ROWS),
                lambda: store.get(KEYS, np.zeros_like(ROWS)),
                lambda: store.locate(KEYS),
                lambda: store.flush(1),
                store.stats,
                store.reset,
            ):
                try:
                    use()
                except RuntimeError as error:
                    assert f"belongs to process {os.getppid()}" in str(error)
                else:
                    os._exit(1)
            assert "memfd:nixl_tiers" not in open("/proc/self/maps").read()
            assert state()[0] == before[0], "descriptors of the parent's"
            store.close()
            with nixl_tiers.open({"tiers": [CPU, {**FILE, "path": path + "-of-child"}]}, 65536, "n") as mine:
                assert mine.put(KEYS, ROWS) == 8 and works(mine)
            sys.exit(0)
        assert os.waitpid(child, 0)[1] == 0
        assert works(store)
        """,
    ),
    Case(
        "a child holds every descriptor",
        """
        store = opened()
        for descriptor in map(int, os.listdir("/proc/self/fd")):
            try:
                os.set_inheritable(descriptor, True)
            except OSError:  # that of the directory itself
                pass
        watch = [sys.executable, "-c", CHILD, str(os.getpid()), *map(str, store.coordinator.mover_pids)]
        sys.exit(subprocess.Popen(watch, close_fds=False).wait())
        """,
        -signal.SIGKILL,
    ),
]


@pytest.fixture
def black_hole() -> Iterator[str]:
    """An endpoint that accepts connections and never answers."""
    with socket.create_server(("127.0.0.1", 0), backlog=128) as listener:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


SMOKE = ("SIGTERM", "SIGKILL", "a child holds every descriptor")


@pytest.mark.parametrize(
    "case", [pytest.param(each, id=each.name, marks=[pytest.mark.smoke] * (each.name in SMOKE)) for each in CASES]
)
def test_nothing_is_leaked(case: Case, tmp_path: Path, black_hole: str) -> None:
    mark = uuid.uuid4().hex
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    shared = shared_memory_names()
    root = str(Path(__file__).parents[3])
    env = {
        **os.environ,
        MARK: mark,
        "TMPDIR": str(temporary),
        "PYTHONPATH": os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")])),
        "PYTHONFAULTHANDLER": "1",
        "AWS_ACCESS_KEY_ID": "tiers-test-access",
        "AWS_SECRET_ACCESS_KEY": "tiers-test-not-a-secret",
    }
    with (tmp_path / "err").open("w+") as err:  # not a pipe: a process that is left would hold it open
        ended = subprocess.run(
            [sys.executable, "-c", BEGIN + textwrap.dedent(case.code), str(tmp_path / "kv"), black_hole],
            env=env,
            stdout=err,
            stderr=err,
            start_new_session=True,
            timeout=400,
            check=False,
        )
    words = (tmp_path / "err").read_text()
    assert ended.returncode == case.status, words
    assert "Fatal Python error" not in words
    until(lambda: not processes_with_mark(mark), f"{processes_with_mark(mark)} to end")
    assert list(temporary.iterdir()) == []
    assert shared_memory_names() <= shared
