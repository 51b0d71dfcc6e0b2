"""Configurations of the tiers that tests use: a tier in memory, and faults before any other tier."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, SerializeAsAny, model_validator

from nixl_tiers.config.kinds import read_tier
from nixl_tiers.config.schema import TiersConfig
from nixl_tiers.config.tier import StorageConfig


class MemoryConfig(StorageConfig):
    """`testing.memory.MemoryTier`: rows in the mover's own memory."""

    implementation: ClassVar[str] = "nixl_tiers.testing.memory:MemoryTier"
    physical_slots: ClassVar[bool] = True


class FaultyConfig(StorageConfig):
    """`testing.faulty.FaultyTier`: the tier `inner` behind a plan of faults. To the scheduler it is the tier inside."""

    inner: Annotated[SerializeAsAny[StorageConfig], BeforeValidator(read_tier)]
    plan: dict[str, Any]  # FaultPlan.to_dict

    implementation: ClassVar[str] = "nixl_tiers.testing.faulty:make_faulty"

    @model_validator(mode="before")
    @classmethod
    def _as_inner(cls, raw: Any) -> Any:
        if not isinstance(raw, Mapping) or not isinstance(inner := raw.get("inner"), (Mapping, StorageConfig)):
            return raw
        given = inner if isinstance(inner, Mapping) else inner.model_dump()
        return {name: given[name] for name in ("capacity", "write") if name in given} | dict(raw)

    @property
    def label(self) -> str:
        return self.inner.label

    @property
    def place(self) -> str:
        return self.inner.place

    @property
    def identity(self) -> str:
        return self.inner.identity

    @property
    def members(self) -> tuple[FaultyConfig, ...]:
        """The plan before each of those inside: faults of a key do not depend on which of them has it."""
        return tuple(self.model_copy(update={"inner": each, "capacity": each.capacity}) for each in self.inner.members)

    @property
    def physical_slots(self) -> bool:
        return self.inner.physical_slots

    @property
    def asked(self) -> bool:
        return self.inner.asked

    @property
    def absent_s(self) -> float:
        return self.inner.absent_s

    @property
    def locality(self) -> Literal["LOCAL", "REMOTE"] | None:
        return self.inner.locality

    @property
    def on_disk(self) -> bool:
        return self.inner.on_disk

    @property
    def secret_variables(self) -> list[str]:
        return self.inner.secret_variables

    def check_here(self, *, starting: bool) -> None:
        self.inner.check_here(starting=starting)

    def prepare_here(self) -> None:
        self.inner.prepare_here()


def with_faults(config: TiersConfig, plan: Mapping[str, object]) -> TiersConfig:
    """`config` with faults before its first storage tier."""
    cpu, first, *rest = config.tiers
    faulty = FaultyConfig.model_validate({"type": f"{__name__}:FaultyConfig", "inner": first, "plan": plan})
    return config.model_copy(update={"tiers": (cpu, faulty, *rest)})
