"""Engines of older releases on the same prefix, for this release only.

They knew two leases: `.owner`, of the one engine that stored and deleted below a private prefix, and `.janitor`, of
the mover that kept a shared prefix's budget. Whoever writes the usage record renews both, so that no old engine gets
one: an old private engine then only reads, and an old shared one stores by the record, or only reads. Where an old one
renews its lease, nobody takes the record over; an old janitor's record serves as it is.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

from nixl_tiers.tiers.s3.answers import SKEW_S, age_s
from nixl_tiers.tiers.s3.conditional import get_object, put_if
from nixl_tiers.tiers.s3.names import below

NEW: Final = "usage-"  # how the holder's ID begins that an engine of this release writes
OWNER_NAME: Final = ".owner"
JANITOR_NAME: Final = ".janitor"
MAX_LEASE_S: Final = 3600.0


def owner_of(raw: bytes) -> tuple[str, float]:
    """Who holds the lease `.owner`, and for how many seconds without a renewal. "": it was released, or by nobody
    known."""
    try:
        found = json.loads(raw)
        return str(found["engine"])[:128], min(MAX_LEASE_S, max(60.0, float(found["lease"])))
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
        return "?", 60.0


def janitor_of(raw: bytes) -> tuple[str, float]:
    return raw.partition(b" ")[0].decode("ascii", "replace")[:128], 30.0


def old_engine_now(client: Any, bucket: str, prefix: str) -> str:
    """The old engine that holds one of the leases, for who reads them once; "": there is none, or its lease has surely
    expired. Raises what boto3 raises."""
    for name, holder_of in ((OWNER_NAME, owner_of), (JANITOR_NAME, janitor_of)):
        found = get_object(client, bucket, below(prefix, name))
        if found is not None:
            holder, lease_s = holder_of(found["Body"].read(1 << 16))
            if holder and not holder.startswith(NEW) and age_s(found) <= lease_s + SKEW_S:
                return holder
    return ""


@dataclass
class _Lease:
    """One of the two objects."""

    name: str
    holder_of: Callable[[bytes], tuple[str, float]]
    every_s: float  # between two renewals
    etag: str | None = None
    seen_s: float = 0.0  # when it was first seen with this ETag
    wrote_s: float = float("-inf")


@dataclass
class OldEngines:
    client: Callable[[], Any]
    bucket: str
    prefix: str
    mover: str
    live: str = ""
    """Who kept this mover from taking the record over, when that was asked last."""
    leases: tuple[_Lease, _Lease] = field(
        default_factory=lambda: (_Lease(OWNER_NAME, owner_of, 15.0), _Lease(JANITOR_NAME, janitor_of, 0.0))
    )

    def claim(self, now: float, server_s: float, *, conditions: bool) -> bool:
        """Whether both leases are this mover's now. Raises what boto3 raises."""
        self.live = next(filter(None, [self._holder(lease, now) for lease in self.leases]), "")
        return not self.live and all(self._write(lease, now, server_s, conditions) for lease in self.leases)

    def keep(self, now: float, server_s: float, *, conditions: bool) -> bool:
        """Renew what is due. False: an old engine has taken one of them."""
        due = [lease for lease in self.leases if now >= lease.wrote_s + lease.every_s]
        return all(self._write(lease, now, server_s, conditions) for lease in due) or self.claim(
            now, server_s, conditions=conditions
        )

    def _holder(self, lease: _Lease, now: float) -> str:
        """The old engine that holds it, as far as is known, or ""."""
        found = get_object(self.client(), self.bucket, below(self.prefix, lease.name))
        if found is None:
            lease.etag = None
            return ""
        if found["ETag"] != lease.etag:
            lease.etag, lease.seen_s = found["ETag"], now
        holder, lease_s = lease.holder_of(found["Body"].read(1 << 16))
        return "" if holder.startswith(NEW) or now - lease.seen_s >= lease_s else holder

    def _write(self, lease: _Lease, now: float, server_s: float, conditions: bool) -> bool:
        holder, write = NEW + self.mover, secrets.token_hex(8)
        body = f"{holder} {write}"
        if lease.name == OWNER_NAME:
            body = json.dumps({"engine": holder, "since": server_s, "lease": 60.0, "write": write})
        condition = {"IfNoneMatch": "*"} if lease.etag is None else {"IfMatch": lease.etag}
        name = below(self.prefix, lease.name)
        answer = put_if(self.client(), self.bucket, name, body.encode(), condition if conditions else {})
        if answer is None:
            return False
        lease.etag, lease.seen_s, lease.wrote_s = answer["ETag"], now, now
        return True
