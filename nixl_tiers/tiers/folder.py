"""Safe access below a tier's path, by descriptor.

The path may belong to another user and be writable by everybody (an emptyDir is 0777): other users may have placed
links or files in it for a tier to follow or overwrite, and may replace them at any moment. So a directory below it is
used only if it is no link and only its owner can write to it, and from then on by its descriptor: renaming or replacing
it has no effect on what the tier reads and writes.
"""

from __future__ import annotations

import errno
import os
import re
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple, Self

from nixl_tiers.tiers.base import TierRefused

_ANYBODY = -1  # in place of a user's ID
READ_ONLY = (errno.EROFS, errno.EACCES, errno.EPERM)
"""Errors of a write where this process may only read."""
_SMALL_BYTES = 64 << 10
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


class NotOwned(TierRefused, OSError):
    """Something below the path is refused, because another user may have put it there. One sentence."""


class Found(NamedTuple):
    """A tier's path when it was opened."""

    uid: int  # the owner of files that are made there
    device: int
    inode: int


class Folder:
    """An open directory. `path` is for messages; every call uses the descriptor, and raises OSError."""

    def __init__(self, path: Path, descriptor: int, uid: int, *names: str, public: bool = False) -> None:
        """Takes the descriptor of the directory `names` below `path` over. `uid`: the owner of files that are made
        here. `public`: others may write here."""
        self._base = path
        self._names = names
        self.descriptor = descriptor
        self.uid = uid
        self._public = public

    @classmethod
    def base(cls, path: Path, found: Found | None = None, *, writes: bool = True) -> Folder:
        """The path of a tier, regardless of its owner. `found` before: raises OSError if the path leads to another
        directory by now, such as the one below a mount that has gone. None: find out now, by making a file; without
        `writes` that need not be possible."""
        descriptor = os.open(path, _DIRECTORY)
        try:
            status = os.fstat(descriptor)
            if found is None:
                found = Found(_uid_of_files(path, descriptor, writes), status.st_dev, status.st_ino)
            elif (status.st_dev, status.st_ino) != found[1:]:
                raise OSError(errno.ESTALE, "is not the directory that was opened", str(path))
            return cls(path, descriptor, found.uid, public=True)
        except BaseException:
            os.close(descriptor)
            raise

    @classmethod
    def to_inspect(cls, path: Path) -> Folder:
        """The path of a tier for a command: nothing is made, and what other users own, or can write to, is opened, too.
        Raises OSError."""
        return cls(path, os.open(path, _DIRECTORY), _ANYBODY)

    @property
    def found(self) -> Found:
        """For later calls of `base`."""
        status = os.fstat(self.descriptor)
        return Found(self.uid, status.st_dev, status.st_ino)

    @property
    def path(self) -> Path:
        return self._base.joinpath(*self._names)  # made when it is asked for: row files open six directories each

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        descriptor, self.descriptor = self.descriptor, -1  # a late call fails: the number may be reused
        os.close(descriptor)

    def folder(self, name: str, *, make: bool = False) -> Folder:
        """A directory in this one, which the caller closes. Raises NotOwned if others can write to it."""
        if make:
            self.make(name)
        try:
            descriptor = os.open(name, _DIRECTORY | os.O_NOFOLLOW, dir_fd=self.descriptor)
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.ENOTDIR):
                raise _refusal(self.path / name, "is no directory") from error
            if error.errno == errno.EACCES and (wrong := self._wrong(self.stat(name))):
                raise _refusal(self.path / name, wrong) from error
            raise _named(error, self.path / name) from error
        if wrong := self._wrong(os.fstat(descriptor)):
            os.close(descriptor)
            raise _refusal(self.path / name, wrong)
        return Folder(self._base, descriptor, self.uid, *self._names, name)

    def make(self, name: str) -> bool:
        """Make a directory in it; False if the name exists."""
        try:
            os.mkdir(name, 0o700, dir_fd=self.descriptor)
        except FileExistsError:
            return False
        except OSError as error:
            raise _named(error, self.path / name) from error
        return True

    def has_folder(self, name: str) -> bool:
        """Whether `folder` would open it: a directory that no other user can write to."""
        try:
            status = self.stat(name)
        except FileNotFoundError:
            return False
        return stat.S_ISDIR(status.st_mode) and not self._wrong(status)

    def open(self, name: str, flags: int) -> int:
        """A descriptor of a file in it, created with mode 0600 if the flags say so. Never follows a link nor waits for
        the other end of a pipe. Raises NotOwned if another user may have put it there."""
        try:
            descriptor = os.open(
                name, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600, dir_fd=self.descriptor
            )
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.ENXIO, errno.EISDIR):
                raise _refusal(self.path / name, "is no file") from error
            raise _named(error, self.path / name) from error
        status = os.fstat(descriptor)
        wrong = "" if stat.S_ISREG(status.st_mode) else "is no file"
        if self._public:
            wrong = wrong or self._wrong(status) or ("has other names" if status.st_nlink > 1 else "")
        if wrong:
            os.close(descriptor)
            raise _refusal(self.path / name, wrong)
        return descriptor

    @contextmanager
    def opened(self, name: str, flags: int) -> Iterator[int]:
        """The same for a block."""
        descriptor = self.open(name, flags)
        try:
            yield descriptor
        finally:
            os.close(descriptor)

    def read(self, name: str) -> bytes:
        """All of a small file, at most 64 KiB. Raises as `open` does."""
        with os.fdopen(self.open(name, os.O_RDONLY), "rb") as file:
            return file.read(_SMALL_BYTES)

    def names(self) -> list[str]:
        return os.listdir(self.descriptor)  # noqa: PTH208 - a path has no descriptor

    def stat(self, name: str) -> os.stat_result:
        """Does not follow a link."""
        try:
            return os.stat(name, dir_fd=self.descriptor, follow_symlinks=False)
        except OSError as error:
            raise _named(error, self.path / name) from error

    def unlink(self, name: str) -> None:
        try:
            os.unlink(name, dir_fd=self.descriptor)
        except OSError as error:
            raise _named(error, self.path / name) from error

    def rename(self, name: str, to: Folder, new: str) -> None:
        try:
            os.rename(name, new, src_dir_fd=self.descriptor, dst_dir_fd=to.descriptor)
        except OSError as error:
            raise _named(error, self.path / name) from error

    def rmdir(self, name: str) -> None:
        """An empty directory."""
        os.rmdir(name, dir_fd=self.descriptor)

    def unlink_matching(self, pattern: re.Pattern[str]) -> None:
        """Delete the files and links whose whole name matches."""
        for name in filter(pattern.fullmatch, self.names()):
            with suppress(FileNotFoundError):  # by another process
                if not stat.S_ISDIR(self.stat(name).st_mode):
                    self.unlink(name)

    def _wrong(self, status: os.stat_result) -> str:
        if self.uid == _ANYBODY:
            return ""
        if status.st_uid != self.uid:
            return f"belongs to user {status.st_uid}, and what this process makes there to user {self.uid}"
        if status.st_mode & _OTHERS_WRITE:
            return f"can be written to by others (mode {stat.S_IMODE(status.st_mode):04o})"
        return ""


def fd_path(descriptor: int) -> str:
    """A path to an open file or directory that renaming it does not change, for calls that open by path."""
    return f"/proc/self/fd/{descriptor}"


def _uid_of_files(path: Path, directory: int, writes: bool) -> int:
    """The owner of files that are made here: file servers may map users, such as root to nobody. This user, where none
    can be made. Raises NotOwned if new files are writable by others."""
    name = f".probe-{secrets.token_hex(8)}.tmp"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        descriptor = os.open(name, flags, 0o600, dir_fd=directory)
    except OSError as error:
        # A full disk must still serve its rows, and a reader those that it may not change.
        if error.errno in (errno.ENOSPC, errno.EDQUOT) or (not writes and error.errno in READ_ONLY):
            return os.geteuid()
        raise
    try:
        status = os.fstat(descriptor)
        if status.st_mode & _OTHERS_WRITE:
            mode = f"mode {stat.S_IMODE(status.st_mode):04o}"
            raise NotOwned(
                f"path: at {path} others can write to whatever is made ({mode}, and 0600 was asked for): mount that "
                "file system with such modes as dir_mode=0700 and file_mode=0600"
            )
        return status.st_uid
    finally:
        os.close(descriptor)
        with suppress(OSError):
            os.unlink(name, dir_fd=directory)


def _refusal(path: Path, wrong: str) -> NotOwned:
    return NotOwned(f"path: {path} {wrong}: remove it, or give the tier a path of its own")


def _named(error: OSError, path: Path) -> OSError:
    error.filename = str(path)
    return error


def taken_bytes(status: os.stat_result) -> int:
    """Of a file: blocks or size, whichever is more."""
    return max(status.st_blocks * 512, status.st_size)
