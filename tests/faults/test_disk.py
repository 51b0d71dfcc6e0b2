"""Disks that are full, broken, read-only, slow, or gone; and clocks that jump."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.faults.arena import PATIENCE_S, Arena
from tests.faults.interposer import Interposer
from tests.faults.test_mover import matrix
from tests.support.disks import run, tmpfs
from tests.support.waiting import until

pytestmark = pytest.mark.timeout(900)

LAYOUTS = ("slabs", "files")
FAULTS: dict[str, Callable[[Interposer], None]] = {
    "disk full": Interposer.full,
    "disk broken (EIO)": Interposer.broken,
    "disk read-only": Interposer.read_only,
    "disk slow (50 ms an I/O)": lambda disk: disk.slow(0.05),
    "disk hangs (5 s an I/O)": lambda disk: disk.slow(5.0),
}
ORDINARY: set[tuple[str, ...]] = {
    ("disk full", "slabs"),
    ("disk broken (EIO)", "slabs"),
    ("disk read-only", "files"),
}


@pytest.mark.parametrize(("fault", "layout"), matrix(tuple(FAULTS), LAYOUTS, ordinary=ORDINARY))
def test_a_disk_that_fails(on_file: Callable[..., Arena], disk: Interposer, fault: str, layout: str) -> None:
    arena = on_file(fault, layout)
    with arena.under_load() as load:
        arena.go_on()
        struck = disk.struck
        FAULTS[fault](disk)
        if "EIO" in fault or "full" in fault or "read-only" in fault:
            until(lambda: disk.struck > struck or load.seen.errors, "the disk to be asked", PATIENCE_S)
        arena.go_on(40)
        disk.well()
        arena.over()
        arena.heals()


@pytest.mark.parametrize("layout", [pytest.param("slabs"), pytest.param("files", marks=pytest.mark.faults)])
def test_a_disk_that_is_broken_from_the_start(on_file: Callable[..., Arena], disk: Interposer, layout: str) -> None:
    arena = on_file("disk broken (EIO), from the start", layout)
    disk.broken()
    with arena.under_load(warm=False):
        arena.go_on(20)
        disk.well()
        arena.over()
        arena.heals()


@pytest.mark.parametrize("layout", [pytest.param("slabs", marks=pytest.mark.faults), pytest.param("files")])
def test_a_directory_that_is_deleted(on_file: Callable[..., Arena], tmp_path: Path, layout: str) -> None:
    arena = on_file("directory deleted", layout)
    with arena.under_load():
        arena.go_on()
        shutil.rmtree(tmp_path / "kv", ignore_errors=True)
        arena.over()
        arena.go_on(20)
        arena.heals()


@pytest.mark.faults
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_disk_that_is_really_full(on_file: Callable[..., Arena], tmp_path: Path, layout: str) -> None:
    """A tmpfs of less room than the tier's capacity, where one can be mounted."""
    place = tmp_path / "kv"
    place.mkdir()
    with tmpfs(place, "8m"):
        arena = on_file("disk full (8 MiB tmpfs)", layout)
        with arena.under_load():
            arena.go_on(60)
            assert run("mount", "-o", "remount,size=64m", place)
            arena.over()
            arena.heals()


@pytest.mark.parametrize(
    ("by", "tier"),
    matrix(("a day ahead", "a day back"), ("slabs", "files", "s3"), ordinary={("a day back", "files")}),
)
def test_a_wall_clock_that_jumps(
    on_tier: Callable[..., Arena], disk: Interposer, monkeypatch: pytest.MonkeyPatch, by: str, tier: str
) -> None:
    """In the mover and in the engine. Deadlines go by another clock."""
    arena = on_tier(f"clock jumps {by}", tier)
    offset_s = 86400 if by == "a day ahead" else -86400
    really = time.time
    with arena.under_load():
        arena.go_on()
        monkeypatch.setattr(time, "time", lambda: really() + offset_s)
        disk.move_clock(offset_s)
        arena.go_on(40)
        arena.heals()
        disk.well()
        monkeypatch.setattr(time, "time", really)
        arena.go_on(10)
