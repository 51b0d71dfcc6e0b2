"""What is stored in a directory with one file a row, as commands see it (`tiers/stored.py`)."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Final, Self

import numpy as np
from numpy.typing import NDArray

from nixl_tiers.base.chunk import NAMESPACE_NAME, PAGE
from nixl_tiers.base.manifest import MANIFEST_NAME, Manifest
from nixl_tiers.config.schema import FileConfig
from nixl_tiers.tiers.base import TierDown
from nixl_tiers.tiers.disk import read_past_cache
from nixl_tiers.tiers.folder import Folder, NotOwned, taken_bytes
from nixl_tiers.tiers.manifests import read_manifest
from nixl_tiers.tiers.rowfile.directory import row_files
from nixl_tiers.tiers.rowfile.names import FANOUT_NAME
from nixl_tiers.tiers.stored import NamespaceByKey, Problems, Step, StoredRow, reason

_LATELY_S: Final = 7200.0


def find(config: FileConfig, before_s: float | None) -> Iterator[FileNamespace]:
    """The namespaces below a path, for `find_stored`."""
    try:
        with Folder.to_inspect(config.path) as base:
            names = [name for name in sorted(base.names()) if NAMESPACE_NAME.fullmatch(name) and base.has_folder(name)]
    except OSError as error:
        raise TierDown(f"{config.path} cannot be read ({reason(error)})") from None
    return (FileNamespace.found(config.path, name, before_s) for name in names)


@dataclass(frozen=True)
class _File(StoredRow):
    folder: Folder  # open until the next row is asked for
    file: str
    status: os.stat_result


class FileNamespace(NamespaceByKey[_File]):
    layout: ClassVar[str] = "files"

    @classmethod
    def found(cls, path: Path, name: str, before_s: float | None) -> Self:
        found, raw, problems = cls(str(path), name, before_s), None, Problems()
        for row in found.stored(problems):
            found.count(row)
        with problems.reading(path / name / MANIFEST_NAME), found._opened() as home:
            raw = read_manifest(home)
        found.manifest = None if raw is None else Manifest.decode(raw)
        found.problem = str(problems)
        found.tell_last_use()
        found.holder = _user(found.manifest, found.last_used_s or 0.0)
        return found

    @contextmanager
    def _opened(self) -> Iterator[Folder]:
        with Folder.to_inspect(Path(self.place)) as base, base.folder(self.name) as home:
            yield home

    def stored(self, problems: Problems) -> Iterator[_File]:
        with problems.reading(Path(self.place, self.name)), self._opened() as home:
            for fanout in sorted(filter(FANOUT_NAME.fullmatch, home.names())):
                with problems.reading(home.path / fanout), home.folder(fanout) as folder:
                    for path, status in row_files(folder, self.name, fanout, problems):
                        full = f"{folder.path}/{path.name}"
                        yield _File(path.key, full, taken_bytes(status), status.st_mtime, folder, path.name, status)

    def read(self, row: _File) -> NDArray[np.uint8] | None:
        try:
            return read_past_cache(row.folder, row.file, 0, max(PAGE, row.status.st_size))
        except (FileNotFoundError, NotOwned):
            return None

    def delete(self, step: Step) -> None:
        problems = Problems()
        for row in self.counted(problems):
            with problems.reading(row.name, "deleted"):
                now = row.folder.stat(row.file)  # an engine may have used or replaced it since
                if (now.st_ino, now.st_mtime_ns) == (row.status.st_ino, row.status.st_mtime_ns):
                    row.folder.unlink(row.file)
            step(1)
        if not self.holder:  # else its engine still needs the manifest
            self._remove_if_empty()
        self.problem = str(problems) or self.problem

    def _remove_if_empty(self) -> None:
        """The directories of a namespace without rows, and its manifest. An engine that uses it makes them again."""
        with suppress(OSError), Folder.to_inspect(Path(self.place)) as base:
            with base.folder(self.name) as home:
                for fanout in filter(FANOUT_NAME.fullmatch, home.names()):
                    with suppress(OSError):
                        home.rmdir(fanout)
                ours = self.rows > 0 or self.manifest is not None
                if ours and not any(self.stored(problems := Problems())) and not str(problems):
                    with suppress(FileNotFoundError):
                        home.unlink(MANIFEST_NAME)
            base.rmdir(self.name)


def _user(manifest: Manifest | None, last_used_s: float) -> str:
    """Nothing is locked: what can be known is which engine has served it last, and whether that was lately."""
    if manifest is None or not manifest.engine:
        return ""
    host, _, rest = manifest.engine.partition("/")
    pid = rest.partition("/")[0]
    if host == socket.gethostname() and pid.isdigit():
        return f"process {pid} on {host}" if Path("/proc", pid).exists() else ""
    lately = time.time() - last_used_s < _LATELY_S
    return f"process {pid} on {host}, less than two hours ago" if lately else ""
