"""Quotas: which share of the tiers a tenant may have. Tenants are told apart by vLLM's `cache_salt`."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from typing import Annotated, Final

from pydantic import AfterValidator, BeforeValidator, Field

from nixl_tiers.base.policies import MOST_TENANTS
from nixl_tiers.config import fields
from nixl_tiers.config.tier import Model, when_unset

OTHERS: Final = "*"
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


class QuotaConfig(Model):
    """Of one tenant, or of all others together."""

    share: Annotated[float, BeforeValidator(fields.parse_share, json_schema_input_type=str)] = Field(
        description="of the cpu tier, and of each storage tier that is this engine's own, such as `20%`"
    )
    salt_sha256: Annotated[str, BeforeValidator(fields.parse_digest)] | None = Field(
        None,
        description="SHA-256 digest of the tenant's `cache_salt`, in hexadecimal",
        json_schema_extra=when_unset("only of `*`, which is all other requests"),
    )


def _checked(quotas: Mapping[str, QuotaConfig]) -> Mapping[str, QuotaConfig]:
    if len(quotas) > MOST_TENANTS:
        raise ValueError(f"has more than {MOST_TENANTS} names")
    owners: dict[str, str] = {}
    for name, quota in quotas.items():
        if name != OTHERS and not _NAME.fullmatch(name):
            raise ValueError("has a name that is neither * nor up to 64 letters, digits, dots, dashes and underscores")
        if (quota.salt_sha256 is None) != (name == OTHERS):
            what = "must have no salt_sha256" if name == OTHERS else "salt_sha256 is missing"
            raise ValueError(f"{name}: {what}")
        if (other := owners.setdefault(quota.salt_sha256 or OTHERS, name)) != name:
            raise ValueError(f"{name} has the same salt_sha256 as {other}")
    return quotas


Quotas = Annotated[dict[str, QuotaConfig], AfterValidator(_checked)]


class Tenants:
    """Tenants have numbers, from 1 on: that of the first one's share in `shares` is 1. 0: no quota."""

    def __init__(self, quotas: Mapping[str, QuotaConfig]) -> None:
        self.shares = tuple(quota.share for quota in quotas.values())
        self.named = {name: number for number, name in enumerate(quotas, 1)}
        self._numbers = {quota.salt_sha256: self.named[name] for name, quota in quotas.items()}

    def number_of(self, salt: str | None) -> int:
        """Of a request with this `cache_salt`. Keeps nothing of it."""
        digest = hashlib.sha256((salt or "").encode()).hexdigest()
        return self._numbers.get(digest if salt else None) or self._numbers.get(None, 0)
