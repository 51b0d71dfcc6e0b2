"""A folder seen through FUSE, by a mount that refuses some of what a disk does, as mounts of buckets do.

    python -m tests.support.fuse_mount FOLDER PLACE '{"rename": 38}'

For `refusing_mount` in disks.py. Speaks the kernel's protocol (linux/fuse.h), so that no library is needed, one call
at a time. What is refused, each with its errno: `rename`, `in place` (a write anywhere but at a file's end), `direct`
(to open with O_DIRECT), `allocate`. Nobody can change an owner or a mode. Prints a line once it is mounted, or why it
cannot be.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import os
import signal
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Final

_ROOT: Final = 1
_VALID_S: Final = 1  # what the kernel may keep of names and attributes: nothing else changes the folder
_MAX_WRITE: Final = 1 << 20
_BIG_WRITES, _MAX_PAGES = 1 << 5, 1 << 22
_FORGET, _INIT, _BATCH_FORGET = 2, 26, 42
_OWNER_OR_MODE, _SIZE, _ATIME, _MTIME = 1 | 2 | 4, 8, 16, 32

_REQUEST = struct.Struct("<IIQQIIIHH")
_REPLY = struct.Struct("<IiQ")
_TRANSFER = struct.Struct("<QQIIQII")

_libc = ctypes.CDLL(None, use_errno=True)


def _failed(error: int) -> OSError:
    return OSError(error, os.strerror(error))


def _attributes(status: os.stat_result) -> bytes:
    times = [divmod(ns, 10**9) for ns in (status.st_atime_ns, status.st_mtime_ns, status.st_ctime_ns)]
    seconds, parts = zip(*times, strict=True)
    about = (status.st_mode, status.st_nlink, status.st_uid, status.st_gid, 0, status.st_blksize, 0)
    return struct.pack("<6Q10I", status.st_ino, status.st_size, status.st_blocks, *seconds, *parts, *about)


class Server:
    """Nodes are inodes, held open so that no number is used again; a file's handle is a descriptor."""

    def __init__(self, folder: str, refused: dict[str, int]) -> None:
        self._refused = refused
        self._nodes = {_ROOT: os.open(folder, os.O_PATH)}
        self._lookups: dict[int, int] = {}
        self._listings: dict[int, list[tuple[int, bool, bytes]]] = {}  # by handle
        self._calls: dict[int, Callable[[int, bytes], bytes | None]] = {
            1: self._lookup,
            3: lambda node, body: struct.pack("<QII", _VALID_S, 0, 0) + _attributes(self._path(node).stat()),
            4: self._set_attributes,
            9: self._mkdir,
            10: lambda node, body: os.unlink(body[:-1], dir_fd=self._nodes[node]),
            11: lambda node, body: os.rmdir(body[:-1], dir_fd=self._nodes[node]),
            12: self._rename,
            14: self._open,
            15: self._read,
            16: self._write,
            17: self._statfs,
            18: self._close,
            20: lambda node, body: os.fsync(*struct.unpack_from("<Q", body)),
            25: lambda node, body: b"",  # flush
            _INIT: self._init,
            27: self._open,  # a directory
            28: self._readdir,
            29: self._close,
            35: self._create,
            43: self._fallocate,
        }

    def serve(self, device: int) -> None:
        """Until it is unmounted."""
        while True:
            try:
                request = os.read(device, _MAX_WRITE + 8192)
            except OSError as error:
                if error.errno == errno.ENODEV:
                    return
                if error.errno != errno.ENOENT:  # that call was interrupted
                    raise
                continue
            _, opcode, unique, node, *_ = _REQUEST.unpack_from(request)
            body, answer, code = request[_REQUEST.size :], b"", 0
            if opcode in (_FORGET, _BATCH_FORGET):  # which have no answer
                one = struct.pack("<Q", node) + body
                for each in struct.iter_unpack("<QQ", one if opcode == _FORGET else body[8:]):
                    self._forget(*each)
                continue
            try:
                if opcode not in self._calls:
                    raise _failed(errno.ENOSYS)
                answer = self._calls[opcode](node, body) or b""
            except OSError as error:
                code = -(error.errno or errno.EIO)
            with contextlib.suppress(FileNotFoundError):  # nobody waits for it any more
                os.writev(device, [_REPLY.pack(_REPLY.size + len(answer), code, unique), answer])
            if opcode == _INIT:
                print("mounted", flush=True)

    def _refuse(self, what: str) -> None:
        if what in self._refused:
            raise _failed(self._refused[what])

    def _path(self, node: int) -> Path:
        return Path(f"/proc/self/fd/{self._nodes[node]}")

    def _init(self, node: int, body: bytes) -> bytes:
        readahead = struct.unpack_from("<III", body)[2]
        head = struct.pack("<IIIIHH", 7, 31, readahead, _BIG_WRITES | _MAX_PAGES, 16, 12)
        return head + struct.pack("<IIHHI28x", _MAX_WRITE, 1, _MAX_WRITE // 4096, 0, 0)

    def _lookup(self, parent: int, body: bytes) -> bytes:
        descriptor = os.open(body[:-1], os.O_PATH | os.O_NOFOLLOW, dir_fd=self._nodes[parent])
        status = os.fstat(descriptor)
        node = _ROOT + status.st_ino
        if self._nodes.setdefault(node, descriptor) != descriptor:
            os.close(descriptor)
        self._lookups[node] = self._lookups.get(node, 0) + 1
        return struct.pack("<QQQQII", node, 0, _VALID_S, _VALID_S, 0, 0) + _attributes(status)

    def _forget(self, node: int, lookups: int) -> None:
        self._lookups[node] -= lookups
        if not self._lookups[node]:
            del self._lookups[node]
            os.close(self._nodes.pop(node))

    def _set_attributes(self, node: int, body: bytes) -> bytes:
        valid, _, _, size, _, atime, mtime, _, atime_ns, mtime_ns, *_ = struct.unpack("<II6Q8I", body)
        path = self._path(node)
        before = path.stat()
        if valid & _OWNER_OR_MODE:
            raise _failed(errno.EPERM)
        if valid & _SIZE:
            if size not in (0, before.st_size):
                self._refuse("in place")
            os.truncate(path, size)
        used_ns = atime * 10**9 + atime_ns if valid & _ATIME else before.st_atime_ns
        changed_ns = mtime * 10**9 + mtime_ns if valid & _MTIME else before.st_mtime_ns
        if valid & (_ATIME | _MTIME):
            os.utime(path, ns=(used_ns, changed_ns))
        return struct.pack("<QII", _VALID_S, 0, 0) + _attributes(path.stat())

    def _mkdir(self, parent: int, body: bytes) -> bytes:
        os.mkdir(body[8:-1], struct.unpack_from("<I", body)[0], dir_fd=self._nodes[parent])
        return self._lookup(parent, body[8:])

    def _rename(self, node: int, body: bytes) -> bytes:
        self._refuse("rename")
        old, new, _ = body[8:].split(b"\0")
        os.rename(old, new, src_dir_fd=self._nodes[node], dst_dir_fd=self._nodes[struct.unpack_from("<Q", body)[0]])
        return b""

    def _flags(self, body: bytes) -> int:
        flags: int = struct.unpack_from("<I", body)[0]
        if flags & os.O_DIRECT:
            self._refuse("direct")
        return flags

    def _open(self, node: int, body: bytes) -> bytes:
        return struct.pack("<QII", os.open(self._path(node), self._flags(body) & os.O_ACCMODE), 0, 0)

    def _close(self, node: int, body: bytes) -> bytes:
        handle = struct.unpack_from("<Q", body)[0]
        self._listings.pop(handle, None)
        os.close(handle)
        return b""

    def _create(self, parent: int, body: bytes) -> bytes:
        mode, name = struct.unpack_from("<I", body, 4)[0], body[16:]
        flags = self._flags(body) & (os.O_ACCMODE | os.O_EXCL) | os.O_CREAT
        descriptor = os.open(name[:-1], flags, mode & 0o7777, dir_fd=self._nodes[parent])
        return self._lookup(parent, name) + struct.pack("<QII", descriptor, 0, 0)

    def _read(self, node: int, body: bytes) -> bytes:
        handle, offset, size, *_ = _TRANSFER.unpack(body)
        return os.pread(handle, size, offset)

    def _write(self, node: int, body: bytes) -> bytes:
        handle, offset, *_ = _TRANSFER.unpack_from(body)
        if offset != os.fstat(handle).st_size:
            self._refuse("in place")
        return struct.pack("<II", os.pwrite(handle, memoryview(body)[_TRANSFER.size :], offset), 0)

    def _fallocate(self, node: int, body: bytes) -> bytes:
        self._refuse("allocate")
        handle, offset, size, mode, _ = struct.unpack("<QQQII", body)
        if _libc.fallocate(handle, mode, ctypes.c_int64(offset), ctypes.c_int64(size)):
            raise _failed(ctypes.get_errno())
        return b""

    def _readdir(self, node: int, body: bytes) -> bytes:
        handle, first, size, *_ = _TRANSFER.unpack(body)
        if not first:
            with os.scandir(self._path(node)) as found:
                self._listings[handle] = [(each.inode(), each.is_dir(), os.fsencode(each.name)) for each in found]
        answer = b""
        for number, (inode, is_folder, name) in enumerate(self._listings[handle][first:], first + 1):
            entry = struct.pack("<QQII", inode, number, len(name), 4 if is_folder else 8) + name
            entry += bytes(-len(entry) % 8)
            if len(answer) + len(entry) > size:
                break
            answer += entry
        return answer

    def _statfs(self, node: int, body: bytes) -> bytes:
        found = os.statvfs(self._path(node))
        counts = (found.f_blocks, found.f_bfree, found.f_bavail, found.f_files, found.f_ffree)
        return struct.pack("<5Q3I28x", *counts, found.f_bsize, found.f_namemax, found.f_frsize)


def main(folder: str, place: str, refused: str) -> None:
    _libc.prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: what waits in the mount ends with an error then
    os.umask(0)  # the kernel has applied the caller's
    try:
        device = os.open("/dev/fuse", os.O_RDWR)
        options = f"fd={device},rootmode=40000,user_id=0,group_id=0,allow_other,default_permissions"
        if _libc.mount(b"refusing", os.fsencode(place), b"fuse", 0, options.encode()):
            raise _failed(ctypes.get_errno())
    except OSError as error:
        print(error, flush=True)
        return
    Server(folder, json.loads(refused)).serve(device)


if __name__ == "__main__":
    main(*sys.argv[1:])
