"""From a configuration to the core that decides by it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nixl_tiers.base.policies import Write
from nixl_tiers.base.times import PRODUCTION, Times
from nixl_tiers.config.quotas import Tenants
from nixl_tiers.config.schema import StorageConfig, TiersConfig
from nixl_tiers.core.manager import TierManager
from nixl_tiers.core.prefill import PrefillEstimate
from nixl_tiers.core.types import PIN_MARGIN_S, Limits, TierSpec

if TYPE_CHECKING:
    from nixl_tiers.memory.region import HostRegion


def make_core(
    config: TiersConfig, tenants: Tenants, region: HostRegion, limits: Limits | None = None, times: Times = PRODUCTION
) -> TierManager:
    """The core of these tiers, over the rows of `region`. `limits`: instead of what the others say."""
    quotas = tenants.shares
    limits = limits or Limits(
        wait_s=config.wait_s,
        pin_s=config.wait_s + PIN_MARGIN_S,
        check_timeout_s=config.probe_s,
        soft_deadline_min_s=times.late_job_s,
        hard_deadline_min_s=times.overdue_job_s[0],
        hard_deadline_max_s=times.overdue_job_s[1],
        retry_s=times.set_aside_s[0],
        aside_s=times.set_aside_s[1],
        clean_wait_s=times.clean_wait_s,
    )
    return TierManager(
        region.rows,
        region.geometry.row_bytes,
        [_spec(name, tier, quotas) for name, tier in zip(config.names, config.storage, strict=True)],
        limits,
        prefill=PrefillEstimate(config.prefill_tokens_per_s),
        prefer=config.prefer,
        quotas=quotas,
    )


def _spec(name: str, tier: StorageConfig, quotas: tuple[float, ...]) -> TierSpec:
    return TierSpec(
        name,
        tier.write,
        physical_slots=tier.physical_slots,
        asked=tier.asked,
        absent_s=tier.absent_s,
        quotas=quotas if tier.own and tier.write is not Write.OFF else (),
        members=len(tier.members),
    )
