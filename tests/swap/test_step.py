"""What a step's jobs copy and how their rows are marked: C and Python say the same, whatever the jobs are."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nixl_tiers.base import native
from nixl_tiers.base.chunk import Geometry
from nixl_tiers.base.control_words import FAILED, INCOMPLETE, MAX_MISSING, MISSING_AT, STORE_SEQ_AT, WRITTEN
from nixl_tiers.swap import step as step_module
from nixl_tiers.swap.plan import CopyPlan, Memory, Segment, Share
from nixl_tiers.swap.problems import BLOCK_RANGE, COPY_FAILED, GOOD, MISMATCH, NOT_HELD, ROW_RANGE
from nixl_tiers.swap.step import Numbers, Pairs, Step, Steps
from tests.support.plain_steps import PlainSteps

ROWS, BLOCKS, CELLS = 8, 12, 2


@dataclass
class Job:
    """Of each group its rows, its blocks, and the first block's index."""

    groups: Sequence[tuple[list[int], list[int], int]]
    store_seq: int = 1
    missing: dict[int, int] = field(default_factory=dict)


def numbers_of(jobs: Sequence[Job], block_size: int = 4) -> Numbers:
    numbers: list[int] = []
    rows: list[int] = []
    blocks: list[int] = []
    for job in jobs:
        mine = [row for group in job.groups for row in group[0]]
        theirs = [block for group in job.groups for block in group[1]]
        numbers += [len(mine), len(theirs), job.store_seq, len(job.missing)]
        for group in job.groups:
            numbers += [len(group[0]), len(group[1]), group[2]]
        for lacking in job.missing.items():
            numbers += lacking
        rows += mine
        blocks += theirs
    packed = np.array(blocks, f"i{block_size}").tobytes()
    return Numbers(len(jobs), array("q", numbers), np.array(rows, np.uint32).tobytes(), packed, block_size)


def plan_of(groups: int = 1, per_row: int = 1, turns: int = 1, turn: int = 0) -> CopyPlan:
    segments = [[Segment(1 << 20, 64, 64 - 16 * group, 0, BLOCKS - group)] for group in range(groups)]
    return CopyPlan(segments, Geometry(CELLS, 64 * per_row, per_row), Share(1, turn, turns), 1 << 30, ROWS)


@pytest.fixture(params=["c", "python"])
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    return use(request.param, monkeypatch, request)


def use(name: str, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> str:
    """csrc/swap_step.c as it is now, whatever is installed, or the oracle."""
    monkeypatch.setattr(Rank, "kind", Steps if name == "c" else PlainSteps)
    if name == "c":
        path = str(request.getfixturevalue("library_path"))
        library = step_module._open(native.SWAP_CPU._replace(path=path))
        monkeypatch.setattr(step_module, "_library", lambda: library)
    return name


class Rank:
    kind: type[Steps | PlainSteps] = Steps

    def __init__(self, last_block_only: Sequence[int] = (), **plan: int) -> None:
        self.control = np.zeros((ROWS, CELLS), np.uint64)
        self.steps = self.kind(plan_of(**plan), self.control, last_block_only)

    def plan(self, jobs: Sequence[Job], *, to_host: bool = True, block_size: int = 4) -> Step:
        return self.steps.plan(numbers_of(jobs, block_size), to_host=to_host)

    def words(self) -> list[tuple[int, int, int]]:
        """Of each row of this rank's cell: store_seq, missing, state."""
        return [(w >> STORE_SEQ_AT, w >> MISSING_AT & MAX_MISSING, w & 0xFF) for w in self.control[:, 1].tolist()]


def shown(pairs: Pairs) -> list[list[int]]:
    """Each a block and a place."""
    numbers = np.asarray(Memory(pairs.address, (8 * pairs.number,), (1,))).view(np.uint32)
    return numbers.reshape(-1, 2).tolist()  # type: ignore[no-any-return]


def pairs_of(step: Step) -> list[tuple[int, int, tuple[int, int]]]:
    """Of each job and group: block and place."""
    return [(job, group, tuple(pair)) for job, group, pairs in step.of_jobs() for pair in shown(pairs)]


@st.composite
def jobs(draw: st.DrawFn, groups: int, per_row: int) -> list[Job]:
    """Mostly as they should be."""
    made = []
    for _ in range(draw(st.integers(1, 4))):
        shares = []
        for _ in range(groups):
            rows = draw(st.lists(st.integers(0, ROWS - 1), max_size=4, unique=True))
            first = draw(st.integers(0, 2 * per_row - 1))
            how = draw(st.sampled_from(["whole", "short", "alone", "any"]))
            whole = max(0, len(rows) * per_row - first % per_row)
            count = {"whole": whole, "short": draw(st.integers(0, whole)), "alone": len(rows)}.get(
                how, draw(st.integers(0, 9))
            )
            first = per_row - 1 if how == "alone" else first
            shares.append((rows, draw(st.lists(st.integers(0, BLOCKS - 3), min_size=count, max_size=count)), first))
        job = Job(shares, draw(st.integers(1, 1 << 40)) - draw(st.integers(0, 1)))
        job.missing = draw(st.dictionaries(st.integers(0, 8), st.integers(0, per_row), max_size=2))
        wrong = draw(st.integers(0, 9))
        if wrong == 0 and shares[0][0]:
            shares[0][0][0] = draw(st.sampled_from([ROWS, 1 << 31, (1 << 32) - 1]))
        if wrong == 1 and shares[0][1]:
            shares[0][1][0] = draw(st.sampled_from([BLOCKS, -1, 2**31 - 1, -(2**31)]))
        made.append(job)
    return made


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_c_and_python_say_the_same(
    data: st.DataObject, library_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    groups, per_row, turns = (data.draw(st.integers(1, most)) for most in (3, 4, 3))
    shape = {"groups": groups, "per_row": per_row, "turns": turns, "turn": data.draw(st.integers(0, turns - 1))}
    last_only = data.draw(st.sets(st.integers(0, groups - 1)))
    step, to_host = data.draw(jobs(groups, per_row)), data.draw(st.booleans())
    block_size, failed = data.draw(st.sampled_from([4, 8])), data.draw(st.sets(st.integers(0, len(step) - 1)))
    said: list[Any] = []
    for name in ("c", "python"):
        use(name, monkeypatch, request)
        rank = Rank(tuple(last_only), **shape)
        planned = rank.plan(step, to_host=to_host, block_size=block_size)
        counts, nbytes, verdicts = planned.counts.tolist(), planned.nbytes.tolist(), planned.verdicts.tolist()
        for job in failed:
            planned.fail(job)
        rank.steps.mark(planned)
        by_group = [(group, shown(pairs)) for group, pairs in planned.of_groups()]
        said.append((counts, nbytes, verdicts, pairs_of(planned), by_group, rank.control.tolist()))
    assert said[0] == said[1]


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize(
    ("job", "verdict"),
    [
        (Job([([1, 2], [1, 2, 3], 0)]), MISMATCH),
        (Job([([1, 2, 3], [1, 2], 0)]), MISMATCH),
        (Job([([1], [], 0)]), MISMATCH),
        (Job([([1], [1], -1)]), MISMATCH),
        (Job([([ROWS], [1], 0)]), ROW_RANGE),
        (Job([([1], [BLOCKS], 0)]), BLOCK_RANGE),
        (Job([([1], [-1], 0)]), BLOCK_RANGE),
        (Job([([1], [1], 0)], missing={0: 1}), NOT_HELD),
        (Job([([1], [1], 0)], missing={1: 1}), GOOD),
    ],
)
def test_a_load_that_is_not_as_it_should_be_is_refused_alone(job: Job, verdict: int) -> None:
    good = [Job([([n], [n], 0)]) for n in range(6)]
    step = Rank().plan([*good[:3], job, *good[3:]], to_host=False)
    assert step.verdicts.tolist() == [GOOD] * 3 + [verdict] + [GOOD] * 3
    copied = [(n, 0, (at, at)) for at, n in enumerate((0, 1, 2, 4, 5, 6))]
    assert [each for each in pairs_of(step) if each[0] != 3] == copied
    assert len(pairs_of(step)) == 6 + (verdict == GOOD)


@pytest.mark.usefixtures("backend")
def test_a_copy_that_failed_fails_its_job_alone() -> None:
    rank = Rank()
    step = rank.plan([Job([([n], [n], 0)], n + 1) for n in range(3)])
    step.fail(1)
    rank.steps.mark(step)
    assert step.verdicts.tolist() == [GOOD, COPY_FAILED, GOOD]
    assert [state for _, _, state in rank.words()[:3]] == [WRITTEN, FAILED, WRITTEN]


@pytest.mark.usefixtures("backend")
def test_null_blocks_before_a_window_make_only_the_first_row_partial() -> None:
    # Chunks of 4 blocks, the first three of them null: vLLM lists 5 blocks from block 11 on.
    rank = Rank(per_row=4)
    step = rank.plan([Job([([7, 6], [1, 2, 3, 4, 5], 11)])])
    assert [place for _, _, (_, place) in pairs_of(step)] == [7 * 4 + 3, *range(6 * 4, 6 * 4 + 4)]
    rank.steps.mark(step)
    assert rank.words()[6:] == [(1, 0, WRITTEN), (1, 3, INCOMPLETE)]


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize(("blocks", "index"), [(6, 0), (6, 1), (3, 11), (9, 0), (2, 0)])
def test_blocks_missing_anywhere_else_have_unknown_positions(blocks: int, index: int) -> None:
    rank = Rank(per_row=4)
    step = rank.plan([Job([([7, 2], list(range(blocks)), index)])])
    assert (pairs_of(step), step.verdicts.tolist()) == ([], [GOOD])
    rank.steps.mark(step)
    assert [rank.words()[row][2] for row in (7, 2)] == [INCOMPLETE] * 2


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("cut", ["rows", "blocks", "numbers", "longer rows", "longer blocks", "other block size"])
def test_arrays_of_another_length_than_the_jobs_say_are_refused(cut: str) -> None:
    numbers = numbers_of([Job([([1], [2], 0)]), Job([([3], [4], 0)])])
    changed = {
        "rows": numbers._replace(rows=numbers.rows[:-4]),
        "blocks": numbers._replace(blocks=numbers.blocks[:-4]),
        "numbers": numbers._replace(numbers=numbers.numbers[:-1]),
        "longer rows": numbers._replace(rows=numbers.rows + bytes(4)),
        "longer blocks": numbers._replace(blocks=numbers.blocks + bytes(4)),
        "other block size": numbers._replace(block_size=8),
    }
    with pytest.raises(ValueError, match="not as many rows or blocks"):
        Rank().steps.plan(changed[cut], to_host=True)


@pytest.mark.usefixtures("backend")
def test_nothing_is_marked_once_the_region_is_closed() -> None:
    rank = Rank()
    step = rank.plan([Job([([1], [2], 0)])])
    rank.steps.close()
    rank.steps.mark(step)
    assert not rank.control.any()
