"""`nixl-tiers doctor [CONFIG]`: what this machine has, and whether every tier of a configuration works."""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Final

import typer
from rich.text import Text

from nixl_tiers.cli.checks import machine, tiers
from nixl_tiers.cli.checks.finding import Finding, Status, exit_code, warning
from nixl_tiers.cli.gds.report import NotUsable
from nixl_tiers.cli.gds.report import examine as examine_gds
from nixl_tiers.cli.output import InputError, Json, console, print_json, progress
from nixl_tiers.config import schema
from nixl_tiers.config.schema import TiersConfig
from nixl_tiers.config.warnings import warnings_given

_STYLES: Final = {
    Status.OK: "green",
    Status.ADVICE: "cyan",
    Status.WARNING: "yellow",
    Status.BROKEN: "bold red",
    Status.NOT_TRIED: "dim",
}
_VERDICTS: Final = {
    Status.OK: "all is well",
    Status.ADVICE: "it works, and could be faster",
    Status.WARNING: "it works, and something should be changed",
    Status.BROKEN: "something is broken",
}


def doctor(
    config: Annotated[
        str | None,
        typer.Argument(help="As for `nixl-tiers config`: its tiers are tested too.", metavar="[CONFIG]"),
    ] = None,
    gds: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Examine GPUDirect Storage instead, with 32 MiB written in DIR."),
    ] = None,
    gpu: Annotated[int, typer.Option(help="With --gds: the GPU's ordinal.")] = 0,
    as_json: Json = False,
) -> int:
    """Say what this machine has and what to change, and test every storage tier of a configuration: permissions one by
    one, then rows written, read and verified by the tier's own code.

    A trial writes at most 64 MiB within the capacity, under a scratch name of its own, and deletes them. Nothing is
    written while an engine uses the directory, or one of an older release the prefix, nor with `write: off`. Nothing
    runs on a GPU. Whatever hangs is killed after 60 seconds.

    Exit code: 0 all is well, perhaps with advice on speed; 1 warnings; 2 something is broken, or the configuration is
    refused. With --gds it is the verdict's: 0 native, 3 compatibility, 4 unavailable; 2 if DIR cannot be written to.
    """
    if gds:
        if config is not None:
            raise InputError("--gds: examines a directory, and no tier: leave CONFIG out, or --gds")
        try:
            return examine_gds(gds, gpu, as_json=as_json)
        except NotUsable as error:
            raise InputError(str(error)) from error
    read = schema.load(config) if config is not None else None
    groups: dict[str, list[Finding]] = {}
    if config is not None and read is not None:
        for sentence in warnings_given(read, config):
            field, _, text = sentence.partition(": ")
            groups.setdefault("configuration", []).append(warning(field, text))
    for group, finding in _examine(read):
        groups.setdefault(group, []).append(finding)
    found = [finding for findings in groups.values() for finding in findings]
    code = exit_code(found)
    if as_json:
        findings = [tiers.as_dict(group, finding) for group, findings in groups.items() for finding in findings]
        print_json({"exit_code": code, "verdict": _verdict(found), "findings": findings})
    else:
        _print(groups)
    return code


def _examine(config: TiersConfig | None) -> Iterator[tuple[str, Finding]]:
    named = zip(config.names, config.storage, strict=True) if config else ()
    storage = [(name, member) for name, tier in named for member in tier.members]
    with (
        tempfile.TemporaryDirectory(prefix="nixl-tiers-doctor-") as scratch,
        progress("machine", 2 + len(storage)) as bar,
    ):
        task = bar.tasks[0].id
        yield from (("machine", finding) for finding in machine.examine(config))
        bar.update(task, advance=1, description="NIXL")
        yield from (("machine", finding) for finding in tiers.plugins(Path(scratch), config))
        for name, tier in storage:
            bar.update(task, advance=1, description=name)
            group = f"{name}: {tier.place}"
            yield from ((group, finding) for finding in tiers.examine(Path(scratch), tier))


def _verdict(findings: Sequence[Finding]) -> str:
    found = {finding.status for finding in findings}
    return next((words for status, words in reversed(_VERDICTS.items()) if status in found), _VERDICTS[Status.OK])


def _print(groups: dict[str, list[Finding]]) -> None:
    out = console()
    for group, findings in groups.items():
        out.print(Text(group, style="bold"))
        widest = max(len(finding.name) for finding in findings)
        for finding in findings:
            status = Text(f"  {finding.status:<9}  ", style=_STYLES[finding.status])
            out.print(status + Text(f"{finding.name:<{widest}}  {finding.text}"), soft_wrap=True)
            if finding.change:
                out.print(Text(f"  {'':<9}  {'':<{widest}}  -> {finding.change}"), soft_wrap=True)
        out.print()
    found = [finding for findings in groups.values() for finding in findings]
    counted = Counter(finding.status for finding in found)
    rest = ", ".join(f"{counted[status]} {status}" for status in Status if counted[status])
    out.print(f"verdict: {_verdict(found)} ({rest})", soft_wrap=True)
