"""The picture of times to the first token, of `bench` and of the demo."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path


def plot(
    to: Path, *, title: str, names: Sequence[str], seconds: Sequence[float], texts: Sequence[str], caption: str
) -> None:
    """Write a PNG: a bar and its text for each name, and the caption below. The axis is logarithmic. The first bar is
    what the others are compared with. Raises ModuleNotFoundError without matplotlib."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 0.6 * len(names) + 1.9), layout="constrained")
    bars = axes.barh(names, seconds, color=["#8a8f98", *["#2a7f62"] * (len(names) - 1)], log=True)
    axes.bar_label(bars, texts, padding=6)
    axes.invert_yaxis()
    axes.set_xlim(min(seconds) / 4, 4 * max(seconds))  # room for the labels
    axes.xaxis.set_major_formatter("{x:g}")
    axes.set_xlabel("seconds to the first token (logarithmic)")
    axes.set_title(title, loc="left")
    axes.spines[["top", "right"]].set_visible(False)
    figure.text(0.01, -0.01, caption, fontsize=8, color="#555b66", va="top")
    figure.savefig(to, dpi=140, bbox_inches="tight", pad_inches=0.15)
    plt.close(figure)
