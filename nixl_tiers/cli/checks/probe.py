"""The child of the doctor that may hang or crash: `python -m nixl_tiers.cli.checks.probe STEP ...`.

    plugin NAME           opens a plugin of NIXL
    tier CONFIG TOKEN [CELLS BYTES]
                          examines a storage tier, given as JSON without secrets, with rows of so many cells of BYTES
    clean CONFIG TOKEN    removes what a `tier` that was killed has left

The parent kills it after a deadline (`cli/children.py`).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import asdict
from typing import Final

from nixl_tiers.base.chunk import Geometry
from nixl_tiers.cli.checks.finding import not_tried
from nixl_tiers.cli.checks.trial import ROW
from nixl_tiers.cli.children import run_step, say
from nixl_tiers.config.schema import FileConfig, S3Config, StorageConfig, tier_from_dict
from nixl_tiers.tiers.nixl_agent import Agent, AgentError

_NOWHERE: Final = {
    "endpoint_override": "http://127.0.0.1:9", "scheme": "http", "bucket": "doctor", "region": "us-east-1",
    "access_key": "doctor", "secret_key": "doctor", "use_virtual_addressing": "false",
}  # fmt: skip
"""Opening the plugin sends nothing."""


def open_plugin(name: str) -> None:
    say(at=f"opening NIXL's plugin {name}")
    if name == "OBJ":
        Agent.obj(_NOWHERE)
    elif name == "GDS_MT":
        Agent.gds_mt()
    else:
        Agent.posix()


def examine(tier: StorageConfig, token: str, geometry: Geometry) -> None:
    if isinstance(tier, FileConfig):
        from nixl_tiers.cli.checks import directory

        findings = directory.examine(tier, token, geometry)
    elif isinstance(tier, S3Config):
        from nixl_tiers.cli.checks import bucket

        findings = bucket.examine(tier, token, geometry)
    else:
        findings = iter([not_tried("tier", f"only its own code knows what a tier of type {tier.type} needs")])
    for finding in findings:
        say(finding=asdict(finding))


def clean(tier: StorageConfig, token: str) -> None:
    if isinstance(tier, FileConfig):
        from nixl_tiers.cli.checks import directory

        directory.clean(tier, token)
    elif isinstance(tier, S3Config):
        from nixl_tiers.cli.checks import bucket

        bucket.clean(tier, token)


STEPS: Final[dict[str, Callable[[list[str]], None]]] = {
    "plugin": lambda given: open_plugin(given[0]),
    "tier": lambda given: examine(
        tier_from_dict(json.loads(given[0])), given[1], Geometry(*map(int, given[2:])) if given[2:] else ROW
    ),
    "clean": lambda given: clean(tier_from_dict(json.loads(given[0])), given[1]),
}


if __name__ == "__main__":
    run_step(STEPS, sys.argv[1:], AgentError)
