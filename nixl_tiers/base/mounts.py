"""Whether a path is on a file system other than `/`, for `require_mount`; what file systems there are; which directory
a path is among those of all nodes; directories that are made."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

ROOT = Path("/")
_MOUNTS = Path("/proc/self/mountinfo")
_BOOT = Path("/proc/sys/kernel/random/boot_id")
_IN_MEMORY = frozenset({"tmpfs", "ramfs", "devtmpfs"})
_ESCAPED = re.compile(rb"\\([0-7]{3})")
_OF_A_SERVER = frozenset({"nfs", "nfs4", "cifs", "smb3", "ceph", "lustre", "gpfs", "beegfs", "wekafs"})
"""File systems whose source names what all nodes reach by it. Of FUSE: those whose source has a colon."""


def is_mount(path: Path) -> bool:
    """Whether something is mounted there, if that is no link: also another directory of the same file system (a bind
    mount), which os.path.ismount cannot tell. May wait for the medium."""
    if os.path.ismount(path):
        return True
    with suppress(OSError):
        return str(path) in (words[4] for words in _mounts())
    return False


def _mounts() -> Iterator[list[str]]:
    """The words of each line of mountinfo (proc_pid_mountinfo(5)), later mounts last. Raises OSError."""
    for line in _MOUNTS.read_bytes().splitlines():
        words = (_ESCAPED.sub(lambda found: bytes([int(found[1], 8)]), word) for word in line.split(b" "))
        yield list(map(os.fsdecode, words))


def file_systems() -> dict[str, str]:
    """Device (major:minor) -> type of every mounted file system."""
    with suppress(OSError):
        return {words[2]: words[words.index("-") + 1] for words in _mounts()}  # a dash ends the optional fields
    return {}


def device_of(path: Path) -> str:
    """major:minor of the file system that `path` is on, or will be on; "" if unknown."""
    for place in (path, *path.parents):
        try:
            device = place.stat().st_dev
        except OSError:
            continue
        return f"{os.major(device)}:{os.minor(device)}"
    return ""


def memory_at(path: Path) -> str:
    """The type of the file system that `path`, which has no links, is on, or will be on, if that is this machine's
    memory; else "". Waits for no medium."""
    over: list[list[str]] = []
    with suppress(OSError):
        over = [words for words in _mounts() if path.is_relative_to(words[4])]
    words = max(reversed(over), key=lambda words: len(Path(words[4]).parts), default=["-", ""])
    kind = words[words.index("-") + 1]
    return kind if kind in _IN_MEMORY else ""


def identity(path: Path) -> str:
    """What identifies a directory, wherever it is mounted, alike for all processes that use it: on all nodes where a
    server has it, else on this one. May wait for the medium."""
    real = Path(os.path.realpath(path))  # the target of a symbolic link, whether it exists or not
    over: list[list[str]] = []
    with suppress(OSError):
        over = [words for words in _mounts() if real.is_relative_to(words[4])]
    if not over:
        return f"{_node()} {real}"
    _, _, device, root, point, *rest = max(reversed(over), key=lambda words: len(Path(words[4]).parts))
    kind, source = rest[rest.index("-") + 1 :][:2]
    inside = "/".join((root, *real.relative_to(point).parts))
    if kind in _OF_A_SERVER or (kind.startswith("fuse.") and ":" in source):
        return re.sub("/+", "/", f"{source}/{inside}").rstrip("/")
    return f"{_node()} {device} {re.sub('/+', '/', inside)}"


def _node() -> str:
    """What all containers of this machine have in common, until it is booted anew."""
    with suppress(OSError):
        return _BOOT.read_text().strip()
    return socket.gethostname()


def nearest(path: Path) -> Path:
    """The path itself, or its nearest parent that exists. Raises OSError."""
    return next(each for each in (path, *path.parents) if os.path.lexists(each))


def is_on_root(path: Path) -> bool:
    """Whether the path is on the file system of `/`, or will be. May wait for the medium. Raises OSError."""
    real = path.resolve()  # the target of a symbolic link, whether it exists or not
    return nearest(real).stat().st_dev == ROOT.stat().st_dev


def not_mounted(path: Path) -> str:
    """Why `require_mount` is not met, in one sentence, or "". Creates nothing; may wait for the medium. Raises
    OSError."""
    if not is_on_root(path):
        return ""
    return f"{path} lies on the file system of {ROOT}, and require_mount wants another: mount it"


def make_private(path: Path) -> None:
    """Make a directory, if it is missing, and its missing parents with mode 0700: `Path.mkdir` gives parents all that
    the umask leaves. Raises OSError."""
    for each in reversed([parent for parent in path.parents if not os.path.lexists(parent)]):
        each.mkdir(mode=0o700, exist_ok=True)
    path.mkdir(mode=0o700, exist_ok=True)
