"""Eviction policies: which key of a tier goes first."""

from __future__ import annotations

from typing import get_args

from nixl_tiers.base.policies import Eviction
from nixl_tiers.core.eviction.arc import Arc
from nixl_tiers.core.eviction.base import EvictionPolicy
from nixl_tiers.core.eviction.lru import LeafFirstLru
from nixl_tiers.core.eviction.s3fifo import S3Fifo


def make_policy(name: Eviction, rows: int) -> EvictionPolicy:
    """The policy of that name for a tier of `rows` rows. Raises ValueError for a name that is none of them."""
    if name == "lru":
        return LeafFirstLru()
    if name == "s3fifo":
        return S3Fifo(rows)
    if name == "arc":
        return Arc(rows)
    raise ValueError(f"policy: {name!r} is not one of {', '.join(get_args(Eviction))}")
