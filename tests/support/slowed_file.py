"""Configuration of a file tier that loads no faster than a medium of limited bandwidth."""

from __future__ import annotations

from typing import ClassVar

from nixl_tiers.config.schema import FileConfig


class SlowedFileConfig(FileConfig):
    """`speed`: a file that says how many MB/s loads get, all together, from now on; 0: as many as the disk gives."""

    type: str  # type: ignore[assignment]
    speed: str

    implementation: ClassVar[str] = "tests.support.slowed_tier:SlowedSlabTier"
    label: ClassVar[str] = "file"
