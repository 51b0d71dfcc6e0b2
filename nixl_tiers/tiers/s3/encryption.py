"""Checks that a bucket's default encryption is what the configuration requires.

NIXL's object backend (1.5.1) cannot send encryption headers, so rows are encrypted as the bucket does by default. All
that can be done here is to check that default, and not to use a bucket where it is another one.
"""

from __future__ import annotations

from typing import Any, Final, get_args

from botocore.exceptions import ClientError

from nixl_tiers.config.schema import S3Config, Sse

_KNOWN: Final = get_args(Sse)
_NONE: Final = "ServerSideEncryptionConfigurationNotFoundError"


def encryption_problem(client: Any, tier: S3Config) -> str | None:
    """What is wrong with the default encryption of `tier`'s bucket, as text that follows its name; None if nothing is.

    Raises what boto3 raises when there is no answer.
    """
    if tier.sse is None:
        return None
    required = f'sse requires "{tier.sse}"'
    try:
        answer = client.get_bucket_encryption(Bucket=tier.bucket)
    except ClientError as error:
        code = str(error.response.get("Error", {}).get("Code", "unknown"))
        return (
            f"has no default encryption, and {required}"
            if code == _NONE
            else f"does not report its default encryption ({code}), and {required}"
        )
    rules = answer.get("ServerSideEncryptionConfiguration", {}).get("Rules", [])
    default: dict[str, Any] = next(
        (found for rule in rules if (found := rule.get("ApplyServerSideEncryptionByDefault"))), {}
    )
    algorithm = default.get("SSEAlgorithm")
    if algorithm != tier.sse:
        shown = f'"{algorithm}"' if algorithm in _KNOWN else "something else"
        return f"encrypts with {shown} by default, and {required}"
    if tier.sse_key is not None and not _same_key(tier.sse_key, str(default.get("KMSMasterKeyID", ""))):
        return "encrypts with another key than sse_key by default"
    return None


def _same_key(one: str, other: str) -> bool:
    """A KMS key is named by its ID, its alias, or its ARN, which ends with one of them."""
    if one.startswith("arn:") and other.startswith("arn:"):
        return one == other
    return _last_part(one) == _last_part(other)


def _last_part(key: str) -> str:
    return key.rpartition(":")[2].removeprefix("key/")
