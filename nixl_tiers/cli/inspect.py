"""`nixl-tiers inspect`: whose the rows below a path or a prefix are, how many, how old."""

from __future__ import annotations

import time
from typing import Any

import msgspec

from nixl_tiers.cli import INCOMPLETE, OK
from nixl_tiers.cli.output import Json, print_json
from nixl_tiers.cli.places import ConfigFile, Endpoint, Place, found_at
from nixl_tiers.config.fields import format_size
from nixl_tiers.tiers.stored import StoredNamespace


def inspect(place: Place = None, *, endpoint: Endpoint = None, config: ConfigFile = None, as_json: Json = False) -> int:
    """Show the namespaces of a file tier's path or of an s3 tier's prefix: whose they are, how big, how old, and which
    process uses them. Changes nothing; engines may be using it.

    Exit code: 0; 2 if the place cannot be read or holds no tier; 3 if something in it could not be read.
    """
    found = found_at(place, endpoint, config)
    if as_json:
        print_json({"namespaces": [fields(each) for each in found]})
    else:
        _print(found)
    return INCOMPLETE if any(each.problem for each in found) else OK


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
