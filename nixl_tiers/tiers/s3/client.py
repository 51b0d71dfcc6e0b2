"""Clients of boto3 for a tier's bucket, all set up alike: with which credentials, for which region, trusting which
certificates. Nothing here logs or shows a credential."""

from __future__ import annotations

import os
import re
import ssl
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import boto3
import botocore.session
from botocore.config import Config
from botocore.credentials import SharedCredentialProvider
from botocore.exceptions import BotoCoreError, ProfileNotFound
from botocore.httpsession import where

from nixl_tiers.config.schema import S3Config
from nixl_tiers.tiers.base import TierDown, TierRefused
from nixl_tiers.tiers.s3 import answers, deletes

CONNECTIONS: Final = 24  # existence checks use as many
DEFAULT_REGION: Final = "us-east-1"
"""For the first request to a bucket of unknown region, and the default of self-hosted servers."""
_REGION: Final = re.compile(r"[A-Za-z0-9-]{1,64}")
_AWS: Final = re.compile(r"https://s3([.-][a-z0-9.-]+)?\.amazonaws\.(com|com\.cn|eu)")


def make_client(
    session: Any,
    tier: S3Config,
    credentials: Credentials,
    region: str,
    *,
    timeouts_s: tuple[float, float],
    attempts: int,
) -> Any:
    """A client with these credentials. `timeouts_s`: of a connection, and of an answer; `attempts`: of a request, in
    all."""
    client = session.client(
        "s3",
        region_name=region,
        endpoint_url=tier.endpoint,
        verify=trusted_certificates(tier),
        aws_access_key_id=credentials.access_key,
        aws_secret_access_key=credentials.secret_key,
        aws_session_token=credentials.session_token or None,
        config=Config(
            connect_timeout=timeouts_s[0],
            read_timeout=timeouts_s[1],
            retries={"mode": "standard", "total_max_attempts": attempts},
            s3={"addressing_style": "auto" if tier.endpoint is None else "path"},
            request_checksum_calculation="when_required",
            response_checksum_validation="when_required",
            proxies={},  # nor does NIXL use one, whatever the environment says: its backend has no parameter for it
            max_pool_connections=CONNECTIONS,
            tcp_keepalive=True,
        ),
    )
    client.meta.events.register("before-call.s3.DeleteObjects", deletes.add_md5)
    return client


def endpoint_of(client: Any) -> str | None:
    """Where this client's requests go; None: AWS. `endpoint_url` of a profile and AWS's variables also name one."""
    url = str(client.meta.endpoint_url)
    return None if _AWS.fullmatch(url) else url


def client_of(tier: S3Config, *, connect_s: float, read_s: float, attempts: int) -> Any:
    """A client with the credentials that the tier's mover would find. Raises TierDown, TierRefused and what boto3
    raises."""
    _, credentials = find_credentials(tier)
    session, region, timeouts_s = session_of(tier), configured_region(tier).name, (connect_s, read_s)
    return make_client(session, tier, credentials, region, timeouts_s=timeouts_s, attempts=attempts)


# --- credentials, and their present values ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Credentials:
    """What requests are signed with; never shown by repr."""

    access_key: str = field(repr=False)
    secret_key: str = field(repr=False)
    session_token: str = field(default="", repr=False)


def session_of(tier: S3Config) -> Any:
    """A boto3 session for `tier`'s clients. Raises what boto3 raises."""
    variables = {}
    if tier.credentials_file is not None or tier.profile is not None:
        # AWS_PROFILE may name a profile that exists in `credentials_file` only, so it must not be looked up elsewhere.
        variables = {"profile": (None, None, None if tier.credentials_file else tier.profile, None)}
    core = botocore.session.Session(session_vars=variables)
    answers.register_parser(core)
    return boto3.session.Session(botocore_session=core)


def find_credentials(tier: S3Config, source: Any = None) -> tuple[Any, Credentials]:
    """From the source that `tier` configures: (botocore's credentials object, their present value).

    `source`: the object that an earlier call returned; one that renews itself is used again, not looked up again.
    Raises TierDown.
    """
    if source is None or not hasattr(source, "refresh_needed"):
        try:
            source = _look_up(tier)
        except ProfileNotFound:
            name = tier.profile or os.environ.get("AWS_PROFILE") or os.environ.get("AWS_DEFAULT_PROFILE")
            raise TierDown(f'profile: there is no profile "{name}" in the files of AWS\'s configuration') from None
        except (BotoCoreError, OSError) as error:
            kind = type(error).__name__
            raise TierDown(f'credentials for s3 bucket "{tier.bucket}" cannot be read ({kind})') from None
    if source is None:
        where = f"in {tier.credentials_file}" if tier.credentials_file else "in the AWS credential chain"
        raise TierDown(f'there are no credentials for s3 bucket "{tier.bucket}" {where}')
    frozen = source.get_frozen_credentials()
    if not frozen.access_key or not frozen.secret_key:
        raise TierDown(f'the credentials for s3 bucket "{tier.bucket}" are incomplete')
    return source, Credentials(frozen.access_key, frozen.secret_key, frozen.token or "")


def _look_up(tier: S3Config) -> Any:
    if tier.credentials_file is not None:
        profile = os.environ.get("AWS_PROFILE", "default")
        return SharedCredentialProvider(creds_filename=str(tier.credentials_file), profile_name=profile).load()
    return boto3.session.Session(profile_name=tier.profile).get_credentials()


# --- the region that requests are signed for, and on AWS sent to: the same for boto3 and NIXL -------------------------


@dataclass(frozen=True)
class Region:
    """A region and its source: a field, a variable, the profile, the bucket; None for the default."""

    name: str
    source: str | None = None


def configured_region(tier: S3Config) -> Region:
    """`tier`'s region before its bucket has answered. Raises TierRefused."""
    if tier.region is not None:
        return Region(tier.region, "region")
    for variable in ("AWS_REGION", "AWS_DEFAULT_REGION"):  # boto3 itself reads the second only
        if value := os.environ.get(variable):
            if not _REGION.fullmatch(value):
                raise TierRefused(f"region: the environment variable {variable} does not hold a region name")
            return Region(value, variable)
    try:
        profile = boto3.session.Session(profile_name=tier.profile).region_name
    except BotoCoreError:  # no such profile: find_credentials reports that
        profile = None
    return Region(profile, "the profile") if profile else Region(DEFAULT_REGION)


def settled_region(tier: S3Config, configured: Region, reported: str | None) -> Region:
    """The region to use, given the one that the bucket has reported (None if the server reports none).

    On AWS a bucket answers in its own region only. The environment often names another one (where a pod runs), so the
    bucket's wins; a `region` field that contradicts it is refused. Servers with an endpoint may check the signature
    against a region of their own, so there the reported one replaces only the default.

    Raises TierRefused.
    """
    if reported is None or reported == configured.name or not _REGION.fullmatch(reported):
        return configured
    if configured.source is None:
        return Region(reported, "the bucket")
    if tier.endpoint is not None:
        return configured
    if configured.source == "region":
        raise TierRefused(f'region: bucket "{tier.bucket}" is in {reported}, not in {configured.name}')
    return Region(reported, "the bucket")


# --- TLS --------------------------------------------------------------------------------------------------------------


def trusted_certificates(tier: S3Config) -> str | None:
    """The CA bundle to verify an https endpoint with; None for http.

    The AWS library in NIXL's wheel looks for it at its builder's path, which other distributions do not have.
    """
    if tier.endpoint is not None and tier.endpoint.startswith("http:"):
        return None
    candidates = (tier.ca_file, os.environ.get("AWS_CA_BUNDLE"), ssl.get_default_verify_paths().cafile)
    return next((str(path) for path in candidates if path and Path(path).is_file()), str(where()))
