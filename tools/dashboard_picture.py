"""A picture of the dashboard for the guide, for who has no Grafana: `python -m tools.dashboard_picture OUT.png`.

Panels, their places, titles and queries are those of the dashboard's JSON; the answers those of a real Prometheus that
scrapes a store over a disk that fails for a while. Not a screenshot: Grafana draws otherwise. A store knows neither
tokens nor what computing takes, so these follow from its hits: AS_IF.
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import matplotlib.style
import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, MaxNLocator
from PIL import Image

import nixl_tiers
from nixl_tiers.base.tier_traits import TierTraits
from nixl_tiers.config import schema
from nixl_tiers.testing.config import with_faults
from nixl_tiers.testing.faulty import Fault, FaultPlan, Rule, Way
from tests.support.dashboard import DASHBOARD, panels, within
from tests.support.file_tier import file_tier
from tests.support.load import LoadGenerator
from tests.support.metrics_page import StorePage, served
from tests.support.prometheus import Series, program, prometheus
from tests.support.waiting import until_up

AS_IF: Final = {"hit_tokens": 64.0, "saved_first_token_s": 0.004, "saved_prefill_s": 0.006}  # for each hit
PHASES_S: Final = (60, 25, 60)  # the disk works, fails, works
WIDTH, UNIT = 24, (50, 24)  # of Grafana's grid, and pixels
COLORS: Final = ("#73bf69", "#f2cc0c", "#8ab8ff", "#ff780a", "#f2495c", "#b877d9", "#ffa6b0", "#96d98d") * 2
SUFFIX: Final = {"s": "s", "bytes": "B", "Bps": "B/s", "ops": "/s"}


def record(folder: Path) -> dict[str, Series]:
    """The answer to each query of the dashboard: every second's value, by labels."""
    rules = (Rule(Fault.BIT_FLIP, Way.LOAD, chance=0.1), Rule(Fault.UNAVAILABLE, chance=0.3))
    plan = FaultPlan(rules, switch=str(switch := folder / "faults")).to_dict()
    tiers = [{"type": "cpu", "capacity": "8MiB"}, file_tier(folder / "kv", "24MiB")]
    config = with_faults(schema.load({"tiers": tiers, "wait_s": 2.0}), plan)
    found = program("prometheus") or sys.exit("needs Prometheus (Debian's package prometheus)")
    with nixl_tiers.open(config, 64 << 10, "n") as store:
        until_up(store)

        def totals() -> Mapping[str, Mapping[str, float]]:
            numbers = store.coordinator.counters()
            return {tier: {**of, **{name: k * of["hits"] for name, k in AS_IF.items()}} for tier, of in numbers.items()}

        traits = [TierTraits("cpu"), TierTraits("file", checked=True, disk=True)]
        page = StorePage(traits, totals, store.coordinator._core.take_samples)
        with served(page) as port, prometheus(found, folder, port) as server:
            server.scrape()
            start = time.time()
            with LoadGenerator(store, pause_s=0.02, prompts=60):
                for phase, seconds in enumerate(PHASES_S):
                    switch.touch() if phase == 1 else switch.unlink(missing_ok=True)
                    time.sleep(seconds)
                queries = [target["expr"] for panel in panels() for target in panel["targets"]]
                return {query: server.series(within(query, 10), start, time.time()) for query in queries}


def draw(panel: Mapping[str, Any], axes: Any, found: Mapping[str, Series]) -> None:
    looks, unit = panel["fieldConfig"]["defaults"], panel["fieldConfig"]["defaults"]["unit"]
    shown: Any = "{:.0%}".format if unit == "percentunit" else EngFormatter(SUFFIX.get(unit, ""), 1).format_data
    axes.set_title(panel["title"], loc="left", fontsize=8, fontweight="bold", pad=4)
    lines = {
        re.sub(r"{({\w+})}", r"\1", target["legendFormat"]).format(**json.loads(labels)): np.array(values)
        for target in panel["targets"]
        for labels, values in sorted(found[target["expr"]].items())
    }
    if panel["type"] == "stat":
        named = panel["options"]["textMode"] == "value_and_name"
        text = [f"{name[:20]} " * named + shown(values[-1]) for name, values in lines.items()]
        axes.axis("off")
        axes.text(0, 0.4, "\n".join(text), va="center", fontsize=11, color=COLORS[0])
        return
    level = np.zeros(longest := max(map(len, lines.values()), default=0))
    stacked = looks["custom"]["stacking"]["mode"] == "normal"
    for color, (name, values) in zip(COLORS, lines.items(), strict=False):
        above = level + np.pad(values, (longest - len(values), 0), constant_values=0 if stacked else np.nan)
        axes.fill_between(range(longest), level, above, color=color, alpha=0.25 if stacked else 0, linewidth=0)
        axes.plot(above, color=color, linewidth=1, label=name if np.nanmax(values) else None)
        level = np.nan_to_num(above) if stacked else level
    axes.yaxis.set_major_formatter(lambda value, _: shown(value))
    axes.yaxis.set_major_locator(MaxNLocator(3))
    axes.tick_params(labelsize=6, length=0, labelbottom=False)
    if any(map(np.nanmax, lines.values())):
        axes.legend(fontsize=5.5, ncols=3, loc="upper left", bbox_to_anchor=(0, -0.02), frameon=False)
    axes.set_ylim(0, 1.05 * looks.get("max", axes.get_ylim()[1] if axes.get_legend() else 1))


def picture(found: Mapping[str, Series]) -> Figure:
    every = json.loads(DASHBOARD.read_text())["panels"]
    height = every[-1]["gridPos"]["y"] + every[-1]["gridPos"]["h"]
    with matplotlib.style.context("dark_background"):
        figure = Figure((WIDTH * UNIT[0] / 100, height * UNIT[1] / 100), dpi=100, facecolor="#111217")
        for panel in every:
            x, y, w, h = (panel["gridPos"][name] for name in "xywh")
            if panel["type"] == "row":
                figure.text(0.006, 1 - (y + 0.8) / height, panel["title"], fontsize=10, fontweight="bold")
                continue
            place = ((x + 0.9) / WIDTH, 1 - (y + h - 1.6) / height, (w - 1.2) / WIDTH, (h - 2.7) / height)
            draw(panel, figure.add_axes(place, facecolor="#181b1f"), found)
    return figure


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as place:
        picture(record(Path(place))).savefig(f"{place}/drawn.png")
        Image.open(f"{place}/drawn.png").convert("P", colors=64).save(sys.argv[1], optimize=True)
