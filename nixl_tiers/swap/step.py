"""What a step's jobs copy, and what became of it, by row and by block: one call of C (csrc/swap_step.c) for all jobs of
a direction, and one that marks the rows of all stores."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Collection, Iterator
from functools import cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from nixl_tiers.base import native
from nixl_tiers.swap.plan import CopyPlan
from nixl_tiers.swap.problems import COPY_FAILED, UNEQUAL

_P, _U64, _B = ctypes.c_void_p, ctypes.c_uint64, ctypes.c_char_p


class _Group(ctypes.Structure):
    _fields_ = (("blocks", _U64), ("block_bytes", _U64), ("last_block_only", _U64))


class _Layout(ctypes.Structure):
    _fields_ = (
        ("groups", _P), ("n_groups", _U64), ("rows", _U64), ("sub_blocks", _U64), ("turn", _U64), ("turns", _U64),
        ("control", _P), ("cells", _U64),
    )  # fmt: skip


class _Jobs(ctypes.Structure):
    _fields_ = (
        ("numbers", _B), ("n_numbers", _U64), ("n_jobs", _U64), ("rows", _B), ("blocks", _B), ("n_rows", _U64),
        ("n_blocks", _U64), ("block_size", _U64),
    )  # fmt: skip


class _Plan(ctypes.Structure):
    _fields_ = (("pairs", _P), ("counts", _P), ("nbytes", _P), ("verdicts", _P))


@cache
def _library() -> ctypes.CDLL:
    """Its calls take microseconds, and keep the interpreter's lock: to have it back could take milliseconds."""
    return _open(native.SWAP_CPU)


def _open(library: native.Library) -> ctypes.CDLL:
    found = native.opened(library, keeps_lock=True)
    found.nixl_tiers_step_plan.restype = ctypes.c_int64
    found.nixl_tiers_step_plan.argtypes = [_P, _P, ctypes.c_int, _P]
    found.nixl_tiers_step_mark.argtypes = [_P, _P, _P]
    return found


class Numbers(NamedTuple):
    """All jobs of a step, as `step_jobs` of swap_step.c says. `rows`: 32-bit numbers; `blocks`: of `block_size` bytes,
    4 or 8, signed."""

    jobs: int
    numbers: array[int]
    rows: bytes
    blocks: bytes
    block_size: int = 4

    @classmethod
    def of_nothing(cls, jobs: int, groups: int) -> Numbers:
        """Jobs of which nothing is known, which is their verdict."""
        return cls(jobs, array("q", (0, 0, 0, 0, *(-1, 0, 0) * groups) * jobs), b"", b"")


class Pairs(NamedTuple):
    """Pairs (block, place) of one transfer: two 32-bit numbers each."""

    address: int
    number: int
    memory: object  # keeps them

    @classmethod
    def of(cls, pairs: NDArray[np.uint32]) -> Pairs:
        pairs = np.ascontiguousarray(pairs)
        return cls(pairs.ctypes.data, len(pairs), pairs)


class Step:
    """Jobs of a direction that are planned together. Of each job: `counts`, for each group, how many pairs; `nbytes`;
    `verdicts`, of problems.py."""

    def __init__(self, numbers: Numbers, groups: int) -> None:
        self.numbers = numbers
        self.groups = groups
        self.n_blocks = len(numbers.blocks) // numbers.block_size
        self.pairs = array("Q", bytes(8 * self.n_blocks))
        self.counts = array("Q", bytes(8 * numbers.jobs * groups))
        self.nbytes = array("Q", bytes(8 * numbers.jobs))
        self.verdicts = array("Q", bytes(8 * numbers.jobs))
        self.raw = _Jobs(
            numbers.numbers.tobytes(), len(numbers.numbers), numbers.jobs, numbers.rows, numbers.blocks,
            len(numbers.rows) // 4, self.n_blocks, numbers.block_size,
        )  # fmt: skip

    def fail(self, job: int) -> None:
        """Its copy has failed."""
        self.verdicts[job] = self.verdicts[job] or COPY_FAILED

    def of_groups(self) -> Iterator[tuple[int, Pairs]]:
        """All jobs' pairs of each group that has any."""
        address = self.pairs.buffer_info()[0]
        for group in range(self.groups):
            if count := sum(self.counts[group :: self.groups]):
                yield group, Pairs(address, count, self.pairs)
                address += 8 * count

    def of_jobs(self) -> Iterator[tuple[int, int, Pairs]]:
        """Each job's pairs of each group: job, group, pairs."""
        address = self.pairs.buffer_info()[0]
        for group in range(self.groups):
            for job in range(self.numbers.jobs):
                if count := self.counts[job * self.groups + group]:
                    yield job, group, Pairs(address, count, self.pairs)
                    address += 8 * count


class Steps:
    """Plans the steps of one rank. `control`: uint64 (rows, cells), the region's; `close` it before it is unmapped."""

    def __init__(self, plan: CopyPlan, control: NDArray[np.uint64], last_block_only: Collection[int] = ()) -> None:
        """Raises NotBuilt."""
        self._library = _library()
        last = [group in last_block_only for group in range(len(plan.groups))]
        self._control: NDArray[np.uint64] | None = control[:, plan.share.cell]
        groups = (_Group * len(plan.groups))(
            *(_Group(group.blocks, group.block_bytes, only) for group, only in zip(plan.groups, last, strict=True))
        )
        self._keep = groups
        self._layout = _Layout(
            ctypes.addressof(groups), len(groups), plan.rows, plan.geometry.sub_blocks, plan.share.turn,
            plan.share.turns, self._control.ctypes.data, control.shape[1],
        )  # fmt: skip
        self._at = ctypes.addressof(self._layout)

    def close(self) -> None:
        """From now on nothing is marked."""
        self._control = self._layout.control = None

    def plan(self, numbers: Numbers, *, to_host: bool) -> Step:
        """ValueError where there are not as many rows or blocks as the jobs say; what is wrong with one job only is its
        verdict."""
        step = Step(numbers, len(self._keep))
        out = _Plan(
            step.pairs.buffer_info()[0], step.counts.buffer_info()[0], step.nbytes.buffer_info()[0],
            step.verdicts.buffer_info()[0],
        )  # fmt: skip
        raw = ctypes.byref(step.raw)
        if self._library.nixl_tiers_step_plan(self._at, raw, to_host, ctypes.byref(out)) < 0:
            raise ValueError(UNEQUAL)
        return step

    def mark(self, step: Step) -> None:
        """Say in the control words of the stores' rows what became of them. Nothing once the region is closed."""
        verdicts = step.verdicts.buffer_info()[0]
        self._library.nixl_tiers_step_mark(self._at, ctypes.byref(step.raw), verdicts)
