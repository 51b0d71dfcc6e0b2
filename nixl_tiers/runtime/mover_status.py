"""What movers report of their media, and what an operator is shown of it: of each mover, and of a tier's."""

from __future__ import annotations

from collections.abc import Sequence

from nixl_tiers.base.chunk import FAILING, FULL, UNREACHABLE
from nixl_tiers.config.schema import FileConfig, StorageConfig, format_size
from nixl_tiers.runtime.tier_log import TierLog, Write


class MoverStatus:
    """What one mover last reported of its medium. Guarded by the coordinator's lock."""

    def __init__(self, tier: str, name: str, config: StorageConfig, write: Write, replicas: int = 1) -> None:
        """`tier`: its name; `name`: which of its members this is, too; `replicas`: by which slabs are divided."""
        self.tier = tier
        self.name = name
        self.place = config.place
        divided = replicas if isinstance(config, FileConfig) and config.layout == "slabs" else 1
        self.capacity = config.capacity // divided  # bytes
        self.reads_only = config.write == "off"
        self.log = TierLog(name, config.place, format_size(config.capacity), write)
        self.answered = False  # opened, down or refused since the current namespace was sent
        self.refusal = ""  # why the tier can never work as configured
        self.used_bytes = 0
        self.listed_rows = 0
        self.staged = (False, False)  # loads and stores
        self.stuck = False


def gauges(movers: Sequence[MoverStatus]) -> dict[str, float]:
    """Of the movers of one tier."""
    return {
        "used_bytes": sum(each.used_bytes for each in movers),
        "capacity_bytes": sum(each.capacity for each in movers),
        "denials": float(sum(len(each.log.denials.keys() - {FAILING, FULL, UNREACHABLE}) for each in movers)),
        "full": float(any(FULL in each.log.denials for each in movers)),
        "listed_rows": float(sum(each.listed_rows for each in movers)),
        "loads_staged": float(any(each.staged[0] for each in movers)),
        "stores_staged": float(any(each.staged[1] for each in movers)),
    }


def problem(movers: Sequence[MoverStatus]) -> str:
    """Why the medium of each of a tier's movers is down, or what it denies, in words."""
    if len(movers) == 1:
        return movers[0].log.problem
    return "; ".join(f"{each.place}: {each.log.problem}" for each in movers if each.log.problem)
