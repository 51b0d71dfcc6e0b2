"""A directory of row files, read and written without threads."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from nixl_tiers.base.log_once import LogOnce
from nixl_tiers.tiers.rowfile.contents import Contents
from nixl_tiers.tiers.rowfile.directory import RowDirectory
from tests.support.hooked import build
from tests.tiers.rowfile.rows import OURS, ROW, Here


@pytest.fixture(scope="package")
def hooked(tmp_path_factory: pytest.TempPathFactory) -> str:
    return build(tmp_path_factory.mktemp("hooked"), "hooked_files")


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[RowDirectory]:
    with closing(RowDirectory(tmp_path)) as directory:
        directory.prepare(OURS)
        directory.threads = Here()
        yield directory


@pytest.fixture
def contents(directory: RowDirectory) -> Contents:
    return Contents(directory, OURS, ROW, LogOnce(logging.getLogger(__name__)))
