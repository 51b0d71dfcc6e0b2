"""`nixl-tiers inspect`: whose the rows below a path or a prefix are, how many, how old, and whether they are intact."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from typing import Annotated, Any, Final

import msgspec
import typer

from nixl_tiers.cli import FAILED, INCOMPLETE, OK
from nixl_tiers.cli.output import InputError, Json, print_json, progress
from nixl_tiers.cli.places import ConfigFile, Endpoint, Place, found_at
from nixl_tiers.config.fields import format_size
from nixl_tiers.tiers.base import TierDown, TierRefused
from nixl_tiers.tiers.stored import StoredNamespace

_BAD: Final = ("corrupt", "missing", "unreadable")
_SHOWN: Final = 20  # damaged rows that are listed, unless as JSON


def inspect(
    place: Place = None,
    *,
    endpoint: Endpoint = None,
    config: ConfigFile = None,
    namespace: Annotated[str, typer.Option(metavar="HEX", help="Only namespaces that begin with this.")] = "",
    verify: Annotated[bool, typer.Option("--verify", help="Read every row, and compare it with its seal.")] = False,
    max_mb_per_s: Annotated[
        float, typer.Option(min=0.0, metavar="MB", help="That --verify reads at most; 0: no limit.")
    ] = 200.0,
    as_json: Json = False,
) -> int:
    """Show the namespaces of a file tier's path or of an s3 tier's prefix: whose they are, how big, how old, and which
    process uses them. Changes nothing; engines may be using it.

    With --verify every row is read: a load finds out the same, and a damaged row is a miss. Rows that engines replace
    meanwhile do not count.

    Exit code: 0; 1 if --verify finds rows that are corrupt or missing; 2 if the place cannot be read or holds no tier,
    or no namespace begins with --namespace; 3 if something in it could not be read, whatever else was found.
    """
    found = found_at(place, endpoint, config)
    chosen = [each for each in found if each.name.startswith(namespace) or not each.name]  # which may be what was meant
    if namespace and not chosen:
        raise InputError(f"--namespace: none begins with {namespace}")
    if verify:
        return _verify(chosen, Pace(max_mb_per_s * 1e6 if max_mb_per_s else None), as_json)
    if as_json:
        print_json({"namespaces": [fields(each) for each in chosen]})
    else:
        _print(chosen)
    return INCOMPLETE if any(each.problem for each in chosen) else OK


def fields(found: StoredNamespace) -> dict[str, Any]:
    """For --json."""
    return {
        "place": found.place,
        "layout": found.layout,
        "namespace": found.name,
        "rows": found.rows,
        "bytes": found.nbytes,
        "oldest": found.oldest_s,
        "newest": found.newest_s,
        "last_used": found.last_used_s,
        "held_by": found.holder or None,
        "unknown_slots": found.unknown_slots,
        "manifest": None if found.manifest is None else msgspec.to_builtins(found.manifest),
        "problem": found.problem or None,
    }


def whose(found: StoredNamespace) -> str:
    """For people: the model and what is worth knowing beside it."""
    if found.manifest is None:
        return "unknown (no manifest)"
    about = found.manifest.description
    parts = (
        about.model or "unknown",
        about.revision[:12] and f"revision {about.revision[:12]}",
        about.dtype,
        about.chunk_tokens and f"{about.chunk_tokens} tokens a chunk",
        about.vllm and f"vLLM {about.vllm}",
        about.nixl_tiers and f"nixl_tiers {about.nixl_tiers}",
        about.salt and f"salt {about.salt}",
        found.manifest.epoch and "of replaced weights, never used again",
        about.note,
    )
    return ", ".join(str(part) for part in parts if part)


def ago(moment_s: float | None) -> str:
    """How long ago that was, in one unit."""
    if moment_s is None:
        return "-"
    age_s = max(0.0, time.time() - moment_s)
    for unit, seconds in (("d", 86400), ("h", 3600), ("min", 60)):
        if age_s >= 2 * seconds:
            return f"{age_s / seconds:.0f} {unit} ago"
    return f"{age_s:.0f} s ago"


def _print(found: list[StoredNamespace]) -> None:
    if not found:
        print("no namespaces")
        return
    for each in found:
        unknown = f" (and {each.unknown_slots:,} slots unknown after a crash)" if each.unknown_slots else ""
        parts = (
            f"{each.rows:,} rows{unknown}",
            format_size(each.nbytes),
            f"last used {ago(each.last_used_s)}",
            f"oldest row {ago(each.oldest_s)}",
            each.holder and f"held by {each.holder}",
            each.place,
        )
        # As they are: a table would be cut at the terminal's width.
        print(f"{each.name[:12] or 'unknown'}  {', '.join(filter(None, parts))}")
        print(f"    {each.problem or whose(each)}")
    print(
        f"{len(found)} namespace{'' if len(found) == 1 else 's'}, {sum(each.rows for each in found)} rows, "
        f"{format_size(sum(each.nbytes for each in found))}"
    )


# --- --verify ---------------------------------------------------------------------------------------------------------


class Pace:
    """Bounds how many bytes are read per second, on average since the first."""

    def __init__(
        self,
        bytes_per_s: float | None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """`bytes_per_s`: None: no bound. `clock`: seconds."""
        self._bytes_per_s = bytes_per_s
        self._clock = clock
        self._sleep = sleep
        self._free_at_s = 0.0

    def take(self, nbytes: int) -> None:
        """Wait until so many more bytes may be read."""
        if self._bytes_per_s is None:
            return
        now = self._clock()
        if self._free_at_s > now:
            self._sleep(self._free_at_s - now)
        self._free_at_s = max(self._free_at_s, now) + nbytes / self._bytes_per_s


def _verify(chosen: list[StoredNamespace], pace: Pace, as_json: bool) -> int:
    with progress("verifying", sum(each.rows for each in chosen)) as bar:
        reports = [_check(each, pace, lambda: bar.advance(bar.tasks[0].id, 1)) for each in chosen]
    bad = [row for report in reports for row in report["damaged"]]
    unread = [report for report in reports if report["problem"] or report["unreadable"]]
    if as_json:
        print_json({"namespaces": reports})
    else:
        _print_checked(reports, bad)
    return INCOMPLETE if unread else FAILED if bad else OK


def _check(found: StoredNamespace, pace: Pace, step: Callable[[], None]) -> dict[str, Any]:
    """What `--json` prints of one namespace."""
    counts: Counter[str] = Counter()
    damaged: list[dict[str, str]] = []
    nbytes = 0
    try:
        for row in found.check(pace.take) if found.name else ():
            counts[row.verdict] += 1
            nbytes += row.nbytes
            if row.verdict in _BAD:
                damaged.append({"row": row.name, "verdict": row.verdict, "reason": row.reason})
            step()
    except (TierDown, TierRefused) as error:
        found.problem = str(error)
    return {
        "place": found.place,
        "namespace": found.name,
        **{verdict: counts[verdict] for verdict in ("ok", *_BAD, "changed")},
        "bytes": nbytes,
        "damaged": damaged,
        "problem": found.problem or None,
    }


def _print_checked(reports: list[dict[str, Any]], bad: list[dict[str, str]]) -> None:
    for report in reports:
        line = f"{report['place']} {report['namespace'][:12]}: {report['ok']} rows are good"
        others = [f"{report[verdict]} {verdict}" for verdict in (*_BAD, "changed") if report[verdict]]
        print(", ".join([line, *others]) + (f"; {report['problem']}" if report["problem"] else ""))
    for row in bad[:_SHOWN]:
        print(f"{row['row']}: {row['verdict']}: {row['reason']}")
    if len(bad) > _SHOWN:
        print(f"and {len(bad) - _SHOWN} more: --json lists all")
    if not reports:
        print("no namespaces")
