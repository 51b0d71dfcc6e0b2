"""Every metric: its name, unit, labels and meaning, and the number (`Coordinator.counters`) behind each series.

Without vLLM: `vllm/metrics.py` declares them to vLLM, `docs/generate.py` writes the reference from them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from nixl_tiers.base.tier_traits import (
    NO_TIER,
    Has,
    TierTraits,
    checked,
    disk,
    every,
    host,
    promoting,
    shared_out,
    storage,
    stored_to,
    written,
    written_disk,
)

PREFIX: Final = "nixl_tiers:"


class Kind(StrEnum):
    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True)
class Series:
    """`values`: of the metric's labels without `tier`. `tier`: for what is counted at one tier and concerns another."""

    has: Has = every
    values: tuple[str, ...] = ()
    meaning: str = ""
    tier: str | None = None


@dataclass(frozen=True)
class Metric:
    """`series`: by number in `Coordinator.counters` (of a histogram: by name of the samples)."""

    kind: Kind
    text: str
    series: Mapping[str, Series]
    labels: tuple[str, ...] = ("tier",)
    buckets: tuple[float, ...] | None = field(default=None)


SECONDS: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 120.0)
BYTES: Final = tuple(float(1 << power) for power in range(16, 31, 2))
REASON: Final = ("tier", "reason")
PLACE: Final = ("tier", "place")
"""`place` is alike for all engines that use one medium: each of them reports all of it, so only places add up."""
QUOTA_CHUNKS: Final = "quota_chunks"
"""Of this series a tier has one for each quota, by `number_of_quota`, with the name of that for the value `*`."""


def _counter(text: str, has: Has = every, *, number: str) -> Metric:
    return Metric(Kind.COUNTER, text, {number: Series(has)})


def _reasons(text: str, labels: tuple[str, ...], **series: Series) -> Metric:
    return Metric(Kind.COUNTER, text, series, labels)


def _gauge(text: str, has: Has = every, *, number: str, labels: tuple[str, ...] = ("tier",)) -> Metric:
    return Metric(Kind.GAUGE, text, {number: Series(has)}, labels)


def _histogram(text: str, name: str, has: Has, buckets: tuple[float, ...]) -> Metric:
    return Metric(Kind.HISTOGRAM, text, {name: Series(has)}, buckets=buckets)


# Names end in their unit; Prometheus appends `_total` to counters. A chunk is the unit of look-ups and moves.
METRICS: Final[Mapping[str, Metric]] = {
    # --- requests ----------------------------------------------------------------------------------------------
    "hits": _counter(
        "Chunks that requests loaded from this tier: from host memory, or promoted from storage.",
        number="hits",
    ),
    "hit_tokens": _counter("Tokens of these chunks.", number="hit_tokens"),
    "misses": _reasons(
        "Chunks of requests' prefixes that had to be computed, once per request.",
        REASON,
        missed_never_stored=Series(host, ("never_stored",), "no tier is known to have held it recently", tier=NO_TIER),
        missed_evicted=Series(every, ("evicted",), "this tier's budget was too small: it was the last to hold it"),
        missed_expired=Series(storage, ("expired",), "its time to live is over, or another engine has deleted it"),
        missed_listing=Series(storage, ("listing",), "not known, while this tier was still being listed"),
        missed_down=Series(storage, ("tier_down",), "this tier holds it, and is down"),
        missed_open=Series(storage, ("circuit_open",), "this tier holds it, and its circuit is not closed"),
        missed_failed=Series(every, ("failed",), "it was corrupt, or a move of it has failed or hung recently"),
        missed_slower=Series(storage, ("slower",), "computing it was expected to be faster than loading it"),
        missed_late=Series(storage, ("late",), "it was not loaded before the request's wait had to end"),
        missed_excluded=Series(storage, ("excluded",), "the request itself allows no load from this tier"),
        missed_no_room=Series(promoting, ("no_room",), "host memory was full of chunks for other requests"),
    ),
    "wait_seconds": Metric(
        Kind.HISTOGRAM,
        "How long a request waited for promotions, by the lowest tier that it waited for.",
        {
            "wait_loaded": Series(storage, ("loaded",), "and then loaded all it waited for"),
            "wait_partial": Series(storage, ("partial",), "and then loaded what had come by then"),
            "wait_vain": Series(storage, ("vain",), "and loaded nothing: it computed everything, or was aborted"),
        },
        ("tier", "outcome"),
        SECONDS,
    ),
    "waiting_requests": _gauge(
        "Requests that wait for chunks to be promoted.", host, number="waiting_requests", labels=()
    ),
    "kv_hint_requests": Metric(Kind.COUNTER, "Requests that carried vLLM's kv_hints.", {"kv_hints": Series(host)}, ()),
    "hint_actions": _reasons(
        "Hints in kv_hints or kv_transfer_params, by what became of them.",
        ("outcome",),
        hints_accepted=Series(host, ("accepted",), "acted upon"),
        hints_clipped=Series(host, ("clipped",), "acted upon for a shorter time or fewer chunks: the share was full"),
        hints_rejected=Series(host, ("rejected",), "not understood, or no room for it"),
        hints_unknown=Series(host, ("unknown",), "an action that nixl_tiers does not have"),
    ),
    # --- what it brought (core/stats.py) ------------------------------------------------------------------
    "saved_first_token_seconds": _counter(
        "Seconds by which first tokens came earlier: expected time to compute what was loaded, less that of loading "
        "and waiting.",
        number="saved_first_token_s",
    ),
    "saved_prefill_seconds": _counter(
        "Expected time to compute what was loaded, however long loading took.", number="saved_prefill_s"
    ),
    "lost_seconds": _reasons(
        "Seconds by which first tokens came later.",
        REASON,
        lost_slower_s=Series(every, ("slower",), "loading took longer than computing would have"),
        lost_vain_s=Series(
            every, ("vain",), "a request waited, or a copy failed, and it computed the chunks after all"
        ),
    ),
    "prefill_tokens_per_s": _gauge(
        "Prompt tokens that the engine computes per second, as measured; 0: not known yet.",
        host,
        number="prefill_tokens_per_s",
        labels=(),
    ),
    # --- moves -------------------------------------------------------------------------------------------------
    "promotion_seconds": _histogram(
        "From when a request began to wait for a chunk of this tier until it was a hit.",
        "promotion_seconds",
        storage,
        SECONDS,
    ),
    "load_seconds": _histogram("Duration of a job that read from this tier.", "load_seconds", storage, SECONDS),
    "load_bytes": _histogram("Bytes read by such a job.", "load_bytes", storage, BYTES),
    "store_seconds": _histogram("Duration of a job that wrote to this tier.", "store_seconds", written, SECONDS),
    "store_bytes": _histogram("Bytes written by such a job.", "store_bytes", written, BYTES),
    "read_bytes": _counter("Bytes read from this tier into host memory.", storage, number="bytes_read"),
    "written_bytes": _counter("Bytes written to this tier from host memory.", written, number="bytes_written"),
    "queued_chunks": Metric(
        Kind.GAUGE,
        "Chunks that wait to be moved.",
        {
            "queued_loads": Series(storage, ("load",), "from this tier to host memory"),
            "queued_stores": Series(written, ("store",), "from host memory to this tier"),
        },
        ("tier", "direction"),
    ),
    "moving_chunks": Metric(
        Kind.GAUGE,
        "Chunks that are being moved.",
        {
            "loading": Series(storage, ("load",), "from this tier to host memory"),
            "storing": Series(written, ("store",), "from host memory to this tier"),
        },
        ("tier", "direction"),
    ),
    "drops": _reasons(
        "Chunks that were not written to this tier.",
        REASON,
        dropped_full=Series(stored_to, ("full",), "every chunk in the tier was in use, or its medium had no room"),
        dropped_slow=Series(
            written, ("slow",), "this tier could not keep up: its queue was full, or the tier above evicted it first"
        ),
        dropped_denied=Series(written, ("denied",), "its medium denies requests: the log says which"),
        dropped_unreachable=Series(
            written, ("unreachable",), "the tier was down, or its circuit for stores not closed, or nobody answered"
        ),
        dropped_failed=Series(written, ("failed",), "the write failed, or one of this chunk did before"),
    ),
    "failures": _reasons(
        "Chunks whose move to or from this tier failed.",
        REASON,
        failed_loads=Series(every, ("load",), "the read failed, other than for corrupt or missing chunks"),
        failed_stores=Series(stored_to, ("store",), "the write failed"),
        late=Series(storage, ("late",), "its load took too long and was abandoned"),
        incomplete=Series(host, ("incomplete",), "vLLM stored it without all of its blocks"),
    ),
    # --- what a tier holds -------------------------------------------------------------------------------------
    "added_chunks": _reasons(
        "Chunks that came into this tier.",
        REASON,
        stored=Series(stored_to, ("stored",), "from above: from the GPU, or from host memory"),
        promoted=Series(promoting, ("promoted",), "from below"),
        found=Series(storage, ("found",), "on the medium: from before it was opened, or stored by other engines"),
    ),
    "unused_chunks": _counter(
        "Chunks promoted to this tier and evicted before any request loaded them.",
        promoting,
        number="unused",
    ),
    "removed_chunks": _reasons(
        "Chunks that left this tier.",
        REASON,
        evictions=Series(every, ("evicted",), "to make room"),
        corrupt=Series(storage, ("corrupt",), "read back corrupt: the seal did not match, and it became a miss"),
        missing=Series(storage, ("missing",), "not there when it was to be loaded"),
        unreadable=Series(host, ("unreadable",), "a worker could not copy it"),
        removed=Series(
            storage,
            ("deleted",),
            "expired, deleted by others, over a lowered limit, not seen for a minute",
        ),
        reset=Series(every, ("reset",), "the weights may have changed"),
    ),
    "chunks": _gauge("Chunks that this tier is known to hold.", number="rows"),
    QUOTA_CHUNKS: Metric(
        Kind.GAUGE,
        "Of these, chunks that count against a quota: those found at a start do not.",
        {QUOTA_CHUNKS: Series(shared_out, ("*",))},
        ("tier", "quota"),
    ),
    "retained_chunks": _gauge(
        "Chunks that hints keep in host memory (retain).", host, number="retained_rows", labels=()
    ),
    "used_bytes": _gauge(
        "Bytes used on this tier's medium, by all engines with the same `place`; of slabs, in the engine's part.",
        number="used_bytes",
        labels=PLACE,
    ),
    "capacity_bytes": _gauge("Bytes that may be used there.", number="capacity_bytes", labels=PLACE),
    "ready_bytes": _gauge(
        "Bytes of the host tier that are allocated, and page-locked for a GPU: only these are used.",
        host,
        number="ready_bytes",
    ),
    "huge_page_bytes": _gauge("Bytes of the host tier's memory in pages of 2 MiB.", host, number="huge_page_bytes"),
    "listed_chunks": _gauge(
        "Chunks listed since the tier was opened.",
        storage,
        number="listed_rows",
    ),
    # --- health ------------------------------------------------------------------------------------------------
    "up": _gauge(
        "1 while the tier's medium, or one of its directories, is open, also while it is being listed; 0: it is down.",
        storage,
        number="up",
    ),
    "listing": _gauge(
        "1 while the tier's medium is being listed: what is listed can be hit, and nothing is written yet.",
        storage,
        number="listing",
    ),
    "breaker": _gauge(
        "The tier's circuit: 0 closed (in use), 1 half-open (being probed), 2 open (not used). Of several directories "
        "the worst.",
        storage,
        number="breaker",
    ),
    "denials": _gauge(
        "Kinds of requests that the tier's medium denies now: the log has the reasons.",
        storage,
        number="denials",
    ),
    "full": _gauge(
        "1 while a directory below its capacity may not grow: it evicts to store.",
        storage,
        number="full",
    ),
    "quarantined_chunks": _gauge(
        "Chunks of host memory that are not reused while a lost mover of this tier may still write to them.",
        storage,
        number="quarantined",
    ),
    "staged": Metric(
        Kind.GAUGE,
        "1 while chunks go through a staging buffer, else 0.",
        {
            "loads_staged": Series(disk, ("load",), "that are read from this tier"),
            "stores_staged": Series(written_disk, ("store",), "that are written to this tier"),
        },
        ("tier", "direction"),
    ),
    "existence_checks": _counter(
        "Existence checks on this tier's medium, for chunks that another engine may have stored.",
        checked,
        number="probes",
    ),
    "mover_exits": _counter(
        "Mover processes of this tier that exited while they were needed, killed or not.", storage, number="deaths"
    ),
    "mover_kills": _counter("Mover processes of this tier that had to be killed.", storage, number="kills"),
}

INFO: Final = "info"
INFO_LABELS: Final = ("version", "kv_namespace", "chunk_bytes", "chunk_tokens", "places")
INFO_TEXT: Final = "1. Labels: the version, the tiers' namespace, bytes and tokens of a chunk, where each tier is."
PROBLEM: Final = "problem"
PROBLEM_LABELS: Final = ("tier", "problem")
PROBLEM_TEXT: Final = "1 while that is wrong with the tier, in the words of the log; 0: it was."


def number_of_quota(quota: str) -> str:
    """Of QUOTA_CHUNKS, the number of one quota."""
    return f"{QUOTA_CHUNKS} {quota}"


def published(tiers: list[TierTraits]) -> dict[tuple[str, str], tuple[str, Metric, tuple[str, ...]]]:
    """(tier, number) -> name of the metric, the metric, its label values: the series that these tiers have."""
    found: dict[tuple[str, str], tuple[str, Metric, tuple[str, ...]]] = {}
    for name, metric in METRICS.items():
        for number, series in metric.series.items():
            for tier in tiers:
                if series.has(tier) and name == QUOTA_CHUNKS:
                    for quota in tier.quotas:
                        found[tier.name, number_of_quota(quota)] = (name, metric, (tier.name, quota))
                elif series.has(tier):
                    own = {"tier": series.tier or tier.name, "place": tier.place}
                    labels = (*(own[label] for label in metric.labels if label in own), *series.values)
                    found[tier.name, number] = (name, metric, labels)
    return found
