"""Names below a tier's path: of rows' files, and of unfinished ones in a directory that processes of several machines
share."""

from __future__ import annotations

import itertools
import os
import re
import secrets
import socket
from collections.abc import Iterable
from hashlib import blake2b
from pathlib import Path
from typing import Final, NamedTuple

from nixl_tiers.base.chunk import Key, key_of_object, object_name
from nixl_tiers.tiers.disk import PROBE

ORPHAN_S: Final = 900.0  # an unfinished file that is older has lost its writer, on whichever machine that was
FANOUT_NAME: Final = re.compile(r"[0-9a-f]{2}")


class RowPath(NamedTuple):
    """Where a row's file is below the tier's path: `<namespace>/<fan-out directory>/<name>`."""

    namespace: str
    fanout: str
    key: Key

    @classmethod
    def of(cls, namespace: str, key: Key) -> RowPath:
        return cls(namespace, fanout_of(key), key)

    @classmethod
    def of_file(cls, namespace: str, fanout: str, name: str) -> RowPath | None:
        """The row whose file has this name in that directory; None: the file is foreign."""
        key = key_of_object(f"{fanout}/{name[:-4]}") if name.endswith(".row") else None
        return None if key is None else cls(namespace, fanout, key)

    @property
    def name(self) -> str:
        return f"{self.key.hex()}.row"


def fanout_of(key: Key) -> str:
    """The fan-out directory that a key's row belongs in."""
    return object_name(key).partition("/")[0]


class TempNames:
    """Makes names that no other process on any machine uses, and tells which have no writer any more. Thread-safe."""

    _NAME: Final = re.compile(rf"(\w+)-([0-9a-f]{{8}})-(\d+)-([0-9a-f]{{8}})-(\d+)\.tmp|{PROBE.pattern}", re.ASCII)

    def __init__(self) -> None:
        self._host = re.sub(r"[^A-Za-z0-9]", "_", socket.gethostname())[:40] or "_"
        self._pid_namespace = blake2b(_pid_namespace().encode(), digest_size=4).hexdigest()
        self._token = secrets.token_hex(4)
        self._numbers = itertools.count()
        self._in_use = set[int]()

    @property
    def prefix(self) -> str:
        """Of all names; a number follows, and `.tmp`."""
        return f"{self._host}-{self._pid_namespace}-{os.getpid()}-{self._token}-"

    def take(self, count: int) -> list[int]:
        """Numbers of names that are in use until `release`; so are those by 2**32 higher, and so on, which the native
        worker takes where a name exists."""
        numbers = [*itertools.islice(self._numbers, count)]
        self._in_use.update(numbers)
        return numbers

    def release(self, numbers: Iterable[int]) -> None:
        """Files that still have these names are orphans from now on: they could not be deleted."""
        self._in_use.difference_update(numbers)

    def is_in_use(self, name: str) -> bool:
        match = self._NAME.fullmatch(name)
        return match is not None and match[4] == self._token and int(match[5]) % (1 << 32) in self._in_use

    def is_orphan(self, name: str, age_s: float) -> bool:
        """Whether nobody writes it any more: it is old, or our own and not in use, or the process that made it is known
        to have ended: never on another machine or in another container. Other names are foreign."""
        match = self._NAME.fullmatch(name)
        if match is None or self.is_in_use(name):
            return False
        here = (match[1], match[2]) == (self._host, self._pid_namespace)
        return age_s > ORPHAN_S or (here and (match[4] == self._token or not Path("/proc", match[3]).exists()))


def _pid_namespace() -> str:
    """An identifier of the machine and container within which process IDs are unique."""
    try:
        if os.readlink("/proc/self") != str(os.getpid()):  # noqa: PTH115
            return secrets.token_hex(8)  # /proc shows processes of another one
        boot = Path("/proc/sys/kernel/random/boot_id").read_text()
        return boot + os.readlink("/proc/self/ns/pid")  # noqa: PTH115 - it is no path
    except OSError:
        return secrets.token_hex(8)
