"""What an operator reads of an engine's tiers: numbers, and what is wrong in words. With the lock held."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from nixl_tiers.base.metrics import number_of_quota
from nixl_tiers.config.quotas import Tenants
from nixl_tiers.config.schema import TiersConfig
from nixl_tiers.runtime.mover_status import gauges, problem

if TYPE_CHECKING:
    from nixl_tiers.core.manager import TierManager
    from nixl_tiers.memory.region import HostRegion
    from nixl_tiers.runtime.mover_link import MoverLink


def counters(
    core: TierManager, link: MoverLink, config: TiersConfig, region: HostRegion, tenants: Tenants
) -> dict[str, dict[str, float]]:
    """See `Coordinator.counters`."""
    found: dict[str, dict[str, float]] = {name: gauges(link.of_tier(name)) for name in config.names}
    found["cpu"] = {
        "used_bytes": core.host.used * region.geometry.row_bytes,
        "capacity_bytes": config.cpu.capacity,
        "retained_rows": float(core.host.retained),
        "denials": 0.0,
        "full": 0.0,
        "huge_page_bytes": float(region.huge_bytes or 0),
        "ready_bytes": float(core.host.limit * region.geometry.row_bytes),
        "listed_rows": 0.0,
        "waiting_requests": float(core.waiting_requests),
        "prefill_tokens_per_s": core.prefill.tokens_per_s or 0.0,
    }
    for name, more in _of_tenants(core, tenants.named).items():
        found[name] |= more
    return {name: {**tier.numbers(), **found[name]} for name, tier in core.counters().items()}


def _of_tenants(core: TierManager, named: Mapping[str, int]) -> dict[str, dict[str, float]]:
    """The rows of each quota, in host memory and in tiers that keep quotas."""
    places: dict[str, Callable[[int], int]] = {"cpu": core.host.rows_of}
    places |= {tier.spec.name: tier.index.rows.count_of for tier in core.tiers if tier.spec.quotas}
    return {
        name: {number_of_quota(quota): rows_of(tenant) for quota, tenant in named.items()}
        for name, rows_of in places.items()
    }


def problems(link: MoverLink, config: TiersConfig) -> dict[str, str]:
    """See `Coordinator.problems`."""
    return {"cpu": "", **{name: problem(link.of_tier(name)) for name in config.names}}
