"""The object tier keeps the contract, on a forgiving server, on a real one, and on that of `--endpoint`."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from nixl_tiers.testing.conformance import StorageTierTests
from nixl_tiers.testing.medium import Medium
from tests.support.servers import S3Server
from tests.system.tiers.media import Objects


class TestObjectStorage(StorageTierTests):
    @pytest.fixture
    def medium(
        self,
        s3_server: S3Server,
        s3_credentials: Callable[[S3Server], None],
        s3_bucket: Callable[[S3Server], str],
        s3_prefix: str,
    ) -> Medium:
        s3_credentials(s3_server)
        return Objects(s3_server, s3_bucket(s3_server), s3_prefix)
