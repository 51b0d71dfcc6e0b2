"""Fixtures of the S3 tier's tests: servers, credentials, a fast budget."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from nixl_tiers.tiers.s3 import budget
from tests.support.servers import S3Server
from tests.system.tiers.s3.harness import FAST, SOON, FaultyS3, faulty_s3
from tests.tiers.s3.conftest import server_credentials

__all__ = ["server_credentials"]


@pytest.fixture(autouse=True)
def _takeovers_end_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budget, "TERMS", SOON)


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
def fast_budget(_takeovers_end_soon: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The usage record is written and taken over at short intervals."""
    monkeypatch.setattr(budget, "TERMS", FAST)
