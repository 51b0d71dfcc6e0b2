"""A directory of row files, over the `quota` of each test file; and small measures for the simulated one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from nixl_tiers.tiers.rowfile import budget as budget_module
from nixl_tiers.tiers.rowfile import evict as evict_module
from nixl_tiers.tiers.rowfile.directory import RowDirectory
from nixl_tiers.tiers.rowfile.quota import DirQuota
from tests.tiers.rowfile import directory_machine as machine


@pytest.fixture
def directory(tmp_path: Path, quota: DirQuota) -> Iterator[RowDirectory]:
    with closing(RowDirectory(tmp_path, quota)) as directory:
        directory.prepare(bytes(16).hex())
        yield directory


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few rows, windows and directories, so that engines meet."""
    monkeypatch.setattr(budget_module, "WINDOW_SHARE", machine.SHARE)
    monkeypatch.setattr(budget_module, "WINDOW_ROWS", machine.LEAST_ROWS)
    monkeypatch.setattr(evict_module, "FANOUTS", evict_module.FANOUTS[: machine.DIRECTORIES])
    monkeypatch.setattr(evict_module, "SAMPLE_ROWS", machine.SAMPLE)
