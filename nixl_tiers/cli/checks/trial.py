"""Writes rows through a tier's own code, reads them back, compares every byte, and deletes them: what an engine's mover
would do, with times. What is made for it in a directory or below a prefix has a name of its own, and is removed again.
"""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Callable
from statistics import median
from typing import Final

import numpy as np
from numpy.typing import NDArray

from nixl_tiers.base.chunk import NAMESPACE_BYTES, Geometry, Outcome
from nixl_tiers.cli.checks.finding import Finding, advise, broken, ok
from nixl_tiers.cli.children import say
from nixl_tiers.config.schema import StorageConfig, format_size
from nixl_tiers.memory.region import HostRegion
from nixl_tiers.tiers.base import Move, StorageTier, TierDown, TierRefused, implement

SCRATCH_PREFIX: Final = ".nixl-tiers-doctor-"
SCRATCH: Final = re.compile(rf"{re.escape(SCRATCH_PREFIX)}[0-9a-f]{{16}}")
STALE_S: Final = 3600.0  # left by a doctor that was killed
NAME: Final = "write, read, verify"
ROW: Final = Geometry(cells=1, cell_payload=1 << 20)  # where an engine's are not known
MOST_ROWS: Final = 1024
MOST_BYTES: Final = 256 << 20
SLOW: Final = 100e6  # bytes a second: below it a hit is slower than computing for almost any model on a GPU
OPEN_S: Final = 10.0
MOVE_S: Final = 40.0
READS: Final = 5  # of all rows: how far apart they are says how well the median is known
READS_S: Final = 5.0  # no more of them after so long
_POLL_S: Final = 0.0003  # as a mover does
_DELETE_S: Final = 5.0


class Failed(Exception):
    """The trial cannot go on. One sentence."""


def rows_of(geometry: Geometry, at_least: int) -> int:
    """How many of these rows are tried: `at_least`, as many of 1 MiB as of ROW. More of smaller ones, up to as many
    bytes and MOST_ROWS; fewer of those that would be more than MOST_BYTES."""
    rows = max(at_least, min(at_least * ROW.payload_bytes // geometry.row_bytes, MOST_ROWS))
    return max(1, min(rows, MOST_BYTES // geometry.row_bytes))


def write_read_verify(config: StorageConfig, rows: int, geometry: Geometry) -> Finding:
    """Through a tier with this configuration, whose place must be empty, with `rows` rows."""
    say(at="allocating host memory")
    region = HostRegion.create(geometry, rows)
    tier: StorageTier | None = None
    try:
        say(at="opening the tier")
        tier = implement(config, geometry, region)
        return _run(tier, region, rows, geometry, asked=config.asked)
    except (TierDown, TierRefused, Failed) as error:
        denials = " ".join(tier.denials.values()) if tier is not None else ""
        return broken(NAME, f"{error}{f': {denials}' if denials else ''}")
    finally:
        if tier is not None:
            tier.close()


def _run(tier: StorageTier, region: HostRegion, rows: int, geometry: Geometry, *, asked: bool) -> Finding:
    tier.identify(f"doctor-{secrets.token_hex(8)}")
    _open(tier)
    _list(tier)
    if asked:
        _wait_for_room(tier)
    content = np.frombuffer(np.random.default_rng().bytes(region.nbytes), np.uint8).reshape(region.rows_view.shape)
    region.rows_view[:] = content
    moves = [Move(row, row, b"doctor-%d" % row, row + 1, seal=True) for row in range(rows)]
    say(at="writing")
    write_s = _timed(tier, lambda: tier.store(moves), "written")
    say(at="reading")
    payload, reads_s = geometry.payload_bytes, list[float]()
    while len(reads_s) < READS and sum(reads_s) < READS_S:
        region.rows_view[:] = 0
        reads_s.append(_timed(tier, lambda: tier.load(moves), "read and verified"))
        if not np.array_equal(_payload(region.rows_view, geometry), _payload(content, geometry)):
            raise Failed("bytes that were read differ from those that were written")
    say(at="deleting")
    tier.delete([(move.slot, move.key) for move in moves])
    until_s = time.monotonic() + _DELETE_S
    while tier.busy and time.monotonic() < until_s:
        tier.poll()
        time.sleep(_POLL_S)
    write, read = (rows * payload / seconds for seconds in (write_s, median(reads_s)))
    rates = f"written at {write / 1e9:.2f} GB/s, read at {read / 1e9:.2f} GB/s"
    text = f"{rows} rows of {format_size(payload)} {rates}, every byte compared"
    reads = [round(rows * payload / seconds) for seconds in reads_s]
    speeds = {"write_bytes_per_s": round(write), "read_bytes_per_s": round(read), "reads_bytes_per_s": reads}
    if read >= SLOW:
        return ok(NAME, text, bytes=rows * payload, **speeds)
    return advise(
        NAME,
        text,
        "so slow that a GPU computes most prompts sooner: use faster storage",
        bytes=rows * payload,
        **speeds,
    )


def _payload(rows: NDArray[np.uint8], geometry: Geometry) -> NDArray[np.uint8]:
    """Without what is between the cells, and the seal: (rows, cells, bytes)."""
    cells = rows[:, : geometry.cells * geometry.cell_bytes].reshape(len(rows), geometry.cells, geometry.cell_bytes)
    return cells[:, :, : geometry.cell_payload]


def _open(tier: StorageTier) -> None:
    until_s = time.monotonic() + OPEN_S
    while True:
        try:
            slots = tier.open(secrets.token_bytes(NAMESPACE_BYTES), 0)
        except TierDown:
            if time.monotonic() > until_s:
                raise
            time.sleep(0.1)
            continue
        if slots < 1:
            raise Failed("the tier opens without room for a row")
        return


def _list(tier: StorageTier) -> None:
    until_s = time.monotonic() + OPEN_S
    for entries in tier.list_rows():
        if not entries:
            time.sleep(_POLL_S)
        if time.monotonic() > until_s:
            raise Failed(f"the tier is not listed after {OPEN_S:g} s")


def _wait_for_room(tier: StorageTier) -> None:
    """Until a medium that engines share grants stores: others may have to count this one first."""
    until_s = time.monotonic() + OPEN_S
    while True:
        try:
            _timed(tier, lambda: tier.store([Move(0, 0, b"doctor-first", 1, seal=True)]), "written")
        except Failed:
            if time.monotonic() > until_s:
                raise
        else:
            return


def _timed(tier: StorageTier, start: Callable[[], int], what: str) -> float:
    """Seconds from the start of a batch to its end. Raises Failed unless all of its rows are OK."""
    began_s = time.perf_counter()
    batch_id = start()
    outcomes: list[Outcome] = []

    def done() -> bool:
        outcomes.extend(o for batch in tier.poll() if batch.batch_id == batch_id for o in batch.outcomes)
        return bool(outcomes)

    _wait(done, MOVE_S, f"rows to be {what}")
    seconds = time.perf_counter() - began_s
    bad = [Outcome(outcome).name for outcome in outcomes if outcome != Outcome.OK]
    if bad:
        raise Failed(f"{len(bad)} of {len(outcomes)} rows were not {what} ({', '.join(sorted(set(bad)))})")
    return seconds


def _wait(condition: Callable[[], object], limit_s: float, what: str) -> None:
    until_s = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > until_s:
            raise Failed(f"after {limit_s:g} s still waiting for {what}")
        time.sleep(_POLL_S)
