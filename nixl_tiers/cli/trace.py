"""Replays a trace of prompts in Mooncake's format through the real core, in virtual time and without I/O.

One JSON object a line: `timestamp` in ms, `hash_ids`: the prompt's chain of blocks of BLOCK_TOKENS tokens. Each request
looks its chain up until a miss, loads what it hit, and stores the rest; its hits are the leading run of its blocks.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from nixl_tiers.base.chunk import Key, Outcome
from nixl_tiers.base.policies import Eviction, Write
from nixl_tiers.cli.output import InputError
from nixl_tiers.core.key_lookup import Lookup
from nixl_tiers.core.listing import take_all
from nixl_tiers.core.manager import TierManager
from nixl_tiers.core.rows import CPU
from nixl_tiers.core.types import TierSpec

BLOCK_TOKENS: Final = 512
_ROW_BYTES: Final = 4096  # nothing is moved


@dataclass(frozen=True)
class Prompt:
    name: str
    now_s: float
    keys: list[Key]


@dataclass(frozen=True)
class Replayed:
    """`hits`: per cent of all look-ups, by the tier that the bytes came from. `stored`: blocks, into host memory."""

    hits: dict[str, float]
    stored: int


class Meter:
    """Is told what calls of the core are for, and of how many blocks. This one measures nothing."""

    def take(self, kind: str) -> AbstractContextManager[None]:
        """Around the calls of this kind; "request": around all of one request."""
        return nullcontext()

    def count(self, kind: str, blocks: int) -> None:
        pass


def read(path: Path) -> list[Prompt]:
    """Raises InputError."""
    prompts = []
    try:
        with path.open() as lines:
            for number, line in enumerate(lines):
                entry = json.loads(line)
                # As long as vLLM's keys, and new objects each time, as in vLLM.
                keys = [block.to_bytes(32, "little") + bytes(4) for block in entry["hash_ids"]]
                prompts.append(Prompt(str(number), entry["timestamp"] / 1000, keys))
    except OSError as error:
        raise InputError(f"--trace: {path} cannot be read ({error.strerror})") from None
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError):
        raise InputError(
            f"--trace: line {len(prompts) + 1} of {path} has no timestamp and hash_ids, as Mooncake's traces have"
        ) from None
    return prompts


def replay(
    prompts: Sequence[Prompt], rows: int, policy: Eviction, below: int = 0, meter: Meter | None = None
) -> Replayed:
    """All prompts through a host tier of `rows` rows, over a file tier of `below` rows if there are any."""
    meter = meter or Meter()
    specs = [TierSpec("file", Write.THROUGH, physical_slots=True)] if below else []
    core = TierManager(rows, _ROW_BYTES, specs, policy=policy)
    if below:
        take_all(core.events.opened(0, below))
        core.events.listed(0, [], last=True)
    hits: dict[str, int] = dict.fromkeys((CPU, *(spec.name for spec in specs)), 0)
    stored = 0
    for prompt in prompts:
        with meter.take("request"):
            found = _look_up(core, prompt, meter)
            for source in core.sources(found):
                hits[source] += 1
            stored += _serve(core, prompt, found, meter)
    blocks = sum(len(prompt.keys) for prompt in prompts)
    return Replayed({tier: 100 * count / max(1, blocks) for tier, count in hits.items()}, stored)


def _look_up(core: TierManager, prompt: Prompt, meter: Meter) -> list[Key]:
    """Scan the prefix, wait for promotions, scan again, as an engine does until a request may run."""
    while True:
        hits = 0
        answer = Lookup.MISS
        pending = False
        with meter.take("lookup"):
            for end, key in enumerate(prompt.keys):
                answer = core.lookup(key, prompt.name, end, prompt.now_s)
                if answer is Lookup.MISS:
                    break
                pending = pending or answer is Lookup.PENDING
                hits += 1
        meter.count("lookup", hits + (answer is Lookup.MISS))
        if not pending:
            return prompt.keys[:hits]
        core.end_step()
        _run_movers(core, prompt.now_s, meter)


def _serve(core: TierManager, prompt: Prompt, found: list[Key], meter: Meter) -> int:
    """How many blocks were stored."""
    rest = prompt.keys[len(found) :]
    with meter.take("load"):
        core.copies.prepare_load(found, prompt.name)
        core.copies.complete_load(prompt.name)
    with meter.take("store"):
        plan = core.copies.prepare_store(rest, prompt.name)
        core.copies.complete_store(core.copies.rows_being_filled(plan.keys), ())
    with meter.take("end"):
        core.finish_request(prompt.name)
        core.end_step()
    for kind, keys in (("load", found), ("store", rest), ("end", prompt.keys)):
        meter.count(kind, len(keys))
    if core.tiers:
        _run_movers(core, prompt.now_s, meter)
    return len(plan.keys)


def _run_movers(core: TierManager, now_s: float, meter: Meter) -> None:
    """Movers that finish all planned jobs at once."""
    while True:
        with meter.take("plan"):
            jobs = core.events.plan(now_s)
        rows = sum(len(job.moves) for job in jobs)
        meter.count("plan", rows)
        with meter.take("finished"):
            for job in jobs:
                core.events.finished(job.tier, job.id, [Outcome.OK] * len(job.moves), now_s)
        meter.count("finished", rows)
        for tier in core.tiers:
            for _ in tier.members[0].delete_batches(256):
                pass
        if not jobs:
            return
