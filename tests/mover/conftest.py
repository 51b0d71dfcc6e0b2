"""Places for the tests of the object tier."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from nixl_tiers.testing.servers import S3Server


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
