"""Credentials that no server has to know, and whole tiers that talk to a bucket in memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.support.fake_movers import Clock
from tests.support.servers import ACCESS_KEY, SECRET_KEY
from tests.tiers.s3.stepped import Bucket, SteppedTier, install


@pytest.fixture
def server_credentials(shared_aws_models: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that the servers on this machine accept, and no search for others."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", ACCESS_KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET_KEY)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")


@pytest.fixture
def bucket(server_credentials: None, monkeypatch: pytest.MonkeyPatch) -> Bucket:
    bucket = Bucket(Clock(1_800_000_000.0))
    install(monkeypatch, bucket)
    return bucket


@pytest.fixture
def make_tier(bucket: Bucket) -> Iterator[Callable[..., SteppedTier]]:
    made: list[SteppedTier] = []

    def make(**fields: Any) -> SteppedTier:
        made.append(SteppedTier(bucket, **fields))
        return made[-1]

    yield make
    bucket.fault = lambda _: None
    for each in made:
        each.release()
