"""What the doctor looks at in a file tier's directory. Runs in a child, because any call may hang with its file system.

Nothing is written beside an engine that holds the directory. Otherwise everything that is written goes into a scratch
directory below it, a tier of its own: rows of engines are neither counted anew nor evicted.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from nixl_tiers.base.chunk import Geometry
from nixl_tiers.base.mounts import device_of, file_systems, is_on_root, memory_at, nearest
from nixl_tiers.cli.checks.finding import Finding, advise, broken, not_tried, ok, warning
from nixl_tiers.cli.checks.trial import NAME, ROW, SCRATCH, SCRATCH_PREFIX, STALE_S, rows_of, write_read_verify
from nixl_tiers.cli.children import say
from nixl_tiers.cli.disk_room import DiskRoom, used_bytes
from nixl_tiers.config.errors import ConfigError
from nixl_tiers.config.fields import format_size
from nixl_tiers.config.file import FileConfig
from nixl_tiers.tiers.disk import direct_works, other_layout
from nixl_tiers.tiers.folder import Folder
from nixl_tiers.tiers.slab.parts import LOCK, part_number

ROWS: Final = 64


def examine(config: FileConfig, token: str, geometry: Geometry = ROW) -> Iterator[Finding]:
    """`token`: names the scratch directory, which `clean` removes if this is killed. `geometry`: of the rows
    that are tried."""
    say(at=f"looking at {config.path}")
    try:
        config.check_here(starting=False)
    except ConfigError as error:
        change = "mount the disk" if "require_mount" in str(error) else "give the engine's user a directory to write to"
        yield broken("directory", str(error).removeprefix("path: "), change)
        return
    parent = nearest(config.path)
    yield from _file_system(config, parent)
    if problem := other_layout(config):
        yield broken("layout", problem, "give the tier a directory of its own, or the layout that is there")
        return
    if config.write == "off":
        yield not_tried(NAME, "`write` is off, so nothing is written here")
        return
    if holders := parts_in_use(config.path):
        yield not_tried(
            NAME,
            f"{holders}: nothing was written here",
            "for a trial stop the engine, or name another path on this disk",
        )
        return
    used, all_of_it = used_bytes(config.path)
    if not all_of_it:
        yield not_tried(NAME, f"{config.path} holds so much that a trial might exceed the capacity")
        return
    if used + rows_of(geometry, ROWS) * geometry.row_bytes > config.capacity:
        yield not_tried(NAME, f"{format_size(used)} of {format_size(config.capacity)} are used, too much for a trial")
        return
    yield from _trial(config, parent, token, geometry)


def clean(config: FileConfig, token: str) -> None:
    """Remove the scratch directory, and those that killed doctors have left."""
    parent = nearest(config.path)
    for scratch in parent.glob(f"{SCRATCH_PREFIX}*"):
        own = scratch.name == f"{SCRATCH_PREFIX}{token}"
        if own or (SCRATCH.fullmatch(scratch.name) and time.time() - scratch.lstat().st_mtime > STALE_S):
            shutil.rmtree(scratch, ignore_errors=True)


def parts_in_use(path: Path) -> str:
    """Which parts of a directory with `layout: slabs` an engine holds, in words, or "". Reads only. Raises OSError."""
    held = []
    for part in sorted(path.glob("part-*")):
        if part_number(part.name) is None:
            continue
        try:
            lock = os.open(part / LOCK, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except FileNotFoundError:
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                raise
            held.append(part.name)
        finally:
            os.close(lock)
    return f"an engine uses {path} ({', '.join(held)})" if held else ""


def _file_system(config: FileConfig, parent: Path) -> Iterator[Finding]:
    disk = DiskRoom.of(config)
    kind = file_systems().get(device_of(parent), "unknown")
    made = ", on the root file system" if is_on_root(config.path) else ""
    made += "" if config.path == parent else f"; {config.path} is created at startup"
    text = f"{kind}, {format_size(disk.size)}, {format_size(disk.free)} free"
    facts = {
        "file_system": kind, "size_bytes": disk.size, "free_bytes": disk.free, "min_free_bytes": disk.min_free,
    }  # fmt: skip
    if kind == "overlay":
        change = "mount a disk there: rows on a container's own layer end with the container, and are slower"
        yield warning("file system", text + made, change, **facts)
    elif change := disk.shortage(config.capacity):
        text += f", too little for the capacity of {format_size(config.capacity)}"
        yield warning("file system", text + made, change, **facts)
    else:
        yield ok("file system", text + made, **facts)


def _trial(config: FileConfig, parent: Path, token: str, geometry: Geometry) -> Iterator[Finding]:
    say(at=f"writing to {parent}")
    clean(config, "-none")
    scratch, rows = parent / f"{SCRATCH_PREFIX}{token}", rows_of(geometry, ROWS)
    try:
        with Folder.base(parent):  # whether others can write to what is made here
            scratch.mkdir(mode=0o700)
        with Folder.base(scratch) as folder:
            direct = direct_works(folder)
        if memory_at(scratch):
            pass  # it is the page cache, whatever the kernel says of O_DIRECT
        elif direct:
            yield ok("O_DIRECT", "works: rows go past the page cache")
        else:
            change = "a file system that has it (ext4, xfs): rows fill the page cache, and are copied once more"
            yield advise("O_DIRECT", "is refused by this file system", change)
        fills = 128 if config.layout == "files" else 2  # files are counted anew after a 64th
        own = {"path": scratch, "capacity": fills * rows * geometry.row_bytes, "require_mount": False}
        yield write_read_verify(config.model_copy(update=own), rows, geometry)
    except OSError as error:
        yield broken(NAME, f"{error.strerror or error} ({parent})", "give the engine's user a directory to write to")
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
