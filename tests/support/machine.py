"""Made-up proc and sys trees, and settings of the real machine that a test changes and puts back."""

from __future__ import annotations

import fcntl
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

NR_HUGEPAGES = Path("/sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages")


def tree(root: Path, files: dict[str, object]) -> Path:
    """`root` with these files in it, by their paths and contents."""
    for name, contents in files.items():
        file = root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{contents}\n")
    return root


@contextmanager
def setting(file: Path, value: str) -> Iterator[None]:
    """`file` says `value` inside, for one test at a time. Skips the test where it cannot be written, as only root may,
    or where the kernel does not take it: there may not be so many free pages in one piece."""
    lock = Path(tempfile.gettempdir(), f"nixl_tiers-tests-{file.name}.lock")
    with lock.open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        try:
            before = _value(file)
            file.write_text(value)
        except OSError as error:
            pytest.skip(f"{file} cannot be set to {value}: {error.strerror}")
        try:
            if (taken := _value(file)) != value:
                pytest.skip(f"{file} cannot be set to {value}: it is {taken}")
            yield
        finally:
            file.write_text(before)


def _value(file: Path) -> str:
    """What it is set to; of several words, the one in brackets."""
    words = file.read_text().strip()
    return next((word.strip("[]") for word in words.split() if word.startswith("[")), words)
