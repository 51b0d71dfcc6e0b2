"""Memory that processes share by descriptor, without a name in any file system."""

from __future__ import annotations

import errno
import fcntl
import os
import struct
from typing import Any, Final

from xxhash import xxh3_64_intdigest

SIZE_SEALS: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
CHECK: Final = struct.Struct("<Q")  # after a header: the XXH3 of its bytes

_MFD_NOEXEC_SEAL: Final = 8  # Linux 6.3; where sysctl vm.memfd_noexec is 2, nothing else is allowed


def memfd(name: str, flags: int = 0) -> int:
    """A descriptor of an empty memfd that can be sealed; `name` is only seen in /proc. Raises OSError."""
    flags |= os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
    try:
        return os.memfd_create(name, flags | _MFD_NOEXEC_SEAL)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return os.memfd_create(name, flags)


def header_of(fd: int, form: struct.Struct, magic: bytes, version: int, noun: str) -> tuple[Any, ...]:
    """The fields of the header at the beginning of the memfd behind `fd`: the first is `magic`, the second its version.

    ValueError (one sentence, in which it is called `noun`) unless it is one, of this version, and its size is sealed.
    """
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError as error:
        raise ValueError(f"descriptor {fd} is not a memfd: {error.strerror}") from error
    if seals & SIZE_SEALS != SIZE_SEALS:
        raise ValueError(f"the size of the memfd behind descriptor {fd} is not sealed")
    raw = os.pread(fd, form.size + CHECK.size, 0)
    header = raw[: form.size]
    if raw[: len(magic)] != magic or raw[form.size :] != CHECK.pack(xxh3_64_intdigest(header)):
        raise ValueError(f"the memfd behind descriptor {fd} is not a {noun}")
    fields = form.unpack(header)
    if fields[1] != version:
        raise ValueError(f"the {noun} behind descriptor {fd} is of version {fields[1]}, this program's is {version}")
    return fields
