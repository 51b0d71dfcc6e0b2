"""The memory of a process may outlive it, and that is seen."""

from __future__ import annotations

import mmap
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from nixl_tiers.base.chunk import PAGE
from nixl_tiers.memory.address_space import AddressSpace
from tests.support.waiting import until

MARKED = """
import ctypes, os, signal, sys
from nixl_tiers.memory.address_space import marked

mark = marked(int(sys.argv[1]))
other = 0
if sys.argv[2] == "shares":  # a process that shares its memory, as one that reads its page tables does for a moment
    libc = ctypes.CDLL(None)
    stack = ctypes.create_string_buffer(1 << 16)
    top = ctypes.c_void_p((ctypes.addressof(stack) + len(stack)) & ~15)
    other = libc.clone(ctypes.cast(libc.pause, ctypes.c_void_p), top, 0x100 | signal.SIGCHLD, None)  # CLONE_VM
elif sys.argv[2] == "forks":
    other = os.fork() or signal.pause()
print(other, flush=True)
signal.pause()
"""


@contextmanager
def marked_process(way: str) -> Iterator[tuple[AddressSpace, subprocess.Popen[bytes], int]]:
    """A marked process, and another that it has started."""
    memory = AddressSpace()
    command = [sys.executable, "-c", MARKED, str(memory.fd), way]
    with subprocess.Popen(command, pass_fds=(memory.fd,), stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        other = int(process.stdout.readline())
        try:
            yield memory, process, other
        finally:
            process.kill()
            if other:
                os.kill(other, signal.SIGKILL)
    memory.close()


def test_memory_is_gone_with_its_process() -> None:
    with marked_process("alone") as (memory, process, _):
        assert not memory.is_gone()
        process.kill()
        process.wait(60)
        until(memory.is_gone, "its memory to be gone")
        assert memory.is_gone()


def test_memory_that_another_process_uses_is_not_gone_when_its_own_is_reaped() -> None:
    with marked_process("shares") as (memory, process, other):
        process.kill()
        process.wait(60)
        assert not memory.is_gone()
        os.kill(other, signal.SIGKILL)
        until(memory.is_gone, "its memory to be gone")


def test_a_forked_process_has_a_memory_of_its_own() -> None:
    with marked_process("forks") as (memory, process, _):
        process.kill()
        process.wait(60)
        until(memory.is_gone, "its memory to be gone")


def test_memory_of_a_process_that_has_ended_before_it_was_marked_is_gone() -> None:
    memory = AddressSpace()
    assert memory.is_gone()
    with pytest.raises(PermissionError):
        mmap.mmap(memory.fd, PAGE)
    memory.close()
