"""Probes: by which row it is seen whether a tier works again whose circuit is half-open."""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Final

from nixl_tiers.base.policies import Write
from nixl_tiers.core.coldest import take_cold
from nixl_tiers.core.host import HostTier, Row, RowState

if TYPE_CHECKING:
    from nixl_tiers.base.chunk import Key
    from nixl_tiers.core.tier_index import TierIndex

MAX_NEWEST: Final = 1024  # rows of an index that are looked at; the first of them will do, as a rule
MAX_COLDEST: Final = 64  # and that are taken out of its tables, which takes longer
MAX_SAMPLED: Final = 64  # rows of the host


def row_to_load(tier: TierIndex) -> Key | None:
    """A stored row that is no suspect: the one asked for last while the circuit was not closed, or one of the newest
    in the index, or of the coldest in its tables, as all rows are in these after the tier was opened again. Suspects
    that it comes across there stay in the index: each call goes on from where the last one ended."""
    is_suspect = tier.denylist.is_suspect
    last = tier.last_refused
    if last is not None and last in tier and not is_suspect(last):
        return last
    newest = islice(reversed(tier.index.items()), MAX_NEWEST)
    found = next((k for k, e in newest if e.stored and not e.evicting and not is_suspect(k)), None)
    if found is not None or not tier.cold.tables:
        return found
    coldest = take_cold(tier, min(MAX_COLDEST, 1 + len(tier.denylist.keys)))
    for key in reversed(coldest):
        tier.policy.add(key, 0)  # the last one first: the coldest is the one that was added last
    return next((key for key in coldest if not is_suspect(key)), None)


def row_to_store(tier: TierIndex, host: HostTier) -> Row | None:
    """One of the host's newest rows that `tier` lacks: if possible one that is sealed, as other tiers cannot be written
    while a probe seals it."""
    if tier.spec.write is Write.OFF:
        return None
    found: Row | None = None
    for key, row in islice(reversed(host.index.items()), MAX_SAMPLED):
        ready = row.state is RowState.READY and not row.sealing and not row.host_only
        if ready and (row.sealed or found is None) and key not in tier and not tier.denylist.is_suspect(key):
            if row.sealed:
                return row
            found = row
    return found
