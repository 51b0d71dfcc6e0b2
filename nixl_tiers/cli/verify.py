"""`nixl-tiers verify`: read every row below a path or a prefix, and check it against its seal."""

from __future__ import annotations

from collections import Counter
from typing import Annotated, Any, Final

import typer

from nixl_tiers.cli import FAILED, INCOMPLETE, OK
from nixl_tiers.cli.output import InputError, Json, print_json, progress
from nixl_tiers.cli.storage.base import Checked, Namespace, Pace, Storage, Unusable
from nixl_tiers.cli.storage.places import ConfigFile, Endpoint, Place, storages

_BAD: Final = ("corrupt", "missing", "unreadable")
_SHOWN: Final = 20  # damaged rows that are listed, unless as JSON


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
    try:
        places = [(storage, storage.namespaces(lambda _: None)) for storage in storages(place, endpoint, config)]
    except Unusable as error:
        raise InputError(str(error)) from None
    chosen = [  # what cannot be told may be what was meant
        (storage, each)
        for storage, found in places
        for each in found
        if each.name.startswith(namespace) or not each.name
    ]
    if namespace and not chosen:
        raise InputError(f"--namespace: none begins with {namespace}")
    reports = []
    with progress("verifying", sum(each.rows for _, each in chosen)) as bar:
        for storage, each in chosen:
            reports.append(check_namespace(storage, each, pace, lambda: bar.advance(bar.tasks[0].id, 1)))
    bad = [row for report in reports for row in report["damaged"]]
    unread = [report for report in reports if report["problem"] or report["unreadable"]]
    if as_json:
        print_json({"namespaces": reports})
    else:
        _print(reports, bad)
    return INCOMPLETE if unread else FAILED if bad else OK


def check_namespace(storage: Storage, found: Namespace, pace: Pace, step: Any = lambda: None) -> dict[str, Any]:
    """What `--json` prints of one namespace."""
    counts: Counter[str] = Counter()
    damaged: list[dict[str, str]] = []
    nbytes, problem = 0, found.problem
    try:
        for row in storage.check(found, pace) if found.name else ():
            counts[row.verdict] += 1
            nbytes += row.nbytes
            if row.verdict in _BAD:
                damaged.append(_fields(row))
            step()
    except Unusable as error:
        problem = str(error)
    return {
        "place": found.place,
        "namespace": found.name,
        **{verdict: counts[verdict] for verdict in ("ok", *_BAD, "changed")},
        "bytes": nbytes,
        "damaged": damaged,
        "problem": problem or None,
    }


def _fields(row: Checked) -> dict[str, str]:
    return {"row": row.name, "verdict": row.verdict, "reason": row.reason}


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
