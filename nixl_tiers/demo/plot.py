"""The demo's plot: time to first token by the tier that the prompt's KV cache came from."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

_LABELS: Final = {
    "cold": "cold (computed)",
    "gpu": "vLLM's prefix cache",
    "cpu": "cpu tier",
    "file": "file tier, after a restart",
    "s3": "s3 tier, on a new node",
}


def plot(ttft_s: Sequence[tuple[str, float]], prompt_tokens: int, to: Path) -> None:
    """Write a PNG with one bar for each (source, seconds to first token); speed-ups are relative to the first."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    names = [_LABELS[source] for source, _ in ttft_s]
    seconds = [value for _, value in ttft_s]
    figure, axes = plt.subplots(figsize=(8, 0.6 * len(names) + 1.4), layout="constrained")
    bars = axes.barh(names, seconds, color=["#8a8f98", *["#2a7f62"] * (len(names) - 1)])
    texts = [
        f"{value:.2f} s" + (f"   {seconds[0] / value:.0f} x faster" if i else "") for i, value in enumerate(seconds)
    ]
    axes.bar_label(bars, texts, padding=6)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.2 * max(seconds))
    axes.set_xlabel("seconds to the first token")
    axes.set_title(f"The same prompt of {prompt_tokens} tokens, answered from each tier", loc="left")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(to, dpi=140)
    plt.close(figure)
