"""csrc/swap_step.c in Python, for tests to compare it with."""

from __future__ import annotations

from array import array
from collections.abc import Collection, Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from nixl_tiers.base.control_words import (
    FAILED,
    INCOMPLETE,
    MAX_MISSING,
    MISSING_AT,
    STORE_SEQ_AT,
    WRITTEN,
)
from nixl_tiers.swap.plan import CopyPlan
from nixl_tiers.swap.problems import BLOCK_RANGE, GOOD, MISMATCH, NOT_HELD, ROW_RANGE, UNEQUAL
from nixl_tiers.swap.step import Numbers, Step


class Part(NamedTuple):
    """One group's share of a job. `last_alone`: of each row one block, the last; `known`: whether it is known which
    block stands where."""

    rows: list[int]
    blocks: list[int]
    first: int
    last_alone: bool
    known: bool

    def sub_blocks(self, per_row: int) -> list[tuple[int, int, int]]:
        """Of each block: itself, its row, and which of the row's."""
        indices = [i * per_row + self.first if self.last_alone else self.first + i for i in range(len(self.blocks))]
        return [(block, self.rows[i // per_row], i % per_row) for block, i in zip(self.blocks, indices, strict=True)]


class Job(NamedTuple):
    parts: list[Part]  # of each group; none where they do not add up
    store_seq: int
    missing: dict[int, int]


def jobs_of(numbers: Numbers, groups: int, per_row: int) -> Iterator[Job]:
    """ValueError where there are not as many rows or blocks as the jobs say."""
    rows = np.frombuffer(numbers.rows, np.uint32).tolist()
    blocks = np.frombuffer(numbers.blocks, f"i{numbers.block_size}").tolist()
    left = numbers.numbers.tolist()
    for _ in range(numbers.jobs):
        n_rows, n_blocks, store_seq, n_missing = left[:4]
        shares, left = left[4 : 4 + 3 * groups], left[4 + 3 * groups :]
        missing, left = left[: 2 * n_missing], left[2 * n_missing :]
        if len(shares) < 3 * groups or len(missing) < 2 * n_missing or n_rows > len(rows) or n_blocks > len(blocks):
            raise ValueError(UNEQUAL)
        mine, rows = rows[:n_rows], rows[n_rows:]
        theirs, blocks = blocks[:n_blocks], blocks[n_blocks:]
        good = sum(shares[0::3]) == n_rows and sum(shares[1::3]) == n_blocks and min(shares, default=0) >= 0
        parts = []
        for count, size, index in zip(shares[0::3], shares[1::3], shares[2::3], strict=True):
            first = index % per_row
            alone = size == count > 1 and first == per_row - 1 > 0
            known = alone or size + first == count * per_row
            parts.append(Part(mine[:count], theirs[:size], first, alone, known))
            mine, theirs = mine[count:], theirs[size:]
        yield Job(
            parts if good and 0 <= store_seq < 1 << 64 - STORE_SEQ_AT else [],
            store_seq,
            dict(zip(missing[0::2], missing[1::2], strict=True)),
        )
    if rows or blocks:
        raise ValueError(UNEQUAL)


class PlainSteps:
    """As `Steps`."""

    def __init__(self, plan: CopyPlan, control: NDArray[np.uint64], last_block_only: Collection[int] = ()) -> None:
        self._plan = plan
        self._control: NDArray[np.uint64] | None = control[:, plan.share.cell]
        self._last_block_only = [group in last_block_only for group in range(len(plan.groups))]
        self._per_row = plan.geometry.sub_blocks

    def close(self) -> None:
        self._control = None

    def _jobs(self, step: Step) -> Iterator[Job]:
        return jobs_of(step.numbers, len(self._plan.groups), self._per_row)

    def plan(self, numbers: Numbers, *, to_host: bool) -> Step:
        step = Step(numbers, len(self._plan.groups))
        groups: list[list[int]] = [[] for _ in self._plan.groups]
        counts: list[int] = []
        nbytes: list[int] = []
        verdicts: list[int] = []
        for job in self._jobs(step):
            verdict = self._verdict(job, to_host=to_host)
            pairs = [self._pairs(part, to_host=to_host) if not verdict else [] for part in job.parts]
            pairs += [[]] * (len(groups) - len(pairs))
            for group, mine in zip(groups, pairs, strict=True):
                group.extend(mine)
            counts += map(len, pairs)
            nbytes.append(
                sum(len(mine) * each.block_bytes for mine, each in zip(pairs, self._plan.groups, strict=True))
            )
            verdicts.append(verdict)
        step.pairs, step.counts, step.nbytes, step.verdicts = (
            array("Q", each) for each in ([pair for group in groups for pair in group], counts, nbytes, verdicts)
        )
        return step

    def mark(self, step: Step) -> None:
        if (control := self._control) is None:
            return
        for job, verdict in zip(self._jobs(step), step.verdicts, strict=True):
            if verdict == MISMATCH:  # there may be no parts
                continue
            for part, last_only in zip(job.parts, self._last_block_only, strict=True):
                for number, row in enumerate(part.rows):
                    if row >= self._plan.rows or not self._writes(row):
                        continue
                    missing = part.first if number == 0 or part.last_alone else 0
                    whole = part.known and (missing == 0 or last_only) and missing <= MAX_MISSING
                    state = FAILED if verdict else WRITTEN if whole else INCOMPLETE
                    control[row] = job.store_seq << STORE_SEQ_AT | min(missing, MAX_MISSING) << MISSING_AT | state

    def _writes(self, row: int) -> bool:
        return row % self._plan.share.turns == self._plan.share.turn

    def _verdict(self, job: Job, *, to_host: bool) -> int:
        if not job.parts:
            return MISMATCH
        if any(row >= self._plan.rows for part in job.parts for row in part.rows):
            return ROW_RANGE
        place = 0
        for part, group in zip(job.parts, self._plan.groups, strict=True):
            if not to_host:
                held = [job.missing.get(place + number, 0) for number in range(len(part.rows))]
                if any(count > (0 if number else part.first) for number, count in enumerate(held)):
                    return NOT_HELD
                if len(part.rows) != -(-(part.first + len(part.blocks)) // self._per_row) * bool(part.blocks):
                    return MISMATCH
            if any(not 0 <= block < group.blocks for block in part.blocks):
                return BLOCK_RANGE
            place += len(part.rows)
        return GOOD

    def _pairs(self, part: Part, *, to_host: bool) -> list[int]:
        if to_host and (not part.known or not part.rows):
            return []
        return [
            (row * self._per_row + sub) << 32 | block
            for block, row, sub in (part if to_host else part._replace(last_alone=False)).sub_blocks(self._per_row)
            if not to_host or self._writes(row)
        ]
