"""A directory with `layout: files`: one file a row."""

from __future__ import annotations

import os
import re
import socket
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final

from nixl_tiers.chunk import PAGE, key_of_object
from nixl_tiers.cli.storage.base import Checked, Namespace, Pace, Step, Storage, Unusable, Victims
from nixl_tiers.cli.storage.reading import RowBuffer, folders, manifest_in
from nixl_tiers.cli.storage.seals import defect
from nixl_tiers.manifest import MANIFEST_NAME, REFRESH_S, Manifest

_NAMESPACE: Final = re.compile(r"[0-9a-f]{32}")
_FANOUT: Final = re.compile(r"[0-9a-f]{2}")
_SUFFIX: Final = ".row"
_STEP: Final = 1024


class RowFileStorage(Storage):
    def __init__(self, path: Path) -> None:
        self._path = path

    def namespaces(self, step: Step) -> list[Namespace]:
        try:
            homes = [home for home in folders(self._path) if _NAMESPACE.fullmatch(home.name)]
        except OSError as error:
            raise Unusable(f"{self._path} cannot be read ({error.strerror})") from None
        return [self._describe(home, step) for home in homes]

    def _describe(self, home: Path, step: Step) -> Namespace:
        rows, nbytes, times, problem = 0, 0, list[float](), ""
        try:
            for _, status in _rows(home, step):
                rows += 1
                nbytes += max(status.st_blocks * 512, status.st_size)
                times = [min([*times[:1], status.st_mtime]), max([*times[1:], status.st_mtime])]
        except OSError as error:
            problem = f"{home} cannot be read as a whole ({error.strerror})"
        manifest = manifest_in(home)
        used = [*times[1:], *([float(manifest.last_used)] if manifest is not None else [])]
        return Namespace(
            str(self._path),
            "files",
            home.name,
            rows,
            nbytes,
            oldest_s=times[0] if times else None,
            newest_s=times[1] if times else None,
            last_used_s=max(used, default=None),
            manifest=manifest,
            holder=_user(manifest),
            problem=problem,
        )

    def check(self, namespace: Namespace, pace: Pace) -> Iterator[Checked]:
        home = Path(namespace.place, namespace.name)
        digest = bytes.fromhex(namespace.name)
        with RowBuffer() as buffer:
            for path, status in _rows(home, lambda _: None):
                pace.take(max(PAGE, status.st_size))
                key = bytes.fromhex(path.stem)
                try:
                    row = buffer.read(path, 0, max(PAGE, status.st_size))
                except OSError as error:
                    yield Checked(str(path), 0, "corrupt", f"it cannot be read ({error.strerror})")
                    continue
                if row is None:
                    yield Checked(str(path), 0, "changed")
                elif reason := defect(row, digest, key):
                    yield Checked(str(path), len(row), "corrupt", reason)
                else:
                    yield Checked(str(path), len(row), "ok")

    def victims(self, namespace: Namespace, before_s: float | None) -> Victims:
        rows = nbytes = 0
        for _, status in self._selected(namespace, before_s):
            rows += 1
            nbytes += max(status.st_blocks * 512, status.st_size)
        return Victims(rows, nbytes)

    def delete(self, namespace: Namespace, before_s: float | None, step: Step) -> None:
        home = Path(namespace.place, namespace.name)
        try:
            for path, status in self._selected(namespace, before_s):
                with suppress(FileNotFoundError):
                    now = path.lstat()  # an engine may have used or replaced it since
                    if (now.st_ino, now.st_mtime_ns) == (status.st_ino, status.st_mtime_ns):
                        path.unlink()
                step(1)
        except OSError as error:
            raise Unusable(f"{error.filename or home} cannot be deleted ({error.strerror})") from None
        if not namespace.holder:  # else its engine still needs the manifest
            _remove_empty(home)

    def _selected(self, namespace: Namespace, before_s: float | None) -> Iterator[tuple[Path, os.stat_result]]:
        """Rows that were there when the namespace was found, and were not used since."""
        newest_s = namespace.newest_s
        for path, status in _rows(Path(namespace.place, namespace.name), lambda _: None):
            if (
                newest_s is not None
                and status.st_mtime <= newest_s
                and (before_s is None or status.st_mtime < before_s)
            ):
                yield path, status


def _rows(home: Path, step: Step) -> Iterator[tuple[Path, os.stat_result]]:
    """Raises OSError, but not for what is deleted meanwhile."""
    with suppress(FileNotFoundError):
        for fanout in folders(home):
            if not _FANOUT.fullmatch(fanout.name):
                continue
            count = 0
            with suppress(FileNotFoundError):
                for entry in list(os.scandir(fanout)):
                    with suppress(FileNotFoundError):
                        if _is_row(fanout.name, entry.name) and entry.is_file(follow_symlinks=False):
                            yield Path(entry.path), entry.stat(follow_symlinks=False)
                            count += 1
            step(count)


def _is_row(fanout: str, name: str) -> bool:
    """Whether a tier makes a row file of that name in that directory; others are foreign."""
    return name.endswith(_SUFFIX) and key_of_object(f"{fanout}/{name.removesuffix(_SUFFIX)}") is not None


def _remove_empty(home: Path) -> None:
    """The directories of a namespace without rows, and its manifest. An engine that uses it makes them again."""
    with suppress(OSError):
        for fanout in folders(home):
            if _FANOUT.fullmatch(fanout.name):
                with suppress(OSError):
                    fanout.rmdir()
        if not any(_rows(home, lambda _: None)):
            (home / MANIFEST_NAME).unlink(missing_ok=True)
        home.rmdir()


def _user(manifest: Manifest | None) -> str:
    """Nothing is locked: what can be known is which engine has served it last, and whether that was lately."""
    if manifest is None or not manifest.engine:
        return ""
    host, _, rest = manifest.engine.partition("/")
    pid = rest.partition("/")[0]
    if host == socket.gethostname() and pid.isdigit():
        return f"process {pid} on {host}" if Path("/proc", pid).exists() else ""
    lately = time.time() - manifest.last_used < 2 * REFRESH_S
    return f"process {pid} on {host}, less than two hours ago" if lately else ""
