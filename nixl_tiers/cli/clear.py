"""`nixl-tiers clear`: have running engines forget what they hold."""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING, Annotated, Any

import typer

from nixl_tiers.cli import FAILED, INCOMPLETE, OK
from nixl_tiers.cli.output import InputError, Json, print_json, print_table, progress

if TYPE_CHECKING:
    from nixl_tiers.runtime.control import Answer


def clear(
    *,
    pid: Annotated[
        list[int] | None, typer.Option(metavar="PID", help="This engine only, of those that run here. Repeatable.")
    ] = None,
    quota: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Only rows of this quota of the configuration, such as a tenant's."),
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Clear. Without this, only show what would be cleared.")] = False,
    as_json: Json = False,
) -> int:
    """Have running engines of this user evict what they hold in host memory and in storage tiers of their own, and
    delete it there. They go on serving: what is cleared is computed again.

    Rows that requests use stay, and so does what other engines share (`nixl-tiers purge` deletes that), and what vLLM
    keeps in GPU memory.

    Run it on the engine's machine; where the engine is in a container, in there.

    Exit code: 0 if all of it is gone, or would be; 1 if rows in use, or stored meanwhile, are left; 2 if no such engine
    runs; 3 if a tier could not be cleared, or an engine has no such quota or did not answer.
    """
    import msgspec

    from nixl_tiers.runtime.control import Answer, Request, Unreachable, ask, engines

    answers: list[Answer] = []
    for number, engine in engines():
        with closing(engine):
            if pid and number not in pid:
                continue
            try:
                with progress(f"engine {number}"):
                    answers.append(ask(engine, Request(yes, quota)))
            except Unreachable as error:
                answers.append(Answer(number, problem=str(error)))
            answers[-1].pid = number  # as it is called here
    missing = [each for each in pid or [] if each not in {answer.pid for answer in answers}]
    if missing or not answers:
        which = f" with PID {missing[0]}" if missing else ""
        raise InputError(f"clear: no engine{which} of this user is running here")
    if as_json:
        print_json({"cleared": yes, "engines": msgspec.to_builtins(answers)})
    else:
        _print(answers, yes=yes)
    return _code(answers, yes=yes)


def _code(answers: list[Answer], *, yes: bool) -> int:
    tiers = [tier for answer in answers for tier in answer.tiers]
    if any(answer.problem for answer in answers) or any(tier.problem for tier in tiers):
        return INCOMPLETE
    return FAILED if yes and any(tier.left for tier in tiers) else OK


def _print(answers: list[Answer], *, yes: bool) -> None:
    rows: list[tuple[Any, ...]] = []
    for answer in answers:
        if answer.problem:
            rows.append((answer.pid, "", "", answer.problem))
        for tier in answer.tiers:
            if tier.shared:
                result = "stays: other engines may share it"
            else:
                result = tier.problem or (_result(tier.left) if yes else "would be cleared")
                if tier.unknown:
                    result += f"; {tier.unknown} rows are of no quota, such as those found at the start"
            rows.append((answer.pid, tier.tier, "" if tier.shared else tier.rows, result))
    print_table(("engine", "tier", "rows", "result"), rows)
    if not yes:
        print("Nothing was cleared: --yes does it.")


def _result(left: int) -> str:
    return f"cleared; {left} rows in use, or stored since, are left" if left else "cleared"
