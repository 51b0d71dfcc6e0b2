"""A directory with `layout: files`: one file a row."""

from __future__ import annotations

import os
import re
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final, TypeVar

from nixl_tiers.base.chunk import PAGE, key_of_object
from nixl_tiers.base.manifest import MANIFEST_NAME, REFRESH_S, Manifest
from nixl_tiers.cli.storage.base import Checked, Namespace, Pace, Problems, Step, Storage, Unusable, Victims
from nixl_tiers.cli.storage.reading import RowBuffer, folders, manifest_in
from nixl_tiers.cli.storage.seals import defect
from nixl_tiers.tiers.folder import taken_bytes

_NAMESPACE: Final = re.compile(r"[0-9a-f]{32}")
_FANOUT: Final = re.compile(r"[0-9a-f]{2}")
_SUFFIX: Final = ".row"

T = TypeVar("T")


class RowFileStorage(Storage):
    def __init__(self, path: Path) -> None:
        self._path = path

    def namespaces(self, step: Step, *, old_versions: bool = False) -> list[Namespace]:
        try:
            homes = [home for home in folders(self._path) if _NAMESPACE.fullmatch(home.name)]
        except OSError as error:
            raise Unusable(f"{self._path} cannot be read ({error.strerror})") from None
        return [self._describe(home, step) for home in homes]

    def _describe(self, home: Path, step: Step) -> Namespace:
        rows, nbytes, times, problems, manifest = 0, 0, list[float](), Problems(), None
        for _, status in _rows(home, step, problems):
            rows += 1
            nbytes += taken_bytes(status)
            times = [min([*times[:1], status.st_mtime]), max([*times[1:], status.st_mtime])]
        try:
            manifest = manifest_in(home)
        except OSError as error:
            problems.add(home / MANIFEST_NAME, error)
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
            problem=str(problems),
        )

    def check(self, namespace: Namespace, pace: Pace) -> Iterator[Checked]:
        home = Path(namespace.place, namespace.name)
        digest = bytes.fromhex(namespace.name)
        problems = Problems()
        with RowBuffer() as buffer:
            for path, status in _rows(home, lambda _: None, problems):
                pace.take(max(PAGE, status.st_size))
                key = bytes.fromhex(path.stem)
                try:
                    row = buffer.read(path, 0, max(PAGE, status.st_size))
                except OSError as error:
                    yield Checked(str(path), 0, "unreadable", str(error.strerror))
                    continue
                if row is None:
                    yield Checked(str(path), 0, "changed")
                elif reason := defect(row, digest, key):
                    yield Checked(str(path), len(row), "corrupt", reason)
                else:
                    yield Checked(str(path), len(row), "ok")
        if problem := str(problems):
            raise Unusable(problem)

    def victims(self, namespace: Namespace, before_s: float | None) -> Victims:
        rows, nbytes, problems = 0, 0, Problems()
        for _, status in _rows(Path(namespace.place, namespace.name), lambda _: None, problems):
            if before_s is None or status.st_mtime < before_s:
                rows += 1
                nbytes += taken_bytes(status)
        return Victims(rows, nbytes, problem=str(problems))

    def delete(self, namespace: Namespace, before_s: float | None, step: Step) -> str:
        problems = Problems()
        for path, status in self._selected(namespace, before_s, problems):
            try:
                now = path.lstat()  # an engine may have used or replaced it since
                if (now.st_ino, now.st_mtime_ns) == (status.st_ino, status.st_mtime_ns):
                    path.unlink()
            except FileNotFoundError:
                pass
            except OSError as error:
                problems.add(path, error, "deleted")
            step(1)
        if not namespace.holder:  # else its engine still needs the manifest
            ours = namespace.rows > 0 or namespace.manifest is not None
            _remove_empty(Path(namespace.place, namespace.name), manifest=ours)
        return str(problems)

    def _selected(
        self, namespace: Namespace, before_s: float | None, problems: Problems
    ) -> Iterator[tuple[Path, os.stat_result]]:
        """Rows that were there when the namespace was found, and were not used since."""
        newest_s = namespace.newest_s
        for path, status in _rows(Path(namespace.place, namespace.name), lambda _: None, problems):
            if (
                newest_s is not None
                and status.st_mtime <= newest_s
                and (before_s is None or status.st_mtime < before_s)
            ):
                yield path, status


def _rows(home: Path, step: Step, problems: Problems) -> Iterator[tuple[Path, os.stat_result]]:
    """What is deleted meanwhile is no problem."""
    for fanout in _read(home, folders, problems):
        if not _FANOUT.fullmatch(fanout.name):
            continue
        count = 0
        for entry in _read(fanout, lambda path: list(os.scandir(path)), problems):
            if not _is_row(fanout.name, entry.name):
                continue
            try:
                if entry.is_file(follow_symlinks=False):
                    yield Path(entry.path), entry.stat(follow_symlinks=False)
                    count += 1
            except FileNotFoundError:
                pass
            except OSError as error:
                problems.add(entry.path, error)
        step(count)


def _read(directory: Path, read: Callable[[Path], list[T]], problems: Problems) -> list[T]:
    try:
        return read(directory)
    except FileNotFoundError:
        return []
    except OSError as error:
        problems.add(directory, error)
        return []


def _is_row(fanout: str, name: str) -> bool:
    """Whether a tier makes a row file of that name in that directory; others are foreign."""
    return name.endswith(_SUFFIX) and key_of_object(f"{fanout}/{name.removesuffix(_SUFFIX)}") is not None


def _remove_empty(home: Path, *, manifest: bool) -> None:
    """The directories of a namespace without rows, and its `manifest`. An engine that uses it makes them again."""
    with suppress(OSError):
        for fanout in folders(home):
            if _FANOUT.fullmatch(fanout.name):
                with suppress(OSError):
                    fanout.rmdir()
        if manifest and not any(_rows(home, lambda _: None, problems := Problems())) and not str(problems):
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
