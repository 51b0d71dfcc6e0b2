"""Clients of boto3 for a tier's bucket, all set up alike."""

from __future__ import annotations

import re
from typing import Any, Final

from botocore.config import Config

from nixl_tiers.config.schema import S3Config
from nixl_tiers.tiers.s3.aws_region import configured_region
from nixl_tiers.tiers.s3.credentials import Credentials, find_credentials, session_of
from nixl_tiers.tiers.s3.tls import trusted_certificates

_AWS: Final = re.compile(r"https://s3([.-][a-z0-9.-]+)?\.amazonaws\.(com|com\.cn|eu)")


def make_client(
    session: Any,
    tier: S3Config,
    credentials: Credentials,
    region: str,
    *,
    connect_s: float,
    read_s: float,
    attempts: int,
    **options: Any,
) -> Any:
    """A client with these credentials. `attempts`: of a request, in all; `options`: more of botocore's Config."""
    return session.client(
        "s3",
        region_name=region,
        endpoint_url=tier.endpoint,
        verify=trusted_certificates(tier),
        aws_access_key_id=credentials.access_key,
        aws_secret_access_key=credentials.secret_key,
        aws_session_token=credentials.session_token or None,
        config=Config(
            connect_timeout=connect_s,
            read_timeout=read_s,
            retries={"mode": "standard", "total_max_attempts": attempts},
            s3={"addressing_style": "auto" if tier.endpoint is None else "path"},
            request_checksum_calculation="when_required",
            response_checksum_validation="when_required",
            **options,
        ),
    )


def endpoint_of(client: Any) -> str | None:
    """Where this client's requests go; None: AWS. `endpoint_url` of a profile and AWS's variables also name one."""
    url = str(client.meta.endpoint_url)
    return None if _AWS.fullmatch(url) else url


def client_of(tier: S3Config, *, connect_s: float, read_s: float, attempts: int) -> Any:
    """A client with the credentials that the tier's mover would find. Raises TierDown, TierRefused and what boto3
    raises."""
    _, credentials = find_credentials(tier)
    session, region = session_of(tier), configured_region(tier).name
    return make_client(session, tier, credentials, region, connect_s=connect_s, read_s=read_s, attempts=attempts)
