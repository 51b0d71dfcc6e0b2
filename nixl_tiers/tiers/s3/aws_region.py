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

SOMEWHERE: Final = "us-east-1"
"""Where a bucket is asked for that may be anywhere; and what servers of one's own take unless told otherwise."""
_REGION: Final = re.compile(r"[A-Za-z0-9-]{1,64}")


@dataclass(frozen=True)
class Region:
    """A region, and who says so: a field, a variable, the profile, the bucket; or nobody, and it is a guess."""

    name: str
    source: str | None = None


def configured_region(tier: S3Config) -> Region:
    """What is known of `tier`'s region before its bucket was asked. Raises TierRefused."""
    if tier.region is not None:
        return Region(tier.region, "region")
    for variable in ("AWS_REGION", "AWS_DEFAULT_REGION"):  # boto3 itself looks at the second only
        if value := os.environ.get(variable):
            if not _REGION.fullmatch(value):
                raise TierRefused(f"region: the environment variable {variable} does not hold a region name")
            return Region(value, variable)
    try:
        profile = boto3.session.Session(profile_name=tier.profile).region_name
    except BotoCoreError:  # no such profile: whoever looks for credentials says so
        profile = None
    return Region(profile, "the profile") if profile else Region(SOMEWHERE)


def settled_region(tier: S3Config, configured: Region, told: str | None) -> Region:
    """The region to work with, once the bucket has `told` its own (None if the server does not say).

    On AWS a bucket answers in its own region only. What the environment says is often about something else (where a
    pod runs), so the bucket is right; a `region` field that is wrong is refused. Servers with an endpoint are not
    told what to check, so there only a guess gives way.

    Raises TierRefused.
    """
    if told is None or told == configured.name or not _REGION.fullmatch(told):
        return configured
    if configured.source is None:
        return Region(told, "the bucket")
    if tier.endpoint is not None:
        return configured
    if configured.source == "region":
        raise TierRefused(f'region: bucket "{tier.bucket}" is in {told}, not in {configured.name}')
    return Region(told, "the bucket")
