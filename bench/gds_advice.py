"""What the figures of `bench.gds` mean: one recommendation, and a report in Markdown to attach to an issue."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any, Final

FASTER: Final = 1.15
CPU_SHARE: Final = 0.5
NO_WORSE: Final = 1.05  # of a 99th percentile, and of the speed where CPU time is what is saved: within noise
MIB: Final = 1 << 20
NOT_WORTH_IT: Final = "direct loads are not worth having here"

Figures = dict[str, float]


@dataclass
class Case:
    """Loads of `depth` rows of `payload_bytes`, by path ("host", "direct"): alone, and beside decode-like steps."""

    payload_bytes: int
    depth: int
    alone: dict[str, Figures] = field(default_factory=dict)
    beside: dict[str, Figures] = field(default_factory=dict)
    steps: dict[str, Figures] = field(default_factory=dict)
    """Of the decode-like load beside each path."""


@dataclass
class Findings:
    """All that a run has found. `missing`: what could not be measured, and why."""

    about: dict[str, Any]
    verdict: str
    doctor: str
    cases: list[Case]
    ceilings: list[dict[str, Any]]
    steps_alone: Figures
    missing: dict[str, str]


def recommend(found: Findings) -> str:
    """One sentence. It compares medians over all cases, beside the decode-like load where that could run."""
    pairs = [pair for case in found.cases if (pair := _pair(case))]
    if not pairs:
        why = found.missing.get("direct") or found.missing.get("gpu") or "nothing was measured"
        return f"no recommendation: direct loads could not be measured here ({why})"
    speed, tail, cpu = (statistics.median(column) for column in zip(*(_ratios(*pair) for pair in pairs), strict=True))
    figures = f"{speed:.2f}x the speed, {tail:.2f}x the 99th percentile, {cpu:.2f}x the CPU time of loads through host "
    figures += f"rows (medians of {len(pairs)} cases)"
    if not found.verdict.startswith("native"):
        return (
            f"direct loads are not worth having here: cuFile does not bypass host memory ({found.verdict}); {figures}"
        )
    slower_steps = _slower_steps(found.cases)
    if slower_steps:
        return f"{NOT_WORTH_IT}: {slower_steps}; {figures}"
    if tail <= NO_WORSE and (speed >= FASTER or (cpu <= CPU_SHARE and speed * NO_WORSE >= 1)):
        return f"direct loads are worth having here: {figures}"
    return f"{NOT_WORTH_IT}: {figures}"


def _pair(case: Case) -> tuple[Figures, Figures] | None:
    for figures in (case.beside, case.alone):
        if {"host", "direct"} <= figures.keys():
            return figures["host"], figures["direct"]
    return None


def _ratios(host: Figures, direct: Figures) -> tuple[float, float, float]:
    """Of speed, 99th percentile and CPU time; at least a microsecond of the latter."""
    speed, tail, cpu = (direct[name] / max(host[name], 1e-6) for name in ("gb_per_s", "p99_ms", "cpu_s_per_gb"))
    return speed, tail, cpu


def _slower_steps(cases: Iterable[Case]) -> str:
    ratios = [
        case.steps["direct"]["p99_ms"] / case.steps["host"]["p99_ms"]
        for case in cases
        if {"host", "direct"} <= case.steps.keys()
    ]
    if not ratios or (worse := statistics.median(ratios)) <= NO_WORSE:
        return ""
    return f"steps beside them have {worse:.2f}x the 99th percentile"


def report(found: Findings) -> str:
    return "\n".join(_lines(found)) + "\n"


def _lines(found: Findings) -> Iterator[str]:
    yield from ("# GPUDirect Storage report", "", f"**{recommend(found)}**", "", f"Verdict: {found.verdict}", "")
    yield from (f"- {name}: {value}" for name, value in found.about.items())
    yield from ("", "## Doctor", "", "```text", found.doctor, "```", "")
    if found.missing:
        yield from (
            "## Not measured",
            "",
            *(f"- {name}: unavailable: {why}" for name, why in found.missing.items()),
            "",
        )
    yield from ("## Loads", "", "```text", *table(found), "```", "")
    yield from ("## Ceilings", "", "```text", *ceilings(found), "```", "")
    raw = {"cases": [asdict(case) for case in found.cases], "ceilings": found.ceilings, "alone": found.steps_alone}
    yield from ("## Raw figures", "", "```json", json.dumps(raw, indent=1), "```")


def table(found: Findings) -> Iterator[str]:
    """GB/s, CPU seconds a GB, and the time of one load; then the steps beside it."""
    header = f"{'row':>8} {'depth':>5}  {'path':<7} {'':<7} {'GB/s':>6} {'CPU s/GB':>8} {'p50 ms':>8} {'p99 ms':>8}"
    yield f"{header}   steps p50/p99 ms"
    for case in found.cases:
        for what, figures in (("alone", case.alone), ("decode", case.beside)):
            for path, one in figures.items():
                steps = case.steps.get(path) if what == "decode" else None
                beside = f"   {steps['p50_ms']:.2f}/{steps['p99_ms']:.2f}" if steps else ""
                yield (
                    f"{size(case.payload_bytes):>8} {case.depth:>5}  {path:<7} {what:<7} {one['gb_per_s']:>6.2f} "
                    f"{one['cpu_s_per_gb']:>8.3f} {one['p50_ms']:>8.2f} {one['p99_ms']:>8.2f}{beside}"
                )
    if found.steps_alone:
        yield "steps alone: p50 {p50_ms:.2f} ms, p99 {p99_ms:.2f} ms".format(**found.steps_alone)


def ceilings(found: Findings) -> Iterator[str]:
    for one in found.ceilings:
        what = f"{one['program']:<6} {size(one['row_bytes']):>8} depth {one['depth']:<3}"
        if "unavailable" in one:
            yield f"{what} unavailable: {one['unavailable']}"
        else:
            tail = f", p50/p99 {one['p50_ms']:.2f}/{one['p99_ms']:.2f} ms" if "p99_ms" in one else ""
            yield f"{what} {one['gb_per_s']:.2f} GB/s{tail}"


def size(nbytes: int) -> str:
    return f"{nbytes // MIB} MiB" if nbytes >= MIB else f"{nbytes >> 10} KiB"
