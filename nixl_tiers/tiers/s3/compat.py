"""Engines of older releases on the same prefix, for this release only.

They knew two leases: `.owner`, of the one engine that stored and deleted below a private prefix, and `.janitor`, of
the mover that kept a shared prefix's budget. Whoever writes the usage record renews both, so that no old engine gets
one: an old private engine then only reads, and an old shared one stores by the record, or only reads. Where an old one
renews its lease, nobody takes the record over; an old janitor's record serves as it is.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from nixl_tiers.tiers.s3.answers import SKEW_S, age_s
from nixl_tiers.tiers.s3.conditional import get_object
from nixl_tiers.tiers.s3.names import below

NEW: Final = "usage-"  # how the holder's ID begins that an engine of this release writes
OWNER_NAME: Final = ".owner"
JANITOR_NAME: Final = ".janitor"
MAX_LEASE_S: Final = 3600.0


def _holder_of(name: str, raw: bytes) -> tuple[str, float]:
    """Who holds the lease of this name, and for how many seconds without a renewal. "": it was released."""
    holder, lease_s = raw.partition(b" ")[0].decode("ascii", "replace"), 30.0
    if name == OWNER_NAME:
        try:
            found = json.loads(raw)
            holder, lease_s = str(found["engine"]), min(MAX_LEASE_S, max(60.0, float(found["lease"])))
        except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
            holder, lease_s = "?", 60.0
    return holder[:128], lease_s


def old_engine_now(client: Any, bucket: str, prefix: str) -> str:
    """The old engine that holds one of the leases, for who reads them once; "": there is none, or its lease has surely
    expired. Raises what boto3 raises."""
    for name in (OWNER_NAME, JANITOR_NAME):
        found = get_object(client, bucket, below(prefix, name))
        if found is not None:
            holder, lease_s = _holder_of(name, found["Body"].read(1 << 16))
            if holder and not holder.startswith(NEW) and age_s(found) <= lease_s + SKEW_S:
                return holder
    return ""


@dataclass
class _Lease:
    """One of the two objects."""

    name: str
    every_s: float  # between two renewals
    etag: str | None = None
    seen_s: float = 0.0  # when it was first seen with this ETag
    wrote_s: float = float("-inf")


class OldEngines:
    """As the mover sees them that may write the usage record. Methods raise what boto3 raises."""

    def __init__(
        self,
        get: Callable[[str], dict[str, Any] | None],
        put: Callable[[str, bytes, str | None], str | None],
        mover: str,
    ) -> None:
        """`get`: an object below the prefix; `put`: replace one that has this ETag, or None."""
        self._get = get
        self._put = put
        self._holder = NEW + mover
        self.live = ""
        """Who kept this mover from taking the record over, when that was asked last."""
        self._leases = _Lease(OWNER_NAME, 15.0), _Lease(JANITOR_NAME, 0.0)

    def claim(self, now: float) -> bool | None:
        """Whether a private engine has stored since the usage record was last written, and counted it nowhere; None: an
        old engine lives."""
        (was_owned, owner), (_, janitor) = (self._old_holder(lease, now) for lease in self._leases)
        self.live = owner or janitor
        return None if self.live else was_owned

    def keep(self, now: float) -> bool:
        """Renew what is due. False: an old engine has taken one of them."""
        due = [lease for lease in self._leases if now >= lease.wrote_s + lease.every_s]
        if all(self._write(lease, now) for lease in due):
            return True
        return self.claim(now) is not None and all(self._write(lease, now) for lease in self._leases)

    def _old_holder(self, lease: _Lease, now: float) -> tuple[bool, str]:
        """Whether an old engine was the last to hold it; and which one does, as far as is known, or ""."""
        found = self._get(lease.name)
        if found is None:
            lease.etag = None
            return False, ""
        if found["ETag"] != lease.etag:
            lease.etag, lease.seen_s = found["ETag"], now
        holder, lease_s = _holder_of(lease.name, found["Body"].read(1 << 16))
        return not holder.startswith(NEW), "" if holder.startswith(NEW) or now - lease.seen_s >= lease_s else holder

    def _write(self, lease: _Lease, now: float) -> bool:
        write = secrets.token_hex(8)
        body = f"{self._holder} {write}"
        if lease.name == OWNER_NAME:
            body = json.dumps({"engine": self._holder, "since": time.time(), "lease": 60.0, "write": write})
        etag = self._put(lease.name, body.encode(), lease.etag)
        if etag is not None:
            lease.etag, lease.seen_s, lease.wrote_s = etag, now, now
        return etag is not None
