"""Two ranks page-lock the same memory, each in a process of its own; one dies, and comes back."""

from __future__ import annotations

from pathlib import Path

from tests.swap.test_ranks import two_ranks


def test_two_processes_page_lock_one_region(fake_library: Path) -> None:
    two_ranks([str(fake_library)])
