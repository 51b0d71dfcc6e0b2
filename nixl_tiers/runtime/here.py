"""Asks what this machine has for a configuration, from a child with a deadline: a mount that hangs must hold up neither
the start of an engine, nor its end, as a thread in the kernel would."""

from __future__ import annotations

import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import msgspec

from nixl_tiers.config.here import SILENT, Asked, Here
from nixl_tiers.config.schema import ConfigError, FileConfig, StorageConfig, TiersConfig, tier_to_dict
from nixl_tiers.mover import __main__ as program
from nixl_tiers.mover.child import environment, options

_MARGIN_S: Final = 0.2  # in which the child says what it has found


def ask(config: TiersConfig, *, starting: bool, deadline_s: float) -> Here:
    """As `config.here.look`, within `deadline_s`. Raises ConfigError."""
    if not config.storage:
        return Here()
    until_s = time.monotonic() + deadline_s
    tiers = dict(zip(config.names, map(_given, config.storage), strict=True))
    raw = msgspec.json.encode(Asked(tiers, starting, until_s - _MARGIN_S))
    here = Here(silent=dict.fromkeys(config.names, SILENT))
    with suppress(msgspec.DecodeError):
        here = msgspec.json.decode(run(raw, deadline_s), type=Here)
    if here.error:
        raise ConfigError(here.error)
    here.silent = {name: f"{why} within {deadline_s:g} s, and was not checked" for name, why in here.silent.items()}
    return here


def run(raw: bytes, deadline_s: float) -> bytes:
    """The child's answer; empty if there is none."""
    command = [sys.executable, *options(), str(Path(program.__file__).absolute()), program.LOOK]
    # Its errors are the engine's to show. Ctrl-C is the engine's; it ends by itself.
    pipe, env = subprocess.PIPE, environment({})
    child = subprocess.Popen(command, stdin=pipe, stdout=pipe, process_group=0, env=env)
    try:
        return child.communicate(raw, timeout=deadline_s)[0]
    except subprocess.TimeoutExpired as late:  # it may have answered, and not end: a thread of it waits in the kernel
        child.kill()
        return late.output or b""


def _given(tier: StorageConfig) -> dict[str, Any]:
    raw = tier_to_dict(tier)
    if isinstance(tier, FileConfig) and len(tier.members) > 1:
        raw["path"] = [str(member.path) for member in tier.members]
    return raw
