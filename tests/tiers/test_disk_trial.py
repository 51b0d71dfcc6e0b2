"""Before a file tier is up, it does once all that its layout needs: a mount that is no disk takes some of it."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nixl_tiers.tiers import disk
from nixl_tiers.tiers.base import TierDown
from nixl_tiers.tiers.folder import Folder


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Folder]:
    with Folder.base(tmp_path) as folder:
        yield folder


def failing(error: int) -> Callable[..., Any]:
    def fail(*_: object, **__: object) -> None:
        raise OSError(error, os.strerror(error))

    return fail


def only_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a mount of a bucket writes."""
    write = os.pwritev

    def pwritev(descriptor: int, buffers: list[Any], offset: int) -> int:
        return failing(errno.EINVAL)() if offset else write(descriptor, buffers, offset)

    monkeypatch.setattr(os, "pwritev", pwritev)


FAULTS: dict[str, Callable[[pytest.MonkeyPatch, int], None]] = {
    "allocated": lambda patch, error: patch.setattr(disk, "fallocate", lambda *_: error),
    "written": lambda patch, error: patch.setattr(os, "pwritev", failing(error)),
    "renamed": lambda patch, error: patch.setattr(os, "rename", failing(error)),
    "read back": lambda patch, error: patch.setattr(os, "preadv", failing(error)),
}


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("in_place", [True, False])
def test_disk_passes_and_nothing_is_left(folder: Folder, direct: bool, in_place: bool) -> None:
    disk.try_out(folder, direct=direct, in_place=in_place)
    assert folder.names() == []


@pytest.mark.parametrize("step", FAULTS)
def test_what_does_not_work_is_named(folder: Folder, step: str, monkeypatch: pytest.MonkeyPatch) -> None:
    FAULTS[step](monkeypatch, errno.ENOSYS)
    with pytest.raises(TierDown, match=rf"^{folder.path} .* no file can be {step} \(Function not implemented\)$"):
        disk.try_out(folder, direct=False, in_place=True)
    assert folder.names() == []


@pytest.mark.parametrize("step", FAULTS)
@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EDQUOT])
def test_full_disk_is_up_and_serves_its_rows(
    folder: Folder, step: str, error: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    FAULTS[step](monkeypatch, error)
    disk.try_out(folder, direct=False, in_place=True)
    assert folder.names() == []


def test_only_slabs_write_in_the_middle(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    only_once(monkeypatch)
    disk.try_out(folder, direct=False, in_place=False)
    with pytest.raises(TierDown, match=r"no file can be written in the middle \(Invalid argument\)$"):
        disk.try_out(folder, direct=False, in_place=True)


def test_other_bytes_than_were_written(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "_read", lambda *_: np.zeros(3 * disk.PAGE, np.uint8))
    with pytest.raises(TierDown, match=r"no file can be read back \(it holds something else\)$"):
        disk.try_out(folder, direct=False, in_place=True)
    assert folder.names() == []
