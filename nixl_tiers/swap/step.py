"""What a step's jobs copy, and what became of it, by row and by block: one call of C (csrc/swap_step.c) for all jobs of
a direction, and one that marks the rows of all stores. Where C was not built, the same in Python."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Collection, Iterator, Sequence
from functools import cache
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from nixl_tiers.base import native
from nixl_tiers.swap.plan import CopyPlan
from nixl_tiers.swap.problems import COPY_FAILED, UNEQUAL
from nixl_tiers.swap.step_plain import Plain

ABI: Final = 2  # SWAP_ABI of csrc/swap_cpu.c

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
def _library() -> ctypes.PyDLL | None:
    """Its calls take microseconds, and keep the interpreter's lock: to have it back could take milliseconds."""
    return _open(native.location("nixl_tiers.swap._swap_cpu"))


def _open(path: str | None) -> ctypes.PyDLL | None:
    library = native.opened(path, "nixl_tiers_swap_abi", ABI, keeps_lock=True)
    if library is not None:
        library.nixl_tiers_step_plan.restype = ctypes.c_int64
        library.nixl_tiers_step_plan.argtypes = [_P, _P, ctypes.c_int, _P]
        library.nixl_tiers_step_mark.argtypes = [_P, _P, _P]
    return library


class Numbers(NamedTuple):
    """All jobs of a step, as `step_jobs` of swap_step.c says. `rows`: 32-bit numbers; `blocks`: of `block_size` bytes,
    4 or 8, signed."""

    jobs: int
    numbers: array[int]
    rows: bytes
    blocks: bytes
    block_size: int

    @classmethod
    def joined(
        cls, numbers: Sequence[int], rows: Sequence[bytes], blocks: Sequence[NDArray[np.signedinteger]]
    ) -> Numbers:
        """Of each job `rows` and `blocks`."""
        return cls(len(rows), array("q", numbers), b"".join(rows), b"".join(blocks), blocks[0].itemsize)

    @classmethod
    def of_nothing(cls, jobs: int, groups: int) -> Numbers:
        """Jobs of which nothing is known, which is their verdict."""
        return cls(jobs, array("q", (0, 0, 0, 0, *(-1, 0, 0) * groups) * jobs), b"", b"", 4)


class Pairs(NamedTuple):
    """Pairs (block, place) of one transfer: two 32-bit numbers each."""

    address: int
    count: int
    memory: object  # keeps them

    @classmethod
    def of(cls, pairs: NDArray[np.uint32]) -> Pairs:
        pairs = np.ascontiguousarray(pairs)
        return cls(pairs.ctypes.data, len(pairs), pairs)

    def view(self) -> NDArray[np.uint32]:
        """(count, 2)."""
        raw = (ctypes.c_uint32 * (2 * self.count)).from_address(self.address)
        return np.frombuffer(raw, np.uint32).reshape(-1, 2)


class Step:
    """Jobs of a direction that are planned together."""

    def __init__(self, steps: Steps, numbers: Numbers, groups: int) -> None:
        self.numbers = numbers
        self._steps = steps
        self._groups = groups
        self.n_blocks = len(numbers.blocks) // numbers.block_size
        at = self.n_blocks + numbers.jobs * groups
        self._slices = slice(self.n_blocks, at), slice(at, at + numbers.jobs), slice(at + numbers.jobs, None)
        self.plan = array("Q", bytes(8 * (at + 2 * numbers.jobs)))  # pairs, counts, nbytes, verdicts

    @property
    def counts(self) -> array[int]:
        """Of each job, of each group: how many pairs."""
        return self.plan[self._slices[0]]

    @property
    def nbytes(self) -> array[int]:
        return self.plan[self._slices[1]]

    @property
    def verdicts(self) -> array[int]:
        return self.plan[self._slices[2]]

    def fail(self, job: int) -> None:
        """Its copy has failed."""
        at = self._slices[2].start + job
        self.plan[at] = self.plan[at] or COPY_FAILED

    def of_groups(self) -> Iterator[tuple[int, Pairs]]:
        """All jobs' pairs of each group that has any."""
        address, counts = self.plan.buffer_info()[0], self.counts
        for group in range(self._groups):
            if count := sum(counts[group :: self._groups]):
                yield group, Pairs(address, count, self.plan)
                address += 8 * count

    def of_jobs(self) -> Iterator[tuple[int, int, Pairs]]:
        """Each job's pairs of each group: job, group, pairs."""
        address, counts = self.plan.buffer_info()[0], self.counts
        for group in range(self._groups):
            for job in range(self.numbers.jobs):
                if count := counts[job * self._groups + group]:
                    yield job, group, Pairs(address, count, self.plan)
                    address += 8 * count

    def mark(self) -> None:
        """Say in the control words of the stores' rows what became of them. Nothing once the region is closed."""
        self._steps.mark(self)


class Steps:
    """Plans the steps of one rank. `control`: uint64 (rows, cells), the region's; `close` it before it is unmapped."""

    def __init__(self, plan: CopyPlan, control: NDArray[np.uint64], last_block_only: Collection[int] = ()) -> None:
        self._library = _library()
        last = [group in last_block_only for group in range(len(plan.groups))]
        self._plain = Plain(plan, last)
        self._control: NDArray[np.uint64] | None = control[:, plan.share.cell]
        groups = (_Group * len(plan.groups))(
            *((group.blocks, group.block_bytes, only) for group, only in zip(plan.groups, last, strict=True))
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
        step = Step(self, numbers, len(self._keep))
        if self._library is None:
            self._plain.plan(step, to_host=to_host)
            return step
        address, counts, nbytes = step.plan.buffer_info()[0], step._slices[0].start, step._slices[1].start
        out = _Plan(address, address + 8 * counts, address + 8 * nbytes, address + 8 * (nbytes + numbers.jobs))
        if self._library.nixl_tiers_step_plan(self._at, self._jobs(step), to_host, ctypes.byref(out)) < 0:
            raise ValueError(UNEQUAL)
        return step

    def mark(self, step: Step) -> None:
        if self._library is not None:
            address = step.plan.buffer_info()[0] + 8 * step._slices[2].start
            self._library.nixl_tiers_step_mark(self._at, self._jobs(step), address)
        elif self._control is not None:
            self._plain.mark(step, self._control)

    @staticmethod
    def _jobs(step: Step) -> object:
        numbers = step.numbers
        return ctypes.byref(
            _Jobs(
                numbers.numbers.tobytes(), len(numbers.numbers), numbers.jobs, numbers.rows, numbers.blocks,
                len(numbers.rows) // 4, step.n_blocks, numbers.block_size,
            )
        )  # fmt: skip
