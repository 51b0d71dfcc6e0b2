"""NIXL's plugins and storage tiers, each examined in a child that is killed after a deadline."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Final

from nixl_tiers.base.chunk import Geometry
from nixl_tiers.base.gpus import gpu_for
from nixl_tiers.cli.checks.finding import Finding, Status, broken, not_tried, ok, warning
from nixl_tiers.cli.children import Children, Step
from nixl_tiers.config.schema import FileConfig, S3Config, StorageConfig, TiersConfig, tier_to_dict

DEADLINE_S: Final = 60.0
_PLUGIN_S: Final = 20.0
_CLEAN_S: Final = 10.0
_PROBE: Final = "nixl_tiers.cli.checks.probe"
_PLUGINS: Final = {"POSIX": "slabs of file tiers", "OBJ": "s3 tiers", "GDS_MT": "file tiers with `backend: gds_mt`"}


def plugins(scratch: Path, config: TiersConfig | None) -> Iterator[Finding]:
    """Which plugins of NIXL open. One that the configuration needs must."""
    children = Children(scratch, _PROBE, _PLUGIN_S)
    for name, what in _PLUGINS.items():
        step = children.run("plugin", name, environment=gpu_for(name.lower()))
        if not step.error:
            yield ok(f"NIXL {name}", "opens", seconds=round(step.seconds, 2))
        elif _needed(name, config):
            yield broken(f"NIXL {name}", step.error, f"{_remedy(name)}: {what} need it", log=step.log)
        elif name == "GDS_MT":
            yield not_tried(
                f"NIXL {name}", f"{step.error}; only {what} need it", "see `doctor --gds DIR`", log=step.log
            )
        else:
            yield warning(f"NIXL {name}", step.error, f"{_remedy(name)}: {what} need it", log=step.log)


def _needed(name: str, config: TiersConfig | None) -> bool:
    storage = config.storage if config else ()
    files = [tier for tier in storage if isinstance(tier, FileConfig)]
    return {
        "POSIX": any(tier.backend != "gds_mt" and tier.layout == "slabs" for tier in files),
        "OBJ": any(isinstance(tier, S3Config) for tier in storage),
        "GDS_MT": any(tier.backend == "gds_mt" for tier in files),
    }[name]


def _remedy(name: str) -> str:
    if name == "GDS_MT":
        return "run `doctor --gds DIR`, which says what is missing"
    packages = "nixl-cu12" if name == "OBJ" else "nixl-cu12 or nixl-cu13"  # see nixl_agent.py
    try:
        return f"install nixl {version('nixl')} with {packages}"
    except PackageNotFoundError:
        return f"install nixl with {packages}"


def examine(
    scratch: Path, tier: StorageConfig, deadline_s: float = DEADLINE_S, geometry: Geometry | None = None
) -> Iterator[Finding]:
    """Everything about one tier, in at most `deadline_s`, and what it takes to end a child that hangs. `geometry`: of
    the rows of its trial."""
    children = Children(scratch, _PROBE, deadline_s)
    children.environment |= gpu_for(getattr(tier, "backend", ""))
    given, token = json.dumps(tier_to_dict(tier)), secrets.token_hex(8)
    cells = (str(geometry.cells), str(geometry.cell_payload)) if geometry else ()
    step = children.run("tier", given, token, *cells)
    yield from _findings(step)
    if step.error:
        change = (
            "the disk or the server hangs: see the kernel's log, and the server's" if "return" in step.error else ""
        )
        yield broken("examination", step.error, change, log=step.log)
        children.run("clean", given, token, deadline_s=_CLEAN_S)


def _findings(step: Step) -> Iterator[Finding]:
    for raw in step.all("finding"):
        yield Finding(**{**raw, "status": Status(raw["status"])})


def as_dict(group: str, finding: Finding) -> dict[str, object]:
    return {"group": group, **asdict(finding)}
