"""What a connection learns from the server's answers. A bucket's default encryption must be the configured one, because
NIXL's uploads cannot request it."""

from __future__ import annotations

from collections.abc import Callable

from nixl_tiers.base.chunk import Geometry, Outcome
from nixl_tiers.tiers.base import TierDown
from tests.support.servers import MotoServer, S3Server
from tests.system.tiers.s3.harness import TierDriver
from tests.tiers.s3.test_connection import ARN

# --- encryption -------------------------------------------------------------------------------------------------------


SMALL = Geometry(cells=1, cell_payload=64 << 10)


def test_the_tier_is_down_until_the_bucket_encrypts_as_required(
    moto: MotoServer, s3_credentials: Callable[[S3Server], None], s3_prefix: str
) -> None:
    s3_credentials(moto)
    client, name = moto.client(), moto.make_bucket("kv-encrypted")

    def encrypt(**default: str) -> None:
        rules = {"Rules": [{"ApplyServerSideEncryptionByDefault": default}]}
        client.put_bucket_encryption(Bucket=name, ServerSideEncryptionConfiguration=rules)

    place = {"bucket": name, "endpoint": moto.endpoint, "prefix": s3_prefix}
    with TierDriver(SMALL, 4, **place, sse="aws:kms", sse_key="alias/kv") as driver:
        client.delete_bucket_encryption(Bucket=name)
        driver.fails_to_open(TierDown, r'^s3 bucket "kv-encrypted" at [^ ]+: .*, and sse requires "aws:kms"$')
        assert driver.store([1]) == [Outcome.FAILED]
        encrypt(SSEAlgorithm="AES256")
        driver.fails_to_open(TierDown, 'encrypts with "AES256" by default')
        encrypt(SSEAlgorithm="aws:kms", KMSMasterKeyID="alias/other")
        driver.fails_to_open(TierDown, "another key than sse_key")
        encrypt(SSEAlgorithm="aws:kms", KMSMasterKeyID=f"{ARN}alias/kv")
        driver.open()
        assert driver.store([1]) == [Outcome.OK]
        assert client.head_object(Bucket=name, Key=driver.name(1))["ServerSideEncryption"] == "aws:kms"
        assert driver.load([1]) == [Outcome.OK]
