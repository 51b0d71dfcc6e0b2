"""What this machine has for a configuration. Any look may wait for a mount that never answers: `main` is the child that
an engine or a command looks from (`runtime/here.py`)."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from functools import partial
from typing import Any, Final, NoReturn

import msgspec

from nixl_tiers.base.mounts import is_on_root
from nixl_tiers.config import schema
from nixl_tiers.config.schema import AllOf, ConfigError, FileConfig, StorageConfig, TiersConfig
from nixl_tiers.config.warnings import warnings_here

SILENT: Final = "it has not answered"


class Here(msgspec.Struct):
    """What was found. `silent`: tiers that did not answer in time, by name, and in words; `identities`: of the others
    that are on disks (`StorageConfig.identity`); `on_root`: their paths on the file system of `/`."""

    error: str = ""
    """Why the configuration is refused."""
    warnings: list[str] = []
    silent: dict[str, str] = {}
    identities: dict[str, str] = {}
    on_root: set[str] = set()


class Asked(msgspec.Struct):
    """What the child reads. `tiers`: the storage tiers by name, in order; `deadline_s`: from when they are loaded;
    `until_s`: in any case, by the monotonic clock, which is the machine's."""

    tiers: dict[str, dict[str, Any]]
    starting: bool
    deadline_s: float
    until_s: float


def look(config: TiersConfig, *, starting: bool, all_of: AllOf = schema.in_turn) -> Here:
    """`check_paths`, and what else is asked of the paths. `starting`: make what is missing."""
    here = Here()
    try:
        answered = schema.check_paths(config, starting, all_of)
    except ConfigError as error:
        here.error = str(error)
        return here
    here.silent = {name: SILENT for name, there in zip(config.names, answered, strict=True) if not there}
    named = zip(config.names, config.storage, strict=True)
    disks = {name: tier for name, tier in named if tier.on_disk and name not in here.silent}
    for name, found in zip(disks, all_of([partial(_look_at, tier) for tier in disks.values()]), strict=True):
        if found is None:
            here.silent[name] = SILENT
        else:
            here.identities[name], on_root = found
            here.on_root |= on_root
    if not here.silent:  # they compare the tiers' paths
        here.warnings = all_of([partial(warnings_here, config)])[0] or []
    return here


def _look_at(tier: StorageConfig) -> tuple[str, set[str]]:
    paths = [member.path for member in tier.members] if isinstance(tier, FileConfig) else []
    return tier.identity, {str(path) for path in paths if is_on_root(path)}


def _beside(until_s: float, calls: Sequence[Callable[[], Any]]) -> list[Any]:
    """All at once, since any may never return."""
    pool = ThreadPoolExecutor(max(1, len(calls)))
    futures = [pool.submit(call) for call in calls]
    wait(futures, max(0.0, until_s - time.monotonic()))
    return [future.result() if future.done() else None for future in futures]


def answer(raw: bytes, all_of: Callable[[Asked], AllOf] = lambda _: schema.in_turn) -> bytes:
    """To `Asked`, a `Here`, both as JSON."""
    asked = msgspec.json.decode(raw, type=Asked)
    cpu = {"type": "cpu", "capacity": 1}  # there is nothing to look at
    config = TiersConfig.model_validate({"tiers": [cpu, *(_loaded(name, raw) for name, raw in asked.tiers.items())]})
    return msgspec.json.encode(look(config, starting=asked.starting, all_of=all_of(asked)))


def _loaded(name: str, raw: dict[str, Any]) -> StorageConfig:
    """As its mover loads it."""
    try:
        return schema.tier_from_dict(raw)
    except ConfigError:  # its package is not found from here, which its mover says: it keeps its place and its name
        return StorageConfig(type=name, capacity=1)


def main() -> NoReturn:
    answers = os.dup(1)
    os.dup2(2, 1)  # where the package of a tier may print

    def loaded(asked: Asked) -> AllOf:
        os.write(answers, b" ")  # before the answer, which is JSON
        return partial(_beside, min(asked.until_s, time.monotonic() + asked.deadline_s))

    os.write(answers, answer(sys.stdin.buffer.read(), loaded))
    os._exit(0)  # a thread may wait for ever
