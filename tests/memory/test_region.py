"""The host region: what it refuses to map or to make, its control words and fingerprints, and that it goes away."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from xxhash import xxh3_64_intdigest

from nixl_tiers.base.chunk import PAGE, Geometry
from nixl_tiers.base.control_words import MAX_MISSING
from nixl_tiers.memory.cgroup import Room
from nixl_tiers.memory.memfd import CHECK
from nixl_tiers.memory.region import HostRegion
from nixl_tiers.memory.region_layout import HEADER, RegionError
from tests.support.control_words import mark_partial

GEOMETRY = Geometry(cells=3, cell_payload=PAGE + 512, sub_blocks=4)
ROWS = 5
MiB = 1 << 20


@pytest.fixture
def made() -> Iterator[HostRegion]:
    with HostRegion.create(GEOMETRY, ROWS) as made:
        yield made


def is_open(fd: int) -> bool:
    try:
        fcntl.fcntl(fd, fcntl.F_GETFD)
    except OSError:
        return False
    return True


def descriptors() -> set[str]:
    return {entry.name for entry in Path("/proc/self/fd").iterdir()}


def memfd(contents: bytes, seals: int = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW) -> int:
    fd = os.memfd_create("test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.write(fd, contents)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


def image(of: HostRegion) -> bytes:
    return os.pread(of.fd, os.fstat(of.fd).st_size, 0)


def test_its_size_cannot_change_and_its_descriptor_is_not_inherited(made: HostRegion) -> None:
    for size in (0, os.fstat(made.fd).st_size + PAGE):
        with pytest.raises(PermissionError):
            os.ftruncate(made.fd, size)
    with pytest.raises(PermissionError):
        fcntl.fcntl(made.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
    assert not os.get_inheritable(made.fd)


def test_ranks_that_share_cells_have_records_of_their_own() -> None:
    """Control words are one a cell: the rank whose turn a row is writes it."""
    with HostRegion.create(Geometry(2, 8192), ROWS, copies=3) as made, HostRegion.attach(os.dup(made.fd)) as other:
        assert (made.ranks.count, made.copies, other.ranks.count, other.copies) == (6, 3, 6, 3)
        for rank in range(6):
            made.ranks.publish(rank, bytes([rank]) * 16)
            made.ranks.publish_ready(rank, 7 - rank)
            made.ranks.publish_touched(rank, 3 + rank)
        made.ranks.publish_weights(5, changing=True)
        assert other.ranks.published() == [(bytes([rank]) * 16, "") for rank in range(6)]
        assert (other.ranks.ready_rows, other.ranks.fewest_touched) == (2, 3), "the fewest of all"
        assert other.ranks.weights == (0, 0, 0, 0, 0, 1)
        with pytest.raises(ValueError, match="rank 6 is not one of the region's 6"):
            made.ranks.publish(6, bytes(16))
        made.mark([1], 0, 7, ok=True)
        assert not other.written([1], 7).any()
        made.mark([1], 1, 7, ok=True)
        assert other.written([1], 7).all()


def header_with(made: HostRegion, **changes: int) -> bytes:
    names = ("magic", "version", "cells", "cell_payload", "sub_blocks", "rows", "ranks", "transparent", "identity")
    fields = dict(zip(names, HEADER.unpack_from(image(made)), strict=True)) | changes
    header = HEADER.pack(*fields.values())
    return header + CHECK.pack(xxh3_64_intdigest(header)) + image(made)[len(header) + 8 :]


def test_a_foreign_unsealed_or_wrongly_sized_descriptor_is_refused(made: HostRegion, tmp_path: Path) -> None:
    whole = image(made)
    file = tmp_path / "file"
    file.write_bytes(whole)
    flipped = bytearray(whole)
    flipped[20] ^= 1
    pipe, _keep = os.pipe()
    cases = {
        "not a memfd": [os.open(file, os.O_RDWR), pipe, os.open("/dev/null", os.O_RDWR)],
        "not sealed": [
            memfd(whole, 0), memfd(whole, fcntl.F_SEAL_SHRINK), memfd(whole, fcntl.F_SEAL_GROW),
        ],
        "not a region": [memfd(b""), memfd(b"x"), memfd(bytes(len(whole))), memfd(bytes(flipped))],
        "has .* bytes": [memfd(whole[:-PAGE]), memfd(whole + bytes(PAGE)), memfd(whole[: 2 * PAGE])],
        "version 1": [memfd(header_with(made, version=1))],
        "3 cells for": [memfd(header_with(made, ranks=ranks)) for ranks in (0, 2, 4)],
        "impossible geometry": [
            memfd(header_with(made, cells=0)), memfd(header_with(made, sub_blocks=5)),
        ],
        "its header needs": [
            memfd(header_with(made, rows=0)), memfd(header_with(made, rows=ROWS + 1)),
            memfd(header_with(made, rows=1 << 63)), memfd(header_with(made, cell_payload=1 << 40)),
            memfd(header_with(made, ranks=6000)),
        ],
        "cannot map": [memfd(whole, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE)],
    }  # fmt: skip
    for message, fds in cases.items():
        for fd in fds:
            with pytest.raises(RegionError, match=message):
                HostRegion.attach(fd)
            assert not is_open(fd)
    os.close(_keep)
    with pytest.raises(RegionError):
        HostRegion.attach(pipe)
    with HostRegion.attach(memfd(whole)) as fine:
        assert fine.rows == ROWS


def test_a_region_larger_than_the_memory_is_refused() -> None:
    with HostRegion.create(GEOMETRY, ROWS) as made:
        total = os.fstat(made.fd).st_size
    wide, narrow = Room("the machine", 1 << 50), Room("the memory cgroup /pod", total - 1, total * 2)
    before = descriptors()
    with pytest.raises(RegionError, match=r"the memory cgroup /pod has 0\.00 GiB left of its limit of 0\.00 GiB"):
        HostRegion.create(GEOMETRY, ROWS, [wide, narrow])
    with pytest.raises(RegionError, match="the machine has"):
        HostRegion.create(GEOMETRY, ROWS, [Room("the machine", 0)])
    assert descriptors() <= before
    HostRegion.create(GEOMETRY, ROWS, [wide, Room("the memory cgroup /pod", total)]).close()


def test_an_impossible_size_is_refused_in_a_sentence() -> None:
    with pytest.raises(RegionError, match="at least one row"):
        HostRegion.create(GEOMETRY, 0)
    before = descriptors()
    with pytest.raises(RegionError, match="cannot make a region of"):
        HostRegion.create(GEOMETRY, 1 << 48, [])
    assert descriptors() <= before


def test_a_row_is_written_when_every_cell_has_that_store_seq(made: HostRegion) -> None:
    rows = np.array([4, 1, 2])
    assert not made.written(rows, 0).any()
    made.mark(rows, 0, 7, ok=True)
    made.mark(rows, 1, 7, ok=True)
    assert made.written(rows, 7).tolist() == [False, False, False]
    made.mark(rows[[0, 2]], 2, 7, ok=True)
    made.mark(rows[1:2], 2, 7, ok=False)
    assert made.written(rows, 7).tolist() == [True, False, True]
    assert made.written(np.array([0, 1, 2, 3, 4]), 7).tolist() == [False, False, True, False, True]
    assert not made.written(rows, 6).any()
    assert not made.written(rows, 8).any()
    assert made.written(np.array([], np.int64), 7).tolist() == []


def test_a_late_word_of_an_old_job_is_never_taken_for_the_new_one(made: HostRegion) -> None:
    for cell in range(3):
        made.mark([0, 1], cell, 8, ok=True)
    made.mark([0], 1, 7, ok=True)
    assert made.written([0, 1], 8).tolist() == [False, True]
    made.mark([1], 2, 8, ok=False)
    assert made.written([0, 1], 8).tolist() == [False, False]


def test_a_row_lacks_what_any_of_its_cells_lacks(made: HostRegion) -> None:
    for cell, missing in enumerate((0, 2, 1)):
        mark_partial(made, [0], cell, 5, missing)
        made.mark([1], cell, 5, ok=True)
    assert made.written([0, 1], 5).tolist() == [True, True]
    assert made.missing([0, 1]).tolist() == [2, 0]
    mark_partial(made, [0], 1, 5, MAX_MISSING)
    assert made.written([0], 5).all()
    assert made.missing([0]).tolist() == [MAX_MISSING]
    assert made.missing(np.array([], np.int64)).tolist() == []


def test_a_half_written_fingerprint_is_not_read(made: HostRegion) -> None:
    made.ranks.publish(1, b"a" * 16, "a note")
    at = PAGE + 512
    for offset in (0, 8, 10, 25, 30):
        byte = made._map[at + offset]
        made._map[at + offset] = byte ^ 0x55
        assert made.ranks.published()[1] is None, offset
        made._map[at + offset] = byte
    assert made.ranks.published()[1] == (b"a" * 16, "a note")


def test_close_releases_everything_and_may_be_repeated() -> None:
    before = descriptors()
    made = HostRegion.create(GEOMETRY, ROWS)
    address = f"{made.address:x}-"
    calls: list[int] = []
    made.at_close(lambda: calls.append(made.fd))
    fd = made.fd
    made.close()
    made.close()
    assert calls == [fd]
    assert descriptors() <= before
    assert address not in Path("/proc/self/maps").read_text()
    assert made.rows_view.shape == (0, GEOMETRY.row_bytes)
    with pytest.raises(IndexError):
        made.mark([0], 0, 1, ok=True)


def test_core_dumps_leave_it_out(made: HostRegion) -> None:
    """They would hold gigabytes of prompts."""
    of_the_region = Path("/proc/self/smaps").read_text().partition("/memfd:nixl_tiers (deleted)")[2]
    assert " dd " in next(line for line in of_the_region.split("\n") if line.startswith("VmFlags:"))


def test_each_ranks_changes_of_weights_are_seen_by_other_processes(made: HostRegion) -> None:
    other = HostRegion.attach(os.dup(made.fd))
    made.ranks.publish(0, b"fingerprint, 16b", "note" * 100)
    assert other.ranks.weights == (0,) * made.geometry.cells
    made.ranks.publish_weights(0, changing=False)
    assert other.ranks.weights[0] == 0, "none has begun"
    made.ranks.publish_weights(0, changing=True)
    made.ranks.publish_weights(0, changing=True)
    assert other.ranks.weights[0] == 1
    made.ranks.publish_weights(0, changing=False)
    assert other.ranks.weights == (2, *(0,) * (made.geometry.cells - 1))
    assert other.ranks.published()[0] == (b"fingerprint, 16b", "note" * 100)
    other.close()
    other.ranks.publish_weights(0, changing=True)  # a worker that is shut down: its caller must not fail
    assert made.ranks.weights[0] == 2
