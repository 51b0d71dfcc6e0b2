"""A directory of row files, over the `quota` of each test file."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from nixl_tiers.tiers.rowfile.directory import RowDirectory
from nixl_tiers.tiers.rowfile.quota import DirQuota


@pytest.fixture
def directory(tmp_path: Path, quota: DirQuota) -> Iterator[RowDirectory]:
    with closing(RowDirectory(tmp_path, quota)) as directory:
        directory.prepare(bytes(16).hex())
        yield directory
