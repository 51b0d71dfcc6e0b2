"""Whether a bucket encrypts what is put into it as its operator requires.

NIXL's object backend (1.5.1) sends a bucket, a name and a body, and has no way to send a header of encryption. So rows
are encrypted as the bucket does by default; what can be done here is to look, and to use no bucket that does otherwise.
"""

from __future__ import annotations

from typing import Any, Final, get_args

from botocore.exceptions import ClientError

from nixl_tiers.config.schema import S3Config, Sse

_KNOWN: Final = get_args(Sse)
_NONE: Final = "ServerSideEncryptionConfigurationNotFoundError"


def objection(client: Any, tier: S3Config) -> str | None:
    """What is wrong with the default encryption of `tier`'s bucket, to follow its name; None if nothing is.

    Raises what boto3 raises when the server cannot be asked.
    """
    if tier.sse is None:
        return None
    wanted = f'sse requires "{tier.sse}"'
    try:
        answer = client.get_bucket_encryption(Bucket=tier.bucket)
    except ClientError as error:
        code = str(error.response.get("Error", {}).get("Code", "unknown"))
        return f"has no default encryption, and {wanted}" if code == _NONE else f"does not tell ({code}), and {wanted}"
    rules = answer.get("ServerSideEncryptionConfiguration", {}).get("Rules", [])
    default: dict[str, Any] = next(
        (found for rule in rules if (found := rule.get("ApplyServerSideEncryptionByDefault"))), {}
    )
    algorithm = default.get("SSEAlgorithm")
    if algorithm != tier.sse:
        shown = f'"{algorithm}"' if algorithm in _KNOWN else "something else"
        return f"encrypts with {shown} by default, and {wanted}"
    if tier.sse_key is not None and not _same_key(tier.sse_key, str(default.get("KMSMasterKeyID", ""))):
        return "encrypts with another key than sse_key by default"
    return None


def _same_key(one: str, other: str) -> bool:
    """A KMS key is named by its id, its alias or its ARN, which ends with one of them."""
    if one.startswith("arn:") and other.startswith("arn:"):
        return one == other
    return _last_part(one) == _last_part(other)


def _last_part(key: str) -> str:
    return key.rpartition(":")[2].removeprefix("key/")
