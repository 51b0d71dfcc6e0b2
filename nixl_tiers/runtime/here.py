"""Asks what this machine has for a configuration, from a child with a deadline: a mount that hangs must hold up neither
the start of an engine, nor its end, as a thread in the kernel would."""

from __future__ import annotations

import os
import select
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import msgspec

from nixl_tiers.base.times import PRODUCTION
from nixl_tiers.config.here import SILENT, Asked, Here
from nixl_tiers.config.schema import ConfigError, FileConfig, StorageConfig, TiersConfig, tier_to_dict
from nixl_tiers.memory.memfd import memfd
from nixl_tiers.mover import __main__ as program
from nixl_tiers.mover.child import environment, options

_MARGIN_S: Final = 0.2  # in which the child says what it has found


def ask(config: TiersConfig, *, starting: bool, deadline_s: float, in_all_s: float = PRODUCTION.look_s) -> Here:
    """As `config.here.look`, within `deadline_s` from when the child has started, which may take longer than any look
    on a node whose caches are cold, and within `in_all_s`. Raises ConfigError."""
    if not config.storage:
        return Here()
    tiers = dict(zip(config.names, map(_given, config.storage), strict=True))
    raw = msgspec.json.encode(Asked(tiers, starting, deadline_s - _MARGIN_S, time.monotonic() + in_all_s - _MARGIN_S))
    answer = run(raw, deadline_s, in_all_s)
    here = Here(silent=dict.fromkeys(config.names, SILENT))
    with suppress(msgspec.DecodeError):
        here = msgspec.json.decode(answer, type=Here)
    if here.error:
        raise ConfigError(here.error)
    waited_s = deadline_s if answer else in_all_s
    here.silent = {name: f"{why} within {waited_s:g} s, and was not checked" for name, why in here.silent.items()}
    return here


def run(raw: bytes, deadline_s: float, in_all_s: float) -> bytes:
    """The child's answer, after a space that says that it has started; empty if it has not."""
    until_s = time.monotonic() + in_all_s
    command = [sys.executable, *options(), str(Path(program.__file__).absolute()), program.LOOK]
    with os.fdopen(memfd("nixl_tiers look"), "r+b", 0) as asked:  # a pipe may be full
        asked.write(raw)
        asked.seek(0)
        # Its errors are the engine's to show. Ctrl-C is the engine's; it ends by itself.
        child = subprocess.Popen(command, stdin=asked, stdout=subprocess.PIPE, process_group=0, env=environment({}))
    assert child.stdout is not None
    with child.stdout as said:
        ready = select.poll()
        ready.register(said, select.POLLIN)
        answer = b""
        while ready.poll(1000 * max(0.0, until_s - time.monotonic())):
            if not (more := os.read(said.fileno(), 1 << 16)):
                child.wait()
                return answer
            until_s = until_s if answer else min(until_s, time.monotonic() + deadline_s)
            answer += more
    child.kill()  # it may have answered, and not end: a thread of it waits in the kernel
    return answer


def _given(tier: StorageConfig) -> dict[str, Any]:
    raw = tier_to_dict(tier)
    if isinstance(tier, FileConfig) and len(tier.members) > 1:
        raw["path"] = [str(member.path) for member in tier.members]
    return raw
