"""Whether a path is on a file system other than `/`, for `require_mount`; directories that are made."""

from __future__ import annotations

import os
import re
from contextlib import suppress
from pathlib import Path

ROOT = Path("/")
_MOUNTS = Path("/proc/self/mountinfo")
_ESCAPED = re.compile(rb"\\([0-7]{3})")


def is_mount(path: Path) -> bool:
    """Whether something is mounted there, if that is no link: also another directory of the same file system (a bind
    mount), which os.path.ismount cannot tell. May wait for the medium."""
    if os.path.ismount(path):
        return True
    with suppress(OSError):
        places = (line.split()[4] for line in _MOUNTS.read_bytes().splitlines())
        return os.fsencode(path) in (_ESCAPED.sub(lambda found: bytes([int(found[1], 8)]), place) for place in places)
    return False


def nearest(path: Path) -> Path:
    """The path itself, or its nearest parent that exists. Raises OSError."""
    return next(each for each in (path, *path.parents) if os.path.lexists(each))


def not_mounted(path: Path) -> str:
    """Why `require_mount` is not met, in one sentence, or "". Creates nothing; may wait for the medium. Raises
    OSError."""
    real = path.resolve()  # the target of a symbolic link, whether it exists or not
    if nearest(real).stat().st_dev != ROOT.stat().st_dev:
        return ""
    return f"{path} lies on the file system of {ROOT}, and require_mount wants another: mount it"


def make_private(path: Path) -> None:
    """Make a directory, if it is missing, and its missing parents with mode 0700: `Path.mkdir` gives parents all that
    the umask leaves. Raises OSError."""
    for each in reversed([parent for parent in path.parents if not os.path.lexists(parent)]):
        each.mkdir(mode=0o700, exist_ok=True)
    path.mkdir(mode=0o700, exist_ok=True)
