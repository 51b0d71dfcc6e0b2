"""The file tier's configuration, and what it needs of this machine."""

from __future__ import annotations

import os
import tempfile
from itertools import combinations
from pathlib import Path
from typing import Annotated, Any, ClassVar, Final, Literal

from pydantic import BeforeValidator, Field, ModelWrapValidatorHandler, PrivateAttr, model_validator

from nixl_tiers.base.mounts import identity, make_private, nearest, not_mounted
from nixl_tiers.base.policies import Write
from nixl_tiers.config import fields
from nixl_tiers.config.errors import ConfigError
from nixl_tiers.config.tier import Age, Size, StorageConfig, when_unset

MOST_PATHS: Final = 32


class FileConfig(StorageConfig):
    """A directory, or several: then `path` is the first of them, and `members` has all."""

    type: Literal["file"] = Field(description="kind of the tier")
    path: Annotated[Path, BeforeValidator(fields.absolute, json_schema_input_type=str | list[str])] = Field(
        description="directory of the tier; if missing, it and its parents are created with mode 0700. Or a list of "
        "directories, as a rule one a drive: one tier over all of them, with a mover and an equal part of the "
        "`capacity` for each"
    )
    capacity: Size = Field(description="budget of all rows under `path`, of all namespaces ever stored there")
    layout: Literal["slabs", "files"] = Field(
        "slabs",
        description="`slabs`: fastest, for a disk of this node; `files`: one file per chunk, for a "
        "directory that several engines share",
    )
    min_free: Annotated[int | str | None, BeforeValidator(fields.parse_min_free)] = Field(
        None,
        description="how much of the file system must stay free: with less, the tier stops growing, and still serves",
        json_schema_extra=when_unset("5 % of the file system, at most 50 GiB"),
    )
    require_mount: bool = Field(
        False,
        strict=True,
        description="the tier is down, and creates nothing, while `path` is on the file system of `/`, "
        "because its disk is not mounted",
    )
    backend: Annotated[Literal["auto", "posix", "gds_mt"], BeforeValidator(fields.file_backend)] = Field(
        "auto",
        description="what moves rows between host memory and slabs; `auto`: native threads (Linux AIO), or `posix` "
        "where they cannot start; `posix`: NIXL's plugin POSIX (Linux AIO); `gds_mt`: NIXL's GDS_MT (cuFile). With "
        "`layout: files` only `auto`: native threads",
    )
    max_age: Age = None

    on_disk: ClassVar[bool] = True
    absent_s: ClassVar[float] = 5.0  # a question to a file server costs less than one to a bucket
    _others: tuple[Path, ...] = PrivateAttr(())

    @model_validator(mode="wrap")
    @classmethod
    def _divide(cls, raw: Any, handler: ModelWrapValidatorHandler[FileConfig]) -> FileConfig:
        paths = raw.get("path") if isinstance(raw, dict) else None
        if not isinstance(paths, (list, tuple)) or not paths:
            return handler(raw)
        made = handler({**raw, "path": paths[0]})
        places = (made.path, *map(fields.absolute, paths[1:]))
        if made.layout == "files" and len(places) > 1:
            raise ValueError("path is one directory with layout: files, and no list")
        if len(places) > MOST_PATHS:
            raise ValueError(f"path has {len(places)} directories, and a tier has at most {MOST_PATHS}")
        for one, other in combinations(places, 2):
            if _overlap(one, other):
                raise ValueError(f"path: {one} and {other} overlap, so neither part of the capacity could be kept")
        return made.beside(places[1:])

    def beside(self, others: tuple[Path, ...]) -> FileConfig:
        """This tier is over these directories too."""
        self._others = others
        return self

    @property
    def members(self) -> tuple[FileConfig, ...]:
        """One for each directory."""
        if not self._others:
            return (self,)
        places = (self.path, *self._others)
        own = {"capacity": self.capacity // len(places)}
        return tuple(self.model_copy(update={**own, "path": path}).beside(()) for path in places)

    @model_validator(mode="after")
    def _agree(self) -> FileConfig:
        if self.write is Write.OFF and self.layout == "slabs":
            raise ValueError("write: off needs layout: files: only the engine that writes slabs reads them")
        if self.backend != "auto" and self.layout == "files":
            raise ValueError(f"backend: {self.backend} is for layout: slabs: native threads move the rows of files")
        return self

    @property
    def implementation(self) -> str:
        slabs = self.layout == "slabs"
        return "nixl_tiers.tiers.slab.tier:SlabTier" if slabs else "nixl_tiers.tiers.rowfile.tier:RowFileTier"

    @property
    def stored_rows(self) -> str:
        return f"nixl_tiers.tiers.{'slab' if self.layout == 'slabs' else 'rowfile'}.stored:find"

    @property
    def place(self) -> str:
        return ", ".join(map(str, (self.path, *self._others)))

    @property
    def identity(self) -> str:
        return "\n".join(sorted(identity(member.path) for member in self.members))

    @property
    def physical_slots(self) -> bool:
        return self.layout == "slabs"

    @property
    def asked(self) -> bool:
        return self.layout == "files"

    @property
    def locality(self) -> Literal["LOCAL", "REMOTE"] | None:
        return "LOCAL" if self.layout == "slabs" else None  # where a shared file system is cannot be known

    def shares_place(self, other: StorageConfig) -> bool:
        return isinstance(other, FileConfig) and any(
            _overlap(one.path, another.path) for one in self.members for another in other.members
        )

    def check_here(self, *, starting: bool) -> None:
        """A missing mount may come later."""
        super().check_here(starting=starting)
        for member in self.members:
            _check_path(member, starting=starting)

    def prepare_here(self) -> None:
        """Missing directories are made (mode 0700), and written to once; nothing is made without its mount, nor for a
        reader."""
        for member in self.members:
            if self.write == "off" or (self.require_mount and not_mounted(member.path)):
                continue
            try:
                make_private(member.path)
                with tempfile.TemporaryFile(dir=member.path):
                    pass
            except OSError as error:
                raise _unwritable(member.path, error.strerror) from None


def _overlap(one: Path, other: Path) -> bool:
    return one.is_relative_to(other) or other.is_relative_to(one)


def _check_path(member: FileConfig, *, starting: bool) -> None:
    path = member.path
    try:
        missing = not_mounted(path) if member.require_mount else ""
        parent = nearest(path)
    except OSError as error:
        raise _unwritable(path, error.strerror) from None
    if missing and starting:
        return
    if missing:
        raise ConfigError(f"path: {missing}")
    if member.write == "off":
        if not starting and not os.access(path, os.R_OK | os.X_OK):
            raise ConfigError(f"path: {path} is no directory that can be read, and `write` is off")
    elif not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
        raise _unwritable(path, f"{parent} is not a writable directory")


def _unwritable(path: Path, why: str | None) -> ConfigError:
    return ConfigError(f"path: cannot write to {path} ({why})")
