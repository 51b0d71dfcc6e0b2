"""Finds a tier's credentials, and their present values. Nothing here logs or shows them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import boto3
import botocore.session
from botocore.credentials import SharedCredentialProvider
from botocore.exceptions import BotoCoreError, ProfileNotFound

from nixl_tiers.config.schema import S3Config
from nixl_tiers.tiers.base import TierDown, TierRefused
from nixl_tiers.tiers.s3 import xml_parser


@dataclass(frozen=True)
class Credentials:
    """What requests are signed with; never shown by repr."""

    access_key: str = field(repr=False)
    secret_key: str = field(repr=False)
    session_token: str = field(default="", repr=False)


def session_of(tier: S3Config) -> Any:
    """A boto3 session for `tier`'s clients. Raises what boto3 raises."""
    if tier.credentials_file is None and tier.access_key_env is None:
        return _session({} if tier.profile is None else {"profile": (None, None, tier.profile, None)})
    # AWS_PROFILE may name a profile that exists in `credentials_file` only, so it must not be looked up elsewhere.
    return _session({"profile": (None, None, None, None)})


def _session(variables: Mapping[str, object]) -> Any:
    core = botocore.session.Session(session_vars=variables)
    xml_parser.register(core)
    return boto3.session.Session(botocore_session=core)


def find_credentials(tier: S3Config, source: Any = None) -> tuple[Any, Credentials]:
    """From the source that `tier` configures: (botocore's credentials object or None, their present value).

    `source`: the object that an earlier call returned; one that renews itself is used again, not looked up again.
    Raises TierRefused for an environment variable that is not set (it never will be), TierDown for all that may change.
    """
    if tier.access_key_env is not None:
        assert tier.secret_key_env is not None
        access, secret = _variable(tier, "access_key_env"), _variable(tier, "secret_key_env")
        return None, Credentials(access, secret, _variable(tier, "session_token_env") if tier.session_token_env else "")
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


def _variable(tier: S3Config, field_name: str) -> str:
    name = getattr(tier, field_name)
    value = os.environ.get(name, "")
    if not value:
        raise TierRefused(f"{field_name}: the environment variable {name} is not set")
    return value
