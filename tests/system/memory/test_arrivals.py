"""Row words, limits and the doorbell: they are nobody else's bytes, and other processes see and hear them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from nixl_tiers.base.row_words import ARRIVED
from nixl_tiers.memory.region import HostRegion
from tests.support.waiting import until


def test_another_process_that_waits_for_the_bell_is_woken(region: HostRegion) -> None:
    """It sleeps in the kernel, without a time-out, until this process rings."""
    wait = """
import ctypes, os, sys
from nixl_tiers.memory.region import HostRegion
region = HostRegion.attach(int(sys.argv[1]))
libc = ctypes.CDLL(None, use_errno=True)
print("ready", flush=True)
while not region.bell[0]:
    libc.syscall(202, ctypes.c_void_p(region.bell.ctypes.data), 0, 0, None, None, 0)
print(region.words.tolist())
"""
    command = [sys.executable, "-c", wait, str(region.fd)]
    with subprocess.Popen(command, pass_fds=[region.fd], stdout=subprocess.PIPE, text=True) as waiting:
        assert waiting.stdout is not None
        assert waiting.stdout.readline() == "ready\n"
        stat = Path(f"/proc/{waiting.pid}/stat")
        until(lambda: stat.read_text().split(") ")[1].startswith("S"), "it sleeps")
        region.arrive([2])
        assert waiting.communicate(timeout=60)[0] == f"{[0, 0, ARRIVED, 0, 0]}\n"
