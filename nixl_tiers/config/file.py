"""The file tier's configuration, and what it needs of this machine."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import ClassVar, Literal

from pydantic import Field

from nixl_tiers.config.errors import ConfigError
from nixl_tiers.config.tier import AbsolutePath, Age, Size, StorageConfig
from nixl_tiers.mounts import nearest, not_mounted


class FileConfig(StorageConfig):
    """A directory."""

    type: Literal["file"] = Field(description="kind of the tier")
    path: AbsolutePath = Field(description="directory of the tier; made with mode 0700 if it does not exist")
    capacity: Size = Field(description="budget of everything below `path`, of all namespaces that ever lived there")
    layout: Literal["slabs", "files"] = Field(
        "slabs",
        description="`slabs`: fastest, for a disk of this node; `files`: one file a chunk, for a "
        "directory that several engines share",
    )
    require_mount: bool = Field(
        False,
        strict=True,
        description="the tier is down, and creates nothing, while `path` lies on the file system of `/` "
        "because its disk is not mounted",
    )
    backend: Literal["auto", "posix", "gds_mt"] = Field(
        "auto",
        description="NIXL plugin between host memory and files; `gds_mt`: GPUDirect Storage, `auto`: `posix`",
    )
    max_age: Age = None

    on_disk: ClassVar[bool] = True

    @property
    def implementation(self) -> str:
        slabs = self.layout == "slabs"
        return "nixl_tiers.tiers.slab.tier:SlabTier" if slabs else "nixl_tiers.tiers.rowfile.tier:RowFileTier"

    @property
    def place(self) -> str:
        return str(self.path)

    @property
    def physical_slots(self) -> bool:
        return self.layout == "slabs"

    @property
    def locality(self) -> Literal["LOCAL", "REMOTE"] | None:
        return "LOCAL" if self.layout == "slabs" else None  # where a shared file system is cannot be known

    def shares_place(self, other: StorageConfig) -> bool:
        return isinstance(other, FileConfig) and (
            self.path.is_relative_to(other.path) or other.path.is_relative_to(self.path)
        )

    def check_here(self, *, starting: bool) -> None:
        """A missing mount may come later."""
        super().check_here(starting=starting)
        try:
            missing = not_mounted(self.path) if self.require_mount else ""
            parent = nearest(self.path)
        except OSError as error:
            raise _unwritable(self.path, error.strerror) from None
        if missing and starting:
            return
        if missing:
            raise ConfigError(f"path: {missing}")
        if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
            raise _unwritable(self.path, f"{parent} is not a writable directory")

    def prepare_here(self) -> None:
        """A missing directory is made (mode 0700), and written to once; nothing is made without its mount."""
        if self.require_mount and not_mounted(self.path):
            return
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self.path):
                pass
        except OSError as error:
            raise _unwritable(self.path, error.strerror) from None


def _unwritable(path: Path, why: str | None) -> ConfigError:
    return ConfigError(f"path: cannot write to {path} ({why})")
