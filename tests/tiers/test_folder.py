"""What another user may have put below a path is not used: links, names of others' files, what others can change."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from nixl_tiers.tiers.folder import Folder, NotOwned


def _link(place: Path, other: Path) -> None:
    place.symlink_to(other)


def _second_name(place: Path, other: Path) -> None:
    place.hardlink_to(other)


def _writable(place: Path, other: Path) -> None:
    place.write_bytes(b"")
    place.chmod(0o620)


def _pipe(place: Path, other: Path) -> None:
    os.mkfifo(place)


FILES: list[tuple[Callable[[Path, Path], None], str]] = [
    (_link, "is no file"),
    (_second_name, "has other names"),
    (_writable, r"can be written to by others \(mode 0620\)"),
    (_pipe, "is no file"),
]


@pytest.mark.parametrize(("prepare", "why"), FILES)
def test_what_others_may_have_put_there_is_refused(
    tmp_path: Path, prepare: Callable[[Path, Path], None], why: str
) -> None:
    precious = tmp_path / "precious"
    precious.write_bytes(b"precious")
    (tmp_path / "kv").mkdir()
    prepare(tmp_path / "kv" / ".ledger", precious)
    with Folder.base(tmp_path / "kv") as base, pytest.raises(NotOwned, match=f"^path: .*ledger {why}: remove it"):
        base.open(".ledger", os.O_RDWR | os.O_CREAT)
    assert precious.read_bytes() == b"precious"


@pytest.mark.parametrize(("mode", "used"), [(0o700, True), (0o755, True), (0o770, False), (0o702, False), (0, False)])
def test_directory_is_used_only_if_nobody_else_can_write_to_it(tmp_path: Path, mode: int, used: bool) -> None:
    """`mode` 0: a link to a good one."""
    place = tmp_path / "part-0"
    if mode:
        place.mkdir()
        place.chmod(mode)
    else:
        (tmp_path / "elsewhere").mkdir(mode=0o700)
        place.symlink_to("elsewhere")
    with Folder.base(tmp_path) as base:
        assert base.has_folder("part-0") is used
        if used:
            base.folder("part-0", make=True).close()
        else:
            with pytest.raises(NotOwned, match=r"^path: .*part-0 "):
                base.folder("part-0", make=True)


def test_what_belongs_to_another_user_is_refused(tmp_path: Path) -> None:
    (tmp_path / "part-0").mkdir(mode=0o700)
    (tmp_path / ".ledger").touch(mode=0o600)
    with Folder.base(tmp_path) as base:
        base.uid += 1  # as if that were this process's
        with pytest.raises(NotOwned, match=f"belongs to user {base.uid - 1}"):
            base.folder("part-0")
        with pytest.raises(NotOwned, match=f"belongs to user {base.uid - 1}"):
            base.open(".ledger", os.O_RDWR)
