"""The base of every tier's configuration: fields that tiers have in common, and a storage tier's capabilities. Public:
third-party tiers derive from `StorageConfig` and use the types of its fields.

Light to import: neither numpy nor boto3, NIXL or torch.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Literal, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, JsonValue
from pydantic.fields import FieldInfo

from nixl_tiers.base.policies import HugePages, Write
from nixl_tiers.config import fields
from nixl_tiers.config.errors import ConfigError

# What a validator takes beside its field's type is said to it, for the JSON schema (`nixl-tiers config --schema`).
Size = Annotated[int, BeforeValidator(fields.parse_size, json_schema_input_type=int | str)]
Seconds = Annotated[float, BeforeValidator(fields.parse_seconds, json_schema_input_type=float | str)]  # without bounds
AbsolutePath = Annotated[Path, BeforeValidator(fields.absolute)]
EnvironmentName = Annotated[str | None, BeforeValidator(fields.environment_name)]
"""Names an environment variable that holds a credential: its value is removed from what the tier's mover logs."""


def unset(field: FieldInfo) -> str:
    """What holds while a field whose default is None is not given, for people; "" where that needs no words."""
    extra = field.json_schema_extra
    return str(extra.get("unset", "")) if isinstance(extra, dict) else ""


def when_unset(meaning: str) -> dict[str, JsonValue]:
    """`json_schema_extra` of a field whose default is None: what holds then (see `unset`)."""
    return {"unset": meaning}


WriteField = Annotated[
    Write,
    BeforeValidator(fields.bare_off, json_schema_input_type=Write | Literal[False]),
    Field(
        description="`through`: every chunk is written (write-through); `on_evict`: when the tier above evicts "
        "it (write-back); `off`: read only, whatever the `capacity` (not with `layout: slabs`)"
    ),
]
Age = Annotated[
    float | None,
    BeforeValidator(fields.parse_age, json_schema_input_type=str | None),
    Field(
        description="time to live: older chunks are misses, and are deleted",
        json_schema_extra=when_unset("none: chunks stay as long as they fit"),
    ),
]


class Model(BaseModel):
    """Frozen; unknown fields are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=False, allow_inf_nan=False, protected_namespaces=())


class CpuConfig(Model):
    """The host tier: `capacity` bytes of memory per node."""

    type: Literal["cpu"] = Field(description="kind of the tier")
    capacity: Size = Field(description="budget in host memory, per node")
    huge_pages: Annotated[
        HugePages, BeforeValidator(fields.bare_off, json_schema_input_type=HugePages | Literal[False])
    ] = Field(
        HugePages.AUTO,
        description="`auto`: transparent huge pages, where the kernel has them for shared memory; `hugetlb`: the "
        "machine's pool of 2 MiB pages, or as `auto` if it has too few; `off`: 4 KiB pages",
    )


class StorageConfig(Model):
    """A storage tier's fields, and its capabilities: what the scheduler's process knows of a tier, without importing
    its implementation.

    A subclass adds fields, and overrides capabilities: by a class attribute (`ClassVar`), or by a property where one
    follows from fields.
    """

    type: str = Field(description="kind of the tier")
    capacity: Size = Field(description="budget of everything that the tier stores on its medium")
    write: WriteField = Write.THROUGH

    # --- capabilities ---------------------------------------------------------------------------------------------

    @property
    def implementation(self) -> str:
        """ "package.module:Name" of what the mover calls with (this configuration, geometry, region) for a StorageTier.
        Imported by the mover only. Required."""
        return ""

    @property
    def stored_rows(self) -> str:
        """ "package.module:function" of what finds stored rows for the commands `inspect` and `purge`, called
        as `tiers.stored.find_stored` does. Empty: they cannot look at what this tier has stored."""
        return ""

    @property
    def label(self) -> str:
        """The tier's name in metrics and log lines; a second tier with this label gets a number."""
        return self.type if ":" not in self.type else type(self).__name__.removesuffix("Config").lower()

    @property
    def place(self) -> str:
        """Where the medium is, for people."""
        return self.type

    @property
    def identity(self) -> str:
        """What identifies the medium among those of all nodes: engines that use one medium say the same, so that it is
        counted once. Empty: it is this engine's own."""
        return "" if self.own else f"{self.type} {self.place}"

    @property
    def members(self) -> Sequence[StorageConfig]:
        """What each of the tier's movers is configured with: they have equal parts of the capacity, in places of their
        own, each with slots of its own (`physical_slots`)."""
        return (self,)

    @property
    def physical_slots(self) -> bool:
        """Whether a slot is a place on the medium. Otherwise rows are found by their keys, and slots only count."""
        return False

    @property
    def asked(self) -> bool:
        """Whether others store to this medium too, and the tier can check whether single keys are there."""
        return False

    @property
    def absent_s(self) -> float:
        """So long it is believed that a key is not there (`asked`), at most."""
        return math.inf

    @property
    def own(self) -> bool:
        """Whether no other engine stores to this medium, so that quotas hold there."""
        return not self.asked

    @property
    def locality(self) -> Literal["LOCAL", "REMOTE"] | None:
        """Whether the medium is on this node (vLLM's `kv_load_tiers`); None: not known, so never a reason to leave
        the tier out."""
        return None

    @property
    def on_disk(self) -> bool:
        """Whether vLLM counts hits as from disk."""
        return False

    @property
    def secret_variables(self) -> list[str]:
        """Environment variables that hold the tier's credentials: the values of its fields of type EnvironmentName."""
        named = [getattr(self, name) for name in variable_fields(type(self))]
        return [name for name in named if name is not None]

    def shares_place(self, other: StorageConfig) -> bool:
        """Whether both would keep their rows in one place, so neither capacity could be kept."""
        return False

    # --- what this machine must have ------------------------------------------------------------------------------

    def check_here(self, *, starting: bool) -> None:
        """Raise ConfigError, beginning with the field's name, for what this machine lacks. Creates nothing.

        starting: the tier is about to start, and what is missing may still come. A subclass that overrides this calls
        it too.
        """
        for field in variable_fields(type(self)):
            name = getattr(self, field)
            if name is not None and not os.environ.get(name):
                raise ConfigError(f"{field}: the environment variable {name} is not set")

    def prepare_here(self) -> None:
        """Make what the tier needs on this machine, once all tiers are checked. Raises ConfigError as check_here."""


def age_fields(model: type[BaseModel]) -> list[str]:
    """The fields of type Age."""
    return [name for name, field in model.model_fields.items() if _checked_by(field, fields.parse_age)]


def variable_fields(model: type[BaseModel]) -> list[str]:
    """The fields that name environment variables."""
    return [name for name, field in model.model_fields.items() if _checked_by(field, fields.environment_name)]


def pointer_fields(model: type[BaseModel]) -> set[str]:
    """The fields that say where a secret is kept, and so may sound like one: paths and names of variables."""
    paths = [name for name, field in model.model_fields.items() if _checked_by(field, fields.absolute)]
    return {*paths, *variable_fields(model)}


def _checked_by(field: FieldInfo, check: Callable[[object], object]) -> bool:
    nested = [part for kind in get_args(field.annotation) for part in getattr(kind, "__metadata__", ())]
    return any(getattr(part, "func", None) is check for part in (*field.metadata, *nested))
