"""Mistakes in a valid configuration are warned about, and nothing else is."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

import nixl_tiers
from nixl_tiers.config import schema
from nixl_tiers.config.warnings import warnings_of


def test_store_logs_warnings_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tiers = {"tiers": [{"type": "cpu", "capacity": 65536}], "flush_on_exit_s": 1}
    with caplog.at_level(logging.WARNING), nixl_tiers.open(tiers, chunk_bytes=64, namespace="n"):
        pass
    lines = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert lines == [f"nixl_tiers: {line}" for line in warnings_of(schema.load(tiers))]
    assert len(lines) == 2
