"""Settings of the whole machine that a test changes and puts back, one test at a time. Only root may."""

from __future__ import annotations

import fcntl
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

NR_HUGEPAGES = Path("/sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages")
SHMEM_ENABLED = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")


@contextmanager
def setting(file: Path, value: str) -> Iterator[None]:
    """`file` says `value` inside. Skips the test where it cannot be written."""
    lock = Path(tempfile.gettempdir(), f"nixl_tiers-tests-{file.name}.lock")
    with lock.open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        try:
            before = file.read_text().strip()
            before = next((word.strip("[]") for word in before.split() if word.startswith("[")), before)
            file.write_text(value)
        except OSError as error:
            pytest.skip(f"{file} cannot be set to {value}: {error.strerror}")
        try:
            yield
        finally:
            file.write_text(before)
