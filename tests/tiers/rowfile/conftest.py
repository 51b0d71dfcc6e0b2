"""A directory of row files, read and written without threads; and small measures for the simulated one."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from nixl_tiers.base.log_once import LogOnce
from nixl_tiers.tiers.rowfile import budget as budget_module
from nixl_tiers.tiers.rowfile import evict as evict_module
from nixl_tiers.tiers.rowfile.contents import Contents
from nixl_tiers.tiers.rowfile.directory import RowDirectory
from tests.tiers.rowfile import directory_machine as machine
from tests.tiers.rowfile.rows import OURS, ROW, Here


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[RowDirectory]:
    with closing(RowDirectory(tmp_path)) as directory:
        directory.prepare(OURS)
        directory.threads = Here()
        yield directory


@pytest.fixture
def contents(directory: RowDirectory) -> Contents:
    return Contents(directory, OURS, ROW, LogOnce(logging.getLogger(__name__)))


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few rows, windows and directories, so that engines meet."""
    monkeypatch.setattr(budget_module, "WINDOW_SHARE", machine.SHARE)
    monkeypatch.setattr(budget_module, "WINDOW_ROWS", machine.LEAST_ROWS)
    monkeypatch.setattr(evict_module, "FANOUTS", evict_module.FANOUTS[: machine.DIRECTORIES])
    monkeypatch.setattr(evict_module, "SAMPLE_ROWS", machine.SAMPLE)
