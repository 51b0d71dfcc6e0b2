"""Before a file tier is up, and while it is: what a disk must take, what others may have put below a path, and that
nothing is made where the path has come to lead to another directory."""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from nixl_tiers.base.log_once import LogOnce
from nixl_tiers.tiers import disk
from nixl_tiers.tiers.base import TierDown
from nixl_tiers.tiers.disk import MountGuard, prepare_path
from nixl_tiers.tiers.folder import Folder, NotOwned
from nixl_tiers.tiers.slab.shards import Shards
from tests.support.file_tier import file_config


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Folder]:
    path = tmp_path / "kv"
    path.mkdir()
    with Folder.base(path) as folder:
        yield folder


# --- what its layout needs: a mount that is no disk takes some of it --------------------------------------------------


def failing(error: int) -> Callable[..., Any]:
    def fail(*_: object, **__: object) -> None:
        raise OSError(error, os.strerror(error))

    return fail


FAULTS: dict[str, Callable[[pytest.MonkeyPatch, int], None]] = {
    "allocated": lambda patch, error: patch.setattr(disk, "fallocate", lambda *_: error),
    "written": lambda patch, error: patch.setattr(os, "pwritev", failing(error)),
    "renamed": lambda patch, error: patch.setattr(os, "rename", failing(error)),
    "read back": lambda patch, error: patch.setattr(os, "preadv", failing(error)),
}


@pytest.mark.parametrize("step", FAULTS)
def test_what_does_not_work_is_named_and_a_full_disk_is_up(
    folder: Folder, step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        FAULTS[step](patch, errno.ENOSYS)
        with pytest.raises(TierDown, match=rf"^{folder.path} .* no file can be {step} \(Function not implemented\)$"):
            disk.try_out(folder, direct=False, in_place=True)
    assert folder.names() == []
    for error in (errno.ENOSPC, errno.EDQUOT):
        with monkeypatch.context() as patch:
            FAULTS[step](patch, error)
            disk.try_out(folder, direct=False, in_place=True)
        assert folder.names() == []


def test_only_slabs_write_in_the_middle(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mount of a bucket writes a file once, from its beginning."""
    write = os.pwritev

    def only_once(descriptor: int, buffers: list[Any], offset: int) -> int:
        return failing(errno.EINVAL)() if offset else write(descriptor, buffers, offset)

    monkeypatch.setattr(os, "pwritev", only_once)
    disk.try_out(folder, direct=True, in_place=False)
    with pytest.raises(TierDown, match=r"no file can be written in the middle \(Invalid argument\)$"):
        disk.try_out(folder, direct=False, in_place=True)


def test_other_bytes_than_were_written(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "_read", lambda *_: np.zeros(3 * disk.PAGE, np.uint8))
    with pytest.raises(TierDown, match=r"no file can be read back \(it holds something else\)$"):
        disk.try_out(folder, direct=False, in_place=True)
    assert folder.names() == []


# --- what is another user's, or may be changed by others --------------------------------------------------------------


def writable(place: Path, _: Path) -> None:
    place.write_bytes(b"")
    place.chmod(0o620)


FILES: list[tuple[Callable[[Path, Path], object], str]] = [
    (Path.symlink_to, "is no file"),
    (Path.hardlink_to, "has other names"),
    (writable, r"can be written to by others \(mode 0620\)"),
    (lambda place, _: os.mkfifo(place), "is no file"),
]


@pytest.mark.parametrize(("prepare", "why"), FILES)
def test_what_others_may_have_put_there_is_refused(
    folder: Folder, tmp_path: Path, prepare: Callable[[Path, Path], object], why: str
) -> None:
    precious = tmp_path / "precious"
    precious.write_bytes(b"precious")
    prepare(folder.path / ".ledger", precious)
    with pytest.raises(NotOwned, match=f"^path: .*ledger {why}: remove it"):
        folder.open(".ledger", os.O_RDWR | os.O_CREAT)
    assert precious.read_bytes() == b"precious"


@pytest.mark.parametrize(("mode", "used"), [(0o700, True), (0o755, True), (0o770, False), (0o702, False), (0, False)])
def test_directory_is_used_only_if_nobody_else_can_write_to_it(folder: Folder, mode: int, used: bool) -> None:
    """`mode` 0: a link to a good one."""
    place = folder.path / "part-0"
    if mode:
        place.mkdir()
        place.chmod(mode)
    else:
        (folder.path / "elsewhere").mkdir(mode=0o700)
        place.symlink_to("elsewhere")
    assert folder.has_folder("part-0") is used
    if used:
        folder.folder("part-0", make=True).close()
    else:
        with pytest.raises(NotOwned, match=r"^path: .*part-0 "):
            folder.folder("part-0", make=True)


def test_what_belongs_to_another_user_is_refused(folder: Folder) -> None:
    (folder.path / "part-0").mkdir(mode=0o700)
    (folder.path / ".ledger").touch(mode=0o600)
    folder.uid += 1  # as if that were this process's
    with pytest.raises(NotOwned, match=f"belongs to user {folder.uid - 1}"):
        folder.folder("part-0")
    with pytest.raises(NotOwned, match=f"belongs to user {folder.uid - 1}"):
        folder.open(".ledger", os.O_RDWR)


# --- another directory, as after an unmount ---------------------------------------------------------------------------


def replace(path: Path) -> None:
    """What the directory below the mount point looks like to a process that goes by the path."""
    path.rename(path.with_name("elsewhere"))
    path.mkdir()


def test_slabs_grow_only_in_the_directory_that_was_opened(tmp_path: Path) -> None:
    path = tmp_path / "kv"
    path.mkdir()
    quota = Shards(path, 1 << 30)
    with quota.locked():
        pass
    replace(path)
    with pytest.raises(OSError, match="is not the directory that was opened"), quota.locked():
        pass
    assert list(path.iterdir()) == []


def test_path_whose_mount_has_gone_is_down_and_nothing_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mounted = [tmp_path]
    monkeypatch.setattr(disk, "is_mount", lambda path: path in (*mounted, Path("/")))
    config, tier, log = file_config(tmp_path / "kv", 1 << 20), Mock(mount_point=b""), LogOnce(logging.getLogger())
    prepare_path(config, MountGuard(tier), log)
    MountGuard(tier).remember(config.path)
    config.path.rmdir()
    mounted.clear()
    with pytest.raises(TierDown, match=f"^{tmp_path} is not mounted any more$"):
        prepare_path(config, MountGuard(tier), log)
    assert not config.path.exists()
    mounted.append(tmp_path)
    prepare_path(config, MountGuard(tier), log)
