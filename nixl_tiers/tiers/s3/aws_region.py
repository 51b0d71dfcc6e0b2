"""The AWS region that requests to a bucket are signed for, and on AWS sent to: the same for boto3 and NIXL."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from typing import Final

import boto3
from botocore.exceptions import BotoCoreError

from nixl_tiers.config.schema import S3Config
from nixl_tiers.tiers.base import TierRefused

DEFAULT_REGION: Final = "us-east-1"
"""For the first request to a bucket of unknown region, and the default of self-hosted servers."""
_REGION: Final = re.compile(r"[A-Za-z0-9-]{1,64}")


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
