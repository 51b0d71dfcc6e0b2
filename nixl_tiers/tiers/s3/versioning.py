"""Finds out whether a bucket keeps what is deleted or overwritten, as versions that no capacity bounds."""

from __future__ import annotations

from typing import Any, Final

VERSIONED: Final = "versioning is on: deleted and overwritten objects stay as old versions, which no capacity bounds"
REMEDY: Final = "suspend versioning, or have a lifecycle rule delete noncurrent versions"


def is_versioned(client: Any, bucket: str) -> bool:
    """Whether a delete leaves an old version. Raises what boto3 raises: not every server knows versions, and the right
    s3:GetBucketVersioning is needed for nothing else."""
    return bool(client.get_bucket_versioning(Bucket=bucket).get("Status") == "Enabled")
