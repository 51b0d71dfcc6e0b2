"""Fixtures of the S3 tier's tests: servers, credentials, a fast janitor."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from nixl_tiers.tiers.s3 import lease, shared
from tests.support.servers import S3Server
from tests.system.tiers.s3.harness import FAST_JANITOR, QUICK_LEASE, FaultyS3, faulty_s3
from tests.tiers.s3.conftest import server_credentials

__all__ = ["server_credentials"]


@pytest.fixture(autouse=True)
def _tenures_begin_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease, "OWNER_TERMS", QUICK_LEASE)


@pytest.fixture
def place(
    s3_server: S3Server,
    s3_credentials: Callable[[S3Server], None],
    s3_bucket: Callable[[S3Server], str],
    s3_prefix: str,
) -> dict[str, Any]:
    """Fields of a tier's configuration: an empty prefix on each server in turn."""
    s3_credentials(s3_server)
    return {"bucket": s3_bucket(s3_server), "endpoint": s3_server.endpoint, "prefix": s3_prefix}


@pytest.fixture
def faulty(server_credentials: None) -> Iterator[FaultyS3]:
    with faulty_s3() as server:
        yield server


@pytest.fixture
def fast_janitor(monkeypatch: pytest.MonkeyPatch) -> None:
    """The S3 tier's janitor has short intervals."""
    monkeypatch.setattr(shared, "INTERVALS", FAST_JANITOR)
