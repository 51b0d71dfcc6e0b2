"""The object tier keeps the contract, on a forgiving server and on a real one."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from nixl_tiers.testing.conformance import StorageTierTests
from nixl_tiers.testing.medium import Medium
from nixl_tiers.testing.servers import MotoServer, S3Server, SeaweedServer
from tests.tiers.media import Objects

Use = Callable[[S3Server], None]
BucketOf = Callable[[S3Server], str]


class TestObjectStorageOnMoto(StorageTierTests):
    @pytest.fixture
    def medium(self, moto: MotoServer, s3_credentials: Use, s3_bucket: BucketOf, s3_prefix: str) -> Medium:
        s3_credentials(moto)
        return Objects(moto, s3_bucket(moto), s3_prefix)


class TestObjectStorageOnSeaweedfs(StorageTierTests):
    @pytest.fixture
    def medium(self, seaweedfs: SeaweedServer, s3_credentials: Use, s3_bucket: BucketOf, s3_prefix: str) -> Medium:
        s3_credentials(seaweedfs)
        return Objects(seaweedfs, s3_bucket(seaweedfs), s3_prefix)
