"""Verifies where the hits of a run came from, and prints the table of all runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from nixl_tiers.demo.metrics import MetricsPage
from nixl_tiers.demo.server import Answer

TIERS: Final = ("cpu", "file", "s3")
# The label by which vLLM's counter of cached tokens names the source of each run.
SOURCES: Final = {"gpu": "device", "cpu": "host", "file": "disk", "s3": "external_unspecified"}
MIN_CACHED_SHARE: Final = 0.95


class DemoFailure(RuntimeError):
    """A check of the demo has failed; one sentence."""


class Counts(NamedTuple):
    """Counters of a server since its start, and the rows of its tiers. Tokens by vLLM's name of the source."""

    cached_tokens: dict[str, float]
    loaded_bytes: float
    read_bytes: dict[str, float]
    written_bytes: dict[str, float]
    rows: dict[str, float]

    @classmethod
    def of(cls, page: MetricsPage) -> Counts:
        source = "vllm:prompt_tokens_cached_by_source_total"
        return cls(
            {name: page.total(source, source=name) for name in SOURCES.values()},
            page.total("vllm:kv_offload_load_bytes_total"),
            _by_tier(page, "nixl_tiers:read_bytes_total", "vllm:kv_offload_load_bytes_total"),
            _by_tier(page, "nixl_tiers:written_bytes_total", "vllm:kv_offload_store_bytes_total"),
            {tier: page.total("nixl_tiers:chunks", tier=tier) for tier in TIERS},
        )


def _by_tier(page: MetricsPage, storage: str, host: str) -> dict[str, float]:
    """vLLM itself counts what it moves to and from host memory."""
    return {"cpu": page.total(host), **{tier: page.total(storage, tier=tier) for tier in TIERS[1:]}}


class Run(NamedTuple):
    """One request of the prompt, and what it moved."""

    source: str
    answer: Answer
    cached_tokens: dict[str, int]
    loaded_bytes: int
    read_bytes: dict[str, int]

    def record(self) -> dict[str, Any]:
        """The run as it is written to demo.json."""
        return {
            "source": self.source,
            "ttft_s": round(self.answer.ttft_s, 4),
            "cached_tokens": sum(self.cached_tokens.values()),
            "bytes_loaded": self.loaded_bytes,
            "tier_bytes_read": self.read_bytes.get(self.source, 0),
        }


def verify(run: Run, kv_bytes_per_token: int) -> None:
    """Raise DemoFailure unless all hits of this run came from the tier that it is named after."""
    for source, name in SOURCES.items():
        cached = run.cached_tokens[name]
        if source != run.source and cached:
            raise DemoFailure(f"the {run.source} run took {cached} tokens from {source}")
    prompt_tokens = run.answer.prompt_tokens
    cached = 0 if run.source == "cold" else run.cached_tokens[SOURCES[run.source]]
    if run.source != "cold" and cached < MIN_CACHED_SHARE * prompt_tokens:
        raise DemoFailure(f"the {run.source} run took only {cached} of {prompt_tokens} tokens from {run.source}")
    payload_bytes = cached * kv_bytes_per_token
    if run.source in TIERS and run.loaded_bytes < payload_bytes:
        raise DemoFailure(f"the {run.source} run loaded {run.loaded_bytes} bytes for hits of {payload_bytes} bytes")
    if run.source not in TIERS and run.loaded_bytes:
        raise DemoFailure(f"the {run.source} run loaded {run.loaded_bytes} bytes, but should load none")
    for tier in ("file", "s3"):
        if tier == run.source and run.read_bytes[tier] < payload_bytes:
            raise DemoFailure(f"the {tier} tier read {run.read_bytes[tier]} bytes for hits of {payload_bytes} bytes")
        if tier != run.source and run.read_bytes[tier]:
            raise DemoFailure(f"the {tier} tier read {run.read_bytes[tier]} bytes during the {run.source} run")


def table(runs: Sequence[Run], prompt_tokens: int) -> str:
    """The runs as a text table, one line each. `saved`: seconds to the first token, against the cold run."""
    head = ("source", "first token", "saved", "speed-up", "tokens cached", "loaded into vLLM", "read by the tier")
    rows = [head]
    cold_s = runs[0].answer.ttft_s
    for each in runs:
        record = each.record()
        rows.append(
            (
                each.source,
                f"{each.answer.ttft_s:.2f} s",
                f"{cold_s - each.answer.ttft_s:.2f} s",
                f"{cold_s / each.answer.ttft_s:.1f} x",
                f"{record['cached_tokens']} of {prompt_tokens}",
                f"{record['bytes_loaded'] / 1e6:.1f} MB",
                f"{record['tier_bytes_read'] / 1e6:.1f} MB",
            )
        )
    widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
    lines = ["  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in rows]
    return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:]])
