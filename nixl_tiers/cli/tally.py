"""What servers have counted, for `report`: sums over engines and servers, differences of two scrapes, and the share of
prompts that came from tiers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from prometheus_client.samples import Sample

from nixl_tiers.base.metrics import METRICS, PREFIX, PROBLEM
from nixl_tiers.base.tier_traits import CPU, NO_TIER
from nixl_tiers.cli.scrape import STARTED

Series = tuple[str, str, str]  # name, tier, reason; "" for what it does not have

# Of each tier, under the names that --json has.
BY_TIER: Final[Mapping[str, tuple[str, str]]] = {
    "tokens": ("hit_tokens_total", ""),
    "saved_first_token_s": ("saved_first_token_seconds_total", ""),
    "saved_prefill_s": ("saved_prefill_seconds_total", ""),
    "lost_slower_s": ("lost_seconds_total", "slower"),
    "lost_vain_s": ("lost_seconds_total", "vain"),
    "mover_exits": ("mover_exits_total", ""),
    "mover_kills": ("mover_kills_total", ""),
}
MISSES: Final = "misses_total"
DROPS: Final = "drops_total"
PROMPT_TOKENS: Final = "vllm:prompt_tokens_total"
OWN_HITS: Final = "vllm:prefix_cache_hits_total"  # in tokens, too
BYTES: Final = ("used_bytes", "capacity_bytes")
GAUGES: Final = ("up", "listing", "breaker", "denials", "full", *BYTES)
NEW: Final = ("never_stored", NO_TIER)
_OF_ALL: Final = {MISSES, PROMPT_TOKENS, OWN_HITS, STARTED}
_COUNTED: Final = {*_OF_ALL, DROPS, *(name for name, _ in BY_TIER.values())}


@dataclass(frozen=True)
class TierState:
    """Of one engine's tier, now."""

    server: str
    engine: str
    tier: str
    gauges: Mapping[str, float]
    place: str
    """Of its medium: engines that share one all report all of its bytes."""
    problem: str = ""
    """What is wrong with it, in words."""

    @property
    def word(self) -> str:
        """As it is for requests; the host has no medium that could fail."""
        now = self.gauges
        if not now.get("up", 1):
            return "down"
        if breaker := now.get("breaker", 0):
            return "circuit open" if breaker == 2 else "circuit half-open"
        if now.get("listing", 0):
            return "listing"
        if now.get("denials", 0):
            return "up, requests denied"
        return "up, full: evicts to store" if now.get("full", 0) else "up"


@dataclass
class Tally:
    """Of one server, or of several, added up."""

    counts: dict[Series, float] = field(default_factory=dict)
    states: list[TierState] = field(default_factory=list)

    @classmethod
    def of(cls, server: str, page: Iterable[Sample]) -> Tally:
        found, gauges = cls(), dict[tuple[str, str], dict[str, float]]()
        places, problems = dict[tuple[str, str], str](), dict[tuple[str, str], str]()
        for sample in page:
            name, tier = sample.name.removeprefix(PREFIX), sample.labels.get("tier", CPU)
            if name in _COUNTED:
                series = (name, tier, sample.labels.get("reason", ""))
                found.counts[series] = found.counts.get(series, 0.0) + sample.value
            elif name in GAUGES and name != sample.name:
                at = sample.labels.get("engine", ""), tier
                gauges.setdefault(at, {})[name] = sample.value
                places[at] = sample.labels.get("place") or places.get(at) or f"{server} {at[0]}"
            elif name == PROBLEM and sample.value:
                problems[sample.labels.get("engine", ""), tier] = sample.labels.get("problem", "")
        found.states = [
            TierState(server, *at, levels, places[at], problems.get(at, "")) for at, levels in gauges.items()
        ]
        return found

    def since(self, before: Tally) -> Tally | None:
        """What was counted after that; None if the server has started since."""
        for series, count in before.counts.items():
            now = self.counts.get(series, 0.0)
            if now < count or (series[0] == STARTED and now > count):
                return None
        return Tally({each: count - before.counts.get(each, 0.0) for each, count in self.counts.items()}, self.states)

    def plus(self, other: Tally) -> Tally:
        both = {*self.counts, *other.counts}
        total = {each: self.counts.get(each, 0.0) + other.counts.get(each, 0.0) for each in sorted(both)}
        return Tally(total, [*self.states, *other.states])

    def total(self, name: str, tier: str | None = None, reason: str | None = None) -> float:
        return sum(
            count
            for (its, at, why), count in self.counts.items()
            if its == name and tier in (None, at) and reason in (None, why)
        )

    @property
    def tiers(self) -> list[str]:
        """Those that have counted something, or show their state."""
        loaded = [tier for name, tier, _ in self.counts if name not in _OF_ALL]
        return list(dict.fromkeys([*loaded, *(state.tier for state in self.states)]))

    def room(self, tier: str) -> tuple[float, float] | None:
        """Bytes used and capacity, each place counted once; None where no engine says."""
        places: dict[str, list[tuple[float, float]]] = {}
        for state in self.states:
            if state.tier == tier and state.gauges.keys() >= {*BYTES}:
                used, capacity = (state.gauges[name] for name in BYTES)
                places.setdefault(state.place, []).append((used, capacity))
        if not places:
            return None
        return sum(max(said)[0] for said in places.values()), sum(max(c for _, c in said) for said in places.values())

    def numbers(self, tier: str | None = None) -> dict[str, float]:
        """BY_TIER of one tier; None: of all."""
        return {field: self.total(name, tier, reason) for field, (name, reason) in BY_TIER.items()}

    def hit_rate(self, tier: str | None = None) -> float | None:
        """Share of all prompt tokens that were loaded from the tier; None where there was no prompt."""
        asked = self.total(PROMPT_TOKENS)
        return self.total(BY_TIER["tokens"][0], tier) / asked if asked else None

    @property
    def misses(self) -> Counter[tuple[str, str]]:
        """Chunks by (reason, tier)."""
        return self._by_reason(MISSES)

    @property
    def drops(self) -> Counter[tuple[str, str]]:
        """Chunks that were not written, by (reason, tier)."""
        return self._by_reason(DROPS)

    def _by_reason(self, name: str) -> Counter[tuple[str, str]]:
        return +Counter({(why, at): int(count) for (its, at, why), count in self.counts.items() if its == name})

    def as_json(self) -> dict[str, Any]:
        return {
            "hit_rate": self.hit_rate(),
            "prompt_tokens": self.total(PROMPT_TOKENS),
            "own_hit_tokens": self.total(OWN_HITS),
            "total": self.numbers(),
            "tiers": {tier: {**self.numbers(tier), "hit_rate": self.hit_rate(tier)} for tier in self.tiers},
            "misses": [{"reason": r, "tier": t, "chunks": count} for (r, t), count in self.misses.most_common()],
            "not_written": [{"reason": r, "tier": t, "chunks": count} for (r, t), count in self.drops.most_common()],
            "state": [
                {
                    "server": each.server,
                    "engine": each.engine,
                    "tier": each.tier,
                    "state": each.word,
                    "problem": each.problem,
                    **each.gauges,
                }
                for each in self.states
            ],
        }


def meaning(reason: str, tier: str, metric: str = MISSES) -> str:
    """Of a miss, or of a chunk that was not written (DROPS), for people."""
    if (reason, tier) == NEW:
        return "new prompts: no tier is known to have held them"
    series = METRICS[metric.removesuffix("_total")].series.values()
    return next((one.meaning for one in series if one.values == (reason,)), reason)
