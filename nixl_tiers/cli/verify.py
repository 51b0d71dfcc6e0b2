"""`nixl-tiers verify`: read every row below a path or a prefix, and check it against its seal."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from typing import Annotated, Any, Final

import typer

from nixl_tiers.cli import FAILED, INCOMPLETE, OK
from nixl_tiers.cli.output import InputError, Json, print_json, progress
from nixl_tiers.cli.places import ConfigFile, Endpoint, Place, found_at
from nixl_tiers.tiers.base import TierDown, TierRefused
from nixl_tiers.tiers.stored import StoredNamespace

_BAD: Final = ("corrupt", "missing", "unreadable")
_SHOWN: Final = 20  # damaged rows that are listed, unless as JSON


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


def verify(
    place: Place = None,
    *,
    endpoint: Endpoint = None,
    config: ConfigFile = None,
    namespace: Annotated[str, typer.Option(metavar="HEX", help="Only namespaces that begin with this.")] = "",
    max_mb_per_s: Annotated[
        float, typer.Option(min=0.0, metavar="MB", help="Read no more than so many megabytes per second; 0: no limit.")
    ] = 200.0,
    as_json: Json = False,
) -> int:
    """Read every row under a path or a prefix, and compare it with its seal. Deletes nothing: a load finds out the
    same, and a damaged row is a miss. Engines may be using it; rows that they replace meanwhile do not count.

    Exit code: 0 if all rows are good; 1 if some are corrupt or missing; 2 if the place cannot be read or holds no tier,
    or no namespace begins with --namespace; 3 if something could not be read, whatever else was found.
    """
    pace = Pace(max_mb_per_s * 1e6 if max_mb_per_s else None)
    found = found_at(place, endpoint, config)
    chosen = [each for each in found if each.name.startswith(namespace) or not each.name]  # which may be what was meant
    if namespace and not chosen:
        raise InputError(f"--namespace: none begins with {namespace}")
    with progress("verifying", sum(each.rows for each in chosen)) as bar:
        reports = [_check(each, pace, lambda: bar.advance(bar.tasks[0].id, 1)) for each in chosen]
    bad = [row for report in reports for row in report["damaged"]]
    unread = [report for report in reports if report["problem"] or report["unreadable"]]
    if as_json:
        print_json({"namespaces": reports})
    else:
        _print(reports, bad)
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


def _print(reports: list[dict[str, Any]], bad: list[dict[str, str]]) -> None:
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
