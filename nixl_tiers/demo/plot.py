"""The demo's plot: time to first token by the tier that the prompt's KV cache came from."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

_LABELS: Final = {
    "cold": "computed",
    "gpu": "vLLM's prefix cache",
    "cpu": "cpu tier",
    "file": "file tier, after a restart",
    "s3": "s3 tier, on a new node",
}


def plot(report: Mapping[str, Any], to: Path) -> None:
    """Write a PNG of what demo.json holds: a bar for each run, and below them where it was measured. The axis is
    logarithmic; speed-ups are relative to the first run."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    names = [_LABELS[run["source"]] for run in report["runs"]]
    seconds = [run["ttft_s"] for run in report["runs"]]
    figure, axes = plt.subplots(figsize=(8, 0.6 * len(names) + 1.9), layout="constrained")
    bars = axes.barh(names, seconds, color=["#8a8f98", *["#2a7f62"] * (len(names) - 1)], log=True)
    texts = [
        f"{value:.2f} s" + (f"   {seconds[0] / value:.0f} x faster" if i else "") for i, value in enumerate(seconds)
    ]
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
    machine = report["machine"]
    names = {"nixl_tiers": "nixl_tiers", "vllm": "vLLM", "nixl": "NIXL", "torch": "torch"}
    versions = [f"{shown} {machine[name]}" for name, shown in names.items() if machine.get(name)]
    return [
        f"{report['model']}, {report['kv_bytes_per_token'] / 1024:.0f} KiB of KV cache a token; S3: {report['s3']}",
        f"{machine['cores']} cores of {machine['cpu']}, {machine['memory_gib']:g} GiB, no GPU",
        ", ".join([*versions, f"Python {machine['python']}"]),
    ]
