"""`nixl-tiers purge`: delete namespaces, or old rows, below a path or a prefix."""

from __future__ import annotations

import sys
import time
from dataclasses import replace
from typing import Annotated, Any

import typer

from nixl_tiers.base.manifest import salt_digest
from nixl_tiers.cli import FAILED, INCOMPLETE, OK
from nixl_tiers.cli.inspect import whose
from nixl_tiers.cli.output import InputError, Json, print_json, print_table, progress
from nixl_tiers.cli.storage.base import Namespace, Storage, Unusable, Victims
from nixl_tiers.cli.storage.places import ConfigFile, Endpoint, Place, storages
from nixl_tiers.config.fields import format_size, parse_age

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
    try:
        chosen = [
            (storage, each)
            for storage in storages(place, endpoint, config)
            for each in storage.namespaces(lambda _: None, old_versions=True)
            if selected(each, wanted, digest)
        ]
        by_salt = digest is not None
        reports = [_purge(storage, each, before_s, yes=yes, unknown_salt=by_salt) for storage, each in chosen]
    except Unusable as error:
        raise InputError(str(error)) from None
    worth_telling = ("rows", "refused", "left", "problem")
    reports = [report for report in reports if before_s is None or any(report[key] for key in worth_telling)]
    if as_json:
        print_json({"deleted": yes, "namespaces": reports})
    else:
        _print(reports, yes=yes)
    if any(report["problem"] for report in reports):
        return INCOMPLETE
    return FAILED if any(report["refused"] or report["left"] for report in reports) else OK


def selected(found: Namespace, wanted: list[str], digest: str | None) -> bool:
    """Whether `--namespace` and `--salt` choose this one. A namespace without a manifest has an unknown salt. What
    cannot be read may be what was meant: it is chosen, for its problem."""
    if not found.name:
        return True
    if wanted and not any(found.name.startswith(digits) for digits in wanted):
        return False
    if digest is None or (found.manifest is None and found.problem):
        return True
    return found.manifest is not None and found.manifest.description.salt == digest


def _purge(
    storage: Storage, found: Namespace, before_s: float | None, *, yes: bool, unknown_salt: bool
) -> dict[str, Any]:
    """What `--json` prints of one namespace; `left`: rows that a second listing has found, None if there was none.
    `unknown_salt`: without a manifest it is not known to be chosen, and nothing of it is deleted."""
    problem, left = found.problem, None
    victims = Victims(0, 0)
    try:
        if found.name and not (unknown_salt and found.manifest is None):
            victims = storage.victims(found, before_s)
            problem = problem or victims.problem
            if yes and not victims.refused:
                with progress(f"deleting {found.name[:12]}", victims.rows) as bar:
                    failed = storage.delete(found, before_s, lambda rows: bar.advance(bar.tasks[0].id, rows))
                after = storage.victims(found, before_s)
                left, problem = after.rows, failed or problem or after.problem
                victims = replace(victims, refused=after.refused)  # an engine may have taken it meanwhile
            elif yes:
                left = victims.rows
    except Unusable as error:
        problem = str(error)
    return {
        "place": found.place,
        "namespace": found.name,
        "whose": whose(found),
        "rows": victims.rows,
        "bytes": victims.nbytes,
        "refused": victims.refused or None,
        "problem": problem or None,
        "left": left,
    }


def _digits(given: list[str]) -> list[str]:
    for text in given:
        if len(text) < MIN_DIGITS or not set(text) <= set("0123456789abcdef"):
            raise InputError(f"--namespace: must be at least {MIN_DIGITS} hexadecimal digits of a namespace")
    return given


def _before(older_than: str | None) -> float | None:
    if older_than is None:
        return None
    try:
        age_s = parse_age(older_than)
    except ValueError as error:
        raise InputError(f"--older-than: {error}") from None
    return None if age_s is None else time.time() - age_s


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
