"""`nixl-tiers purge`: delete namespaces, or old rows, below a path or a prefix."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Mapping
from typing import Annotated, Any

import typer

from nixl_tiers.base.manifest import salt_digest
from nixl_tiers.cli import FAILED, INCOMPLETE, OK
from nixl_tiers.cli.inspect import whose
from nixl_tiers.cli.output import InputError, Json, print_json, print_table, progress
from nixl_tiers.cli.places import ConfigFile, Endpoint, Place, found_at
from nixl_tiers.config.fields import format_size, parse_age
from nixl_tiers.tiers.base import TierDown, TierRefused
from nixl_tiers.tiers.stored import StoredNamespace

MIN_DIGITS = 8


def purge(
    place: Place = None,
    *,
    endpoint: Endpoint = None,
    config: ConfigFile = None,
    namespace: Annotated[
        list[str] | None,
        typer.Option(
            metavar="HEX", help=f"Namespaces that begin with this (at least {MIN_DIGITS} digits). Repeatable."
        ),
    ] = None,
    salt: Annotated[
        str | None, typer.Option(metavar="TEXT", help="Namespaces of this salt; - reads it from standard input.")
    ] = None,
    older_than: Annotated[
        str | None,
        typer.Option(
            metavar="AGE",
            help='What was not used for so long, such as "7d" or "12h": row files by their last use, objects by when '
            "they were written, shards of slabs as a whole.",
        ),
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="All namespaces.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Delete. Without this, only show what would be deleted.")] = False,
    as_json: Json = False,
) -> int:
    """Delete namespaces, or their old rows, under a path or a prefix: those that agree with all of --namespace, --salt
    and --older-than. Then list again, to prove that they are gone.

    Shared directories and buckets may be in use: a deleted row is a miss. Slabs in a part that an engine holds are
    refused. What engines store meanwhile stays.

    In a bucket with versioning, all versions are deleted for good, and each counts.

    Exit code: 0 if all that was chosen is gone, or would be; 1 if some of it is still there, or is refused; 2 if the
    place cannot be read, or the arguments are wrong; 3 if something could not be read or deleted, so that some of it
    may still be there.
    """
    if not (namespace or salt or older_than or everything):
        raise InputError("purge: say what, by --namespace, --salt, --older-than or --all")
    wanted = _digits(namespace or [])
    if salt == "-":
        salt = sys.stdin.readline().rstrip("\n")
    if salt == "":  # as of a variable that is not set: it would choose all namespaces without a salt
        raise InputError("purge: --salt is empty")
    digest = None if salt is None else salt_digest(salt)
    before_s = _before(older_than)
    chosen = [each for each in found_at(place, endpoint, config, before_s) if selected(each, wanted, digest)]
    # One without a manifest is not known to be chosen by its salt, and nothing of it is deleted.
    victims = {_at(each): each for each in chosen if each.name and (digest is None or each.manifest is not None)}
    left: dict[tuple[str, str], StoredNamespace] | None = None
    if yes:
        for each in victims.values():
            _delete(each)
        try:
            left = {_at(each): each for each in found_at(place, endpoint, config, before_s)}
        except InputError as error:  # what is deleted must be told
            for each in victims.values():
                each.problem = each.problem or f"it cannot be listed again ({error})"
    reports = [_report(each, victims, left) for each in chosen]
    worth_telling = ("rows", "refused", "left", "problem")
    reports = [report for report in reports if older_than is None or any(report[key] for key in worth_telling)]
    if as_json:
        print_json({"deleted": yes, "namespaces": reports})
    else:
        _print(reports, yes=yes)
    if any(report["problem"] for report in reports):
        return INCOMPLETE
    return FAILED if any(report["refused"] or report["left"] for report in reports) else OK


def selected(found: StoredNamespace, wanted: list[str], digest: str | None) -> bool:
    """Whether `--namespace` and `--salt` choose this one. A namespace without a manifest has an unknown salt. What
    cannot be read may be what was meant: it is chosen, for its problem."""
    if not found.name:
        return True
    if wanted and not any(found.name.startswith(digits) for digits in wanted):
        return False
    if digest is None or (found.manifest is None and found.problem):
        return True
    return found.manifest is not None and found.manifest.description.salt == digest


def _delete(victim: StoredNamespace) -> None:
    if victim.refused:
        return
    with progress(f"deleting {victim.name[:12]}", victim.rows) as bar:
        try:
            victim.delete(lambda rows: bar.advance(bar.tasks[0].id, rows))
        except (TierDown, TierRefused) as error:
            victim.problem = str(error)


def _at(found: StoredNamespace) -> tuple[str, str]:
    return found.place, found.name


def _report(
    found: StoredNamespace,
    victims: Mapping[tuple[str, str], StoredNamespace],
    left: Mapping[tuple[str, str], StoredNamespace] | None,
) -> dict[str, Any]:
    """What `--json` prints of one namespace. `left`: what a second listing has found, None if there was none."""
    chosen, again = _at(found) in victims, (left or {}).get(_at(found))
    now = found if left is None else again  # an engine may have taken or left it meanwhile
    return {
        "place": found.place,
        "namespace": found.name,
        "whose": whose(found),
        "rows": found.rows if chosen else 0,
        "bytes": found.nbytes if chosen else 0,
        "refused": (now.refused if chosen and now else "") or None,
        "problem": found.problem or (again.problem if again else "") or None,
        "left": (again.rows if again else 0) if chosen and left is not None else None,
    }


def _digits(given: list[str]) -> list[str]:
    for text in given:
        if len(text) < MIN_DIGITS or not set(text) <= set("0123456789abcdef"):
            raise InputError(f"--namespace: must be at least {MIN_DIGITS} hexadecimal digits of a namespace")
    return given


def _before(older_than: str | None) -> float:
    """Unix seconds; what is older is deleted."""
    try:
        age_s = parse_age(older_than)
    except ValueError as error:
        raise InputError(f"--older-than: {error}") from None
    return math.inf if age_s is None else time.time() - age_s


def _print(reports: list[dict[str, Any]], *, yes: bool) -> None:
    if not reports:
        print("nothing to delete")
        return
    columns = ("namespace", "rows", "size", "place", "whose", "result")
    print_table(
        columns,
        (
            (
                report["namespace"][:12],
                report["rows"],
                format_size(report["bytes"]),
                report["place"],
                report["whose"],
                _result(report, yes=yes),
            )
            for report in reports
        ),
    )
    if not yes:
        can = any(report["rows"] and not report["refused"] for report in reports)
        print("Nothing was deleted: --yes does it." if can else "Nothing was deleted, nor would it be with --yes.")


def _result(report: dict[str, Any], *, yes: bool) -> str:
    if report["problem"] or report["refused"]:
        left = f"; {report['left']} rows are still there" if report["left"] else ""
        return f"{report['problem'] or report['refused']}{left}"
    if not yes:
        return "would be deleted"
    return f"{report['left']} rows are still there" if report["left"] else "deleted, and listed again: nothing is left"
