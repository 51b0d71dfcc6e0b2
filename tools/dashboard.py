"""Writes the dashboard: `make format`, or `python -m tools.dashboard`. A panel is a line here.

Counters are summed over engines. Gauges are first reduced to one per engine, because vLLM before 0.33 shows a gauge
once for every API server; bytes used and their limits to one per place, which several engines may share.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FILE = Path(__file__).parents[1] / "docker/grafana/dashboards/nixl-tiers.json"
SOURCE = {"type": "prometheus", "uid": "${datasource}"}
WIDTH = 24  # of Grafana's grid
ENGINE = "namespace, pod, instance, engine"  # the first two in a cluster only


@dataclass(frozen=True)
class Panel:
    title: str
    text: str
    queries: dict[str, str]  # legend -> query; CHOSEN stands for the variables, WINDOW for the interval
    unit: str = "short"
    kind: str = "timeseries"
    width: int = 8
    most: float | None = None
    stack: bool = False


def rate(metric: str, by: str = "", where: str = "") -> str:
    matchers = f"CHOSEN,{where}" if where else "CHOSEN"
    return f"sum{f' by ({by})' if by else ''} (rate(nixl_tiers:{metric}{{{matchers}}}[WINDOW]))"


def level(metric: str, by: str = "tier", reduce: str = "sum") -> str:
    """A gauge: one value an engine, then `reduce` over engines."""
    labels = f"{ENGINE}, {by}" if by else ENGINE
    return f"{reduce}{f' by ({by})' if by else ''} (max by ({labels}) (nixl_tiers:{metric}{{CHOSEN}}))"


def places(metric: str, by: str = "tier", where: str = "") -> str:
    """Bytes: one value a place, the largest that an engine there reports, then the sum over places."""
    matchers = f"CHOSEN,{where}" if where else "CHOSEN"
    labels = f"{by}, place" if by else "place"
    return f"sum{f' by ({by})' if by else ''} (max by ({labels}) (nixl_tiers:{metric}{{{matchers}}}))"


def quantile(q: float, metric: str, by: str = "") -> str:
    labels = f"le, {by}" if by else "le"
    return f"histogram_quantile({q}, sum by ({labels}) (rate(nixl_tiers:{metric}_bucket{{CHOSEN}}[WINDOW])))"


HITS, MISSES = rate("hits_total"), rate("misses_total")
DOWN = level("up", reduce="min")
STORAGE = 'tier!="cpu"'

ROWS: dict[str, list[Panel]] = {
    "Does it help?": [
        Panel("Chunks that hit", "Of the chunks that requests looked for, the share that was not computed.",
              {"share": f"{HITS} / ({HITS} + {MISSES})"}, "percentunit", "stat", 3, 1.0),
        Panel("Tokens not computed", "Tokens per second that came from a tier.",
              {"tokens/s": rate("hit_tokens_total")}, "short", "stat", 3),
        Panel("Seconds saved, seconds lost", "Per second: by how much first tokens came earlier, and later.",
              {"saved": rate("saved_first_token_seconds_total"), "lost": rate("lost_seconds_total")}, "s", "stat", 5),
        Panel("Wait, p50 and p99", "How long requests waited for storage.",
              {"p50": quantile(0.5, "wait_seconds"), "p99": quantile(0.99, "wait_seconds")}, "s", "stat", 4),
        Panel("Wasted waits", "Seconds waited per second, by requests that then loaded nothing.",
              {"s/s": rate("wait_seconds_sum", where='outcome="vain"')}, "s", "stat", 3),
        Panel("Tiers that are up", "The share of storage tiers of all engines whose medium is open.",
              {"share": f"avg ({level('up', 'tier', 'avg')})"}, "percentunit", "stat", 3, 1.0),
        Panel("Budget in use", "Of all storage tiers.",
              {"share": f"{places('used_bytes', '', STORAGE)} / {places('capacity_bytes', '', STORAGE)}"},
              "percentunit", "stat", 3, 1.0),
    ],
    "Hits and misses": [
        Panel("Hits by tier", "Chunks per second, by the tier that they came from.",
              {"{{tier}}": rate("hits_total", "tier")}, "ops", stack=True),
        Panel("Hit rate by tier", "Of the chunks that requests looked for, the share that came from each tier.",
              {"{{tier}}": f"{rate('hits_total', 'tier')} / scalar({HITS} + {MISSES})"}, "percentunit", stack=True),
        Panel("Misses by reason", "Chunks per second that had to be computed, and why.",
              {"{{reason}} ({{tier}})": rate("misses_total", "reason, tier")}, "ops", stack=True),
        Panel("Tokens by tier", "Tokens per second that were not computed.",
              {"{{tier}}": rate("hit_tokens_total", "tier")}, "short", stack=True),
        Panel("Chunks in each tier", "What a look-up can hit. What engines share counts for each of them.",
              {"{{tier}}": level("chunks")}),
        Panel("Promoted and not used", "Chunks per second that were evicted before any request loaded them.",
              {"{{tier}}": rate("unused_chunks_total", "tier")}, "ops"),
        Panel("Existence checks", "Requests to a shared medium for chunks that another engine may have stored.",
              {"{{tier}}": rate("existence_checks_total", "tier")}, "ops"),
    ],
    "Time": [
        Panel("Seconds saved by tier", "By how much first tokens came earlier, waiting included.",
              {"{{tier}}": rate("saved_first_token_seconds_total", "tier")}, "s", stack=True),
        Panel("Prefill saved by tier", "Seconds of computing that the engine was spared, for other requests.",
              {"{{tier}}": rate("saved_prefill_seconds_total", "tier")}, "s", stack=True),
        Panel("Seconds lost", "By how much first tokens came later than without tiers, and why.",
              {"{{reason}} ({{tier}})": rate("lost_seconds_total", "reason, tier")}, "s", stack=True),
        Panel("Wait, p50", "How long requests waited, by the lowest tier that they asked.",
              {"{{tier}}": quantile(0.5, "wait_seconds", "tier")}, "s"),
        Panel("Wait, p99", "How long requests waited, by the lowest tier that they asked.",
              {"{{tier}}": quantile(0.99, "wait_seconds", "tier")}, "s"),
        Panel("How waits ended", "Requests per second.",
              {"{{outcome}} ({{tier}})": rate("wait_seconds_count", "outcome, tier")}, "ops", stack=True),
        Panel("Promotion, p99", "From the time that a request began to wait for a chunk until it was a hit.",
              {"{{tier}}": quantile(0.99, "promotion_seconds", "tier")}, "s"),
        Panel("Jobs, p99", "Of a job that reads from a tier or writes to it.",
              {"load {{tier}}": quantile(0.99, "load_seconds", "tier"),
               "store {{tier}}": quantile(0.99, "store_seconds", "tier")}, "s"),
        Panel("Prompts computed", "Tokens per second of prefill, as measured: what loading is weighed against.",
              {"{{engine}}": "avg by (engine) (nixl_tiers:prefill_tokens_per_s{CHOSEN})"}),
        Panel("Bytes a job, mean", "Small jobs are slow on most media.",
              {"load {{tier}}": f"{rate('load_bytes_sum', 'tier')} / {rate('load_bytes_count', 'tier')}",
               "store {{tier}}": f"{rate('store_bytes_sum', 'tier')} / {rate('store_bytes_count', 'tier')}"}, "bytes"),
    ],
    "Bytes and budgets": [
        Panel("Budget in use by tier", "1 is full: then each chunk that is stored evicts another.",
              {"{{tier}}": f"{places('used_bytes')} / {places('capacity_bytes')}"}, "percentunit", width=6,
              most=1.0),
        Panel("Used", "Bytes on each tier's medium. What engines share counts once.",
              {"{{tier}}": places("used_bytes")}, "bytes", width=6),
        Panel("May be used", "The capacity of each tier. What engines share counts once.",
              {"{{tier}}": places("capacity_bytes")}, "bytes", width=6),
        Panel("Host memory in huge pages", "Of the cpu tier.",
              {"{{tier}}": level("huge_page_bytes")}, "bytes", width=6),
        Panel("Read", "From each tier into host memory.",
              {"{{tier}}": rate("read_bytes_total", "tier")}, "Bps", stack=True),
        Panel("Written", "To each tier from host memory.",
              {"{{tier}}": rate("written_bytes_total", "tier")}, "Bps", stack=True),
        Panel("What leaves a tier", "Chunks per second, and why.",
              {"{{reason}} ({{tier}})": rate("removed_chunks_total", "reason, tier")}, "ops", stack=True),
    ],
    "Health": [
        Panel("Up", "1: all engines have the tier open, or are listing it.", {"{{tier}}": DOWN}, most=1.0),
        Panel("Circuit", "0 closed, 1 probing, 2 open: the worst of all engines.",
              {"{{tier}}": level("breaker", reduce="max")}, most=2.0),
        Panel("Failed moves", "Chunks per second.",
              {"{{reason}} ({{tier}})": rate("failures_total", "reason, tier")}, "ops"),
        Panel("Not written", "Chunks per second that a tier did not take, and why.",
              {"{{reason}} ({{tier}})": rate("drops_total", "reason, tier")}, "ops"),
        Panel("Corrupt and missing", "Chunks per second that the medium lost or changed. They became misses.",
              {"{{reason}} ({{tier}})": rate("removed_chunks_total", "reason, tier", 'reason=~"corrupt|missing"')},
              "ops"),
        Panel("Mover exits", "Processes per second.",
              {"exited {{tier}}": rate("mover_exits_total", "tier"),
               "killed {{tier}}": rate("mover_kills_total", "tier")}, "ops"),
        Panel("Queues", "Chunks that wait to be moved, or are being moved.",
              {"waiting, {{direction}} {{tier}}": level("queued_chunks", "direction, tier"),
               "moving, {{direction}} {{tier}}": level("moving_chunks", "direction, tier")}),
        Panel("Requests that wait", "For chunks to be promoted.", {"requests": level("waiting_requests", "")}),
        Panel("Quarantined, denied, full",
              "Host chunks that a lost mover may still write to; kinds of requests denied; 1: it evicts to store.",
              {"quarantined {{tier}}": level("quarantined_chunks"),
               "denied {{tier}}": level("denials", reduce="max"),
               "full {{tier}}": level("full", reduce="max")}),
        Panel("Listing", "Chunks that a medium has listed since it was opened.", {"{{tier}}": level("listed_chunks")}),
        Panel("Through a staging buffer", "The share of engines whose chunks are copied once more on the way.",
              {"{{direction}} {{tier}}": level("staged", "direction, tier", "avg")}, "percentunit", most=1.0),
        Panel("What runs", "Engines with one namespace share rows.",
              {"{{version}} {{kv_namespace}}": level("info", "version, kv_namespace, places", "count")}, kind="stat"),
    ],
}  # fmt: skip


# Each offers what there is among what those before it choose. The last two have no value outside a cluster.
VARIABLES = {"model": "model_name", "namespace": "namespace", "pod": "pod"}


def query(text: str) -> str:
    chosen = ",".join(f'{label}=~"${variable}"' for variable, label in VARIABLES.items())
    return text.replace("CHOSEN", chosen).replace("WINDOW", "$__rate_interval")


def panel(number: int, spec: Panel, x: int, y: int, height: int) -> dict[str, Any]:
    defaults: dict[str, Any] = {"unit": spec.unit, "min": 0}
    if spec.most is not None:
        defaults["max"] = spec.most
    if spec.kind == "timeseries":
        stacking = {"mode": "normal", "group": "A"} if spec.stack else {"mode": "none"}
        defaults["custom"] = {"fillOpacity": 20 if spec.stack else 0, "showPoints": "never", "stacking": stacking}
        options: dict[str, Any] = {
            "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True, "calcs": []},
            "tooltip": {"mode": "multi", "sort": "desc"},
        }
    else:
        by_name = spec.title == "What runs"
        options = {
            "reduceOptions": {"calcs": ["lastNotNull"], "values": False, "fields": ""},
            "colorMode": "none",
            "graphMode": "none" if by_name else "area",
            "textMode": "value_and_name" if by_name or len(spec.queries) > 1 else "value",
        }
    targets = [
        {"refId": chr(ord("A") + place), "datasource": SOURCE, "expr": query(text), "legendFormat": legend}
        for place, (legend, text) in enumerate(spec.queries.items())
    ]
    return {
        "id": number,
        "type": spec.kind,
        "title": spec.title,
        "description": spec.text,
        "datasource": SOURCE,
        "gridPos": {"x": x, "y": y, "w": spec.width, "h": height},
        "targets": targets,
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": options,
    }


def panels() -> list[dict[str, Any]]:
    made: list[dict[str, Any]] = []
    y = 0
    for title, specs in ROWS.items():
        grid = {"x": 0, "y": y, "w": WIDTH, "h": 1}
        made.append(
            {"id": len(made) + 1, "type": "row", "title": title, "collapsed": False, "gridPos": grid, "panels": []}
        )
        y += 1
        x, height = 0, 4 if specs[0].kind == "stat" else 7
        for spec in specs:
            if x + spec.width > WIDTH:
                x, y = 0, y + height
            made.append(panel(len(made) + 1, spec, x, y, height))
            x += spec.width
        y += height
    return made


def dashboard() -> dict[str, Any]:
    source = {"name": "datasource", "type": "datasource", "query": "prometheus", "label": "Prometheus", "hide": 0}
    chosen: list[dict[str, Any]] = []
    for variable, label in VARIABLES.items():
        before = ",".join(f'{VARIABLES[each["name"]]}=~"${each["name"]}"' for each in chosen)
        chosen.append(
            {
                "name": variable,
                "type": "query",
                "label": variable.capitalize(),
                "hide": 0,
                "datasource": SOURCE,
                "query": f"label_values(nixl_tiers:info{{{before}}}, {label})",
                "refresh": 2,
                "multi": True,
                "includeAll": True,
                "allValue": ".*",
            }
        )
    return {
        "uid": "nixl-tiers",
        "title": "nixl_tiers",
        "description": "The KV cache below the GPU: what each tier gives, what it costs, and how it is.",
        "tags": ["vllm", "nixl_tiers"],
        "editable": True,
        "schemaVersion": 39,
        "refresh": "30s",
        "time": {"from": "now-3h", "to": "now"},
        "templating": {"list": [source, *chosen]},
        "panels": panels(),
    }


def text() -> str:
    return json.dumps(dashboard(), indent=1) + "\n"


if __name__ == "__main__":
    FILE.write_text(text())
