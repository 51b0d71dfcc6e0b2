"""The configuration: loads a dict, a JSON or a YAML file into a validated, frozen `TiersConfig`.

Errors are raised as one sentence that names the field (`ConfigError`), before anything is started and without using the
network. A configuration holds no secrets, because it is logged and passed on command lines: fields only say where a
secret is kept.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from operator import methodcaller
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, Field, PlainValidator, TypeAdapter, ValidationError, WithJsonSchema, model_validator

from nixl_tiers.base.policies import DEFAULT_PROBE_S, DEFAULT_WAIT_S, Prefer, Write
from nixl_tiers.config import source as config_source
from nixl_tiers.config.errors import ConfigError, refuse_removed, refuse_secrets, sentence
from nixl_tiers.config.fields import (
    MAX_CAPACITY_BYTES,
    format_seconds,
    format_size,
    parse_age,
    parse_seconds,
    parse_size,
)
from nixl_tiers.config.file import FileConfig
from nixl_tiers.config.kinds import BUILT_IN, known_class, read_tier
from nixl_tiers.config.quotas import Quotas
from nixl_tiers.config.s3 import S3Config
from nixl_tiers.config.tier import (
    AbsolutePath,
    Age,
    CpuConfig,
    EnvironmentName,
    Model,
    Seconds,
    Size,
    StorageConfig,
    age_fields,
    pointer_fields,
    unset,
    when_unset,
)

__all__ = [
    "MAX_CAPACITY_BYTES",
    "AbsolutePath",
    "Age",
    "ConfigError",
    "CpuConfig",
    "EnvironmentName",
    "FileConfig",
    "S3Config",
    "Seconds",
    "Size",
    "StorageConfig",
    "TierConfig",
    "TiersConfig",
    "Write",
    "check_paths",
    "check_rows",
    "format_seconds",
    "format_size",
    "load",
    "parse_age",
    "parse_seconds",
    "parse_size",
    "tier_from_dict",
    "tier_to_dict",
    "unset",
]

# For the JSON schema: an installed package's class, of which nothing is known here, says what its fields are.
_ThirdParty = Annotated[
    dict[str, Any],
    WithJsonSchema(
        {
            "type": "object",
            "properties": {"type": {"type": "string", "not": {"enum": [*BUILT_IN]}}},
            "required": ["type"],
        }
    ),
]
TierConfig = Annotated[
    CpuConfig | StorageConfig,
    PlainValidator(read_tier, json_schema_input_type=CpuConfig | FileConfig | S3Config | _ThirdParty),
]


class TiersConfig(Model):
    """A whole, validated configuration."""

    tiers: tuple[TierConfig, ...] = Field(
        description="one cpu tier, then storage tiers in the order of search",
    )
    model_id: Annotated[str, Field(min_length=1, max_length=512)] | None = Field(
        None,
        description="identifies the weights, when they cannot be fingerprinted from their files",
        json_schema_extra=when_unset("a fingerprint of the files"),
    )
    salt: Annotated[str, Field(max_length=512)] = Field(
        "",
        description="engines with different salts never share a chunk; not a secret",
    )
    lora_storage: bool = Field(
        False,
        strict=True,
        description="allows storage tiers with LoRA, although vLLM hashes adapters by name only",
    )
    on_reset: Literal["new_epoch", "keep"] = Field(
        "new_epoch",
        description="stored chunks after a reset (sleep, pause): `new_epoch`: are never hits again; `keep`: stay valid",
    )
    wait_s: Annotated[Seconds, Field(gt=0, le=3600)] = Field(
        DEFAULT_WAIT_S,
        description="maximum time that a request waits for chunks from storage",
    )
    prefer: Prefer = Field(
        "latency",
        description="what loading is weighed against computing by: `latency`: time to first token, of the request and "
        "of those queued behind it; `throughput`: also the delay of requests that are decoding",
    )
    probe_s: Annotated[Seconds, Field(ge=0, le=60)] = Field(
        DEFAULT_PROBE_S,
        description="maximum time that a request waits for existence checks in a bucket or a directory with "
        "`layout: files`; with 0, which is withdrawn, an engine finds only what it stored since it started",
    )
    flush_on_exit_s: Annotated[Seconds, Field(ge=0, le=3600)] = Field(
        0.0,
        description="maximum time that closing waits to write chunks that no tier with `write: on_evict` holds yet",
    )
    replicas: Annotated[int, Field(strict=True, ge=1, le=1024)] | None = Field(
        None,
        description="number of engines of this node that share the `capacity` of the cpu tier and of file tiers with "
        "`layout: slabs`, and may use these paths at once",
        json_schema_extra=when_unset("taken from vLLM"),
    )

    quotas: Quotas = Field(
        default_factory=dict,
        description="which share of the tiers a tenant may have, by a name of yours: `{tenant-a: {share: 20%, "
        'salt_sha256: ...}, "*": {share: 10%}}` ([tenants](../guide/tenants.md))',
    )
    prefill_tokens_per_s: Annotated[int, Field(strict=True, ge=1, le=10**9)] | None = Field(
        None,
        description="prompt tokens that the engine computes per second, which loading is compared with",
        json_schema_extra=when_unset("measured while the engine runs, with NixlTiersConnector"),
    )

    @model_validator(mode="after")
    def _agree(self) -> TiersConfig:
        kinds = [tier.type for tier in self.tiers]
        if not kinds or kinds[0] != "cpu" or kinds.count("cpu") > 1:
            raise ValueError('tiers: the first tier must be the "cpu" tier, and the only one of that type')
        for i, tier in enumerate(self.tiers):
            for j, other in enumerate(self.tiers[:i]):
                if isinstance(tier, StorageConfig) and isinstance(other, StorageConfig) and tier.shares_place(other):
                    raise ValueError(f"tiers[{i}]: overlaps tiers[{j}], so neither capacity could be kept")
        return self

    @property
    def cpu(self) -> CpuConfig:
        first = self.tiers[0]
        assert isinstance(first, CpuConfig)
        return first

    @property
    def storage(self) -> tuple[StorageConfig, ...]:
        """The storage tiers in the order in which they are searched."""
        return tuple(tier for tier in self.tiers if not isinstance(tier, CpuConfig))

    @property
    def names(self) -> tuple[str, ...]:
        """One name per storage tier: its label, numbered from the second one on ("file", "file2", "s3", "s3-2")."""
        names: list[str] = ["cpu"]
        for label in (tier.label for tier in self.storage):
            dash = "-" if label[-1:].isdigit() else ""
            numbered = (f"{label}{dash}{number}" for number in itertools.count(2))
            names.append(next(name for name in itertools.chain([label], numbered) if name not in names))
        return tuple(names[1:])


_MODELS: Final[Mapping[str, type[BaseModel]]] = {"": TiersConfig, **BUILT_IN}
_TIER: Final[TypeAdapter[CpuConfig | StorageConfig]] = TypeAdapter(TierConfig)


def load(source: Mapping[str, Any] | str | Path) -> TiersConfig:
    """The configuration in `source`: a dict, JSON text, or the path of a .json, .yaml or .yml file.

    Each of them may be the whole value of vLLM's --kv-transfer-config. A dict that holds nothing but
    `{"config": PATH}` stands for that file. Raises ConfigError.
    """
    raw = config_source.taken(source)
    if isinstance(raw, Path):
        return _from_file(raw)
    ours = config_source.ours(raw)
    file = config_source.pointer(ours)
    return _checked(ours) if file is None else _from_file(file)


def _from_file(path: Path, pointed: bool = False) -> TiersConfig:
    raw = config_source.read(path)
    try:
        ours = config_source.ours(raw)
        file = config_source.pointer(ours)
        if file is None:
            return _checked(ours)
        if pointed or ours is raw:
            raise ConfigError("config: points to another file, and a file must hold the configuration itself")
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    return _from_file(file, pointed=True)


def _checked(raw: object) -> TiersConfig:
    if not isinstance(raw, Mapping):
        raise ConfigError("tiers: this field is missing, because the configuration is not a table of fields")
    tiers = raw.get("tiers")
    classes = [known_class(tier) for tier in tiers] if isinstance(tiers, (list, tuple)) else []
    refuse_removed(raw, classes)
    for i, model in enumerate(classes):
        for name in age_fields(model) if model is not None else ():
            if isinstance(age := raw["tiers"][i].get(name), (int, float)):
                raise ConfigError(f'tiers[{i}].{name}: {age} has no unit; write it as "7d", "12h" or "90m"')
    try:
        refuse_secrets(raw, _pointers(classes))
        return TiersConfig.model_validate(dict(raw))
    except RecursionError:
        raise ConfigError("tiers: is nested too deeply, or within itself") from None
    except ValidationError as error:
        # Not chained: the text of pydantic's error repeats the input, which may hold a secret.
        raise ConfigError(sentence(error.errors(), TiersConfig, classes, _MODELS)) from None


def _pointers(classes: Sequence[type[BaseModel] | None]) -> set[str]:
    """The fields of these tiers, and of the built-in ones, that say where a secret is kept."""
    return {name for model in (*BUILT_IN.values(), *classes) if model is not None for name in pointer_fields(model)}


def tier_to_dict(tier: StorageConfig) -> dict[str, Any]:
    """A tier's configuration as JSON types, to be sent to its mover. Holds no secret."""
    return tier.model_dump(mode="json")


def tier_from_dict(raw: Mapping[str, Any]) -> StorageConfig:
    """The inverse of `tier_to_dict`. Raises ConfigError."""
    model = known_class(raw)
    refuse_secrets(raw, _pointers([model]))
    try:
        tier = _TIER.validate_python(dict(raw))
    except ValidationError as error:
        raise ConfigError(sentence(error.errors(), model or StorageConfig, [], _MODELS)) from None
    if isinstance(tier, CpuConfig):
        raise ConfigError('type: "cpu" is not a storage tier')
    return tier


AllOf = Callable[[Sequence[Callable[[], Any]]], list[Any]]
"""Makes these calls: what each returned, None for those that did not answer in time."""


def in_turn(calls: Sequence[Callable[[], Any]]) -> list[Any]:
    return [call() for call in calls]


def check_paths(config: TiersConfig, create: bool = True, all_of: AllOf = in_turn) -> list[bool]:
    """Refuse directories that cannot be written, files that cannot be read and environment variables that are unset.
    Returns which storage tiers answered.

    With `create`, a missing directory of a file tier is made (mode 0700) and written to once, if all else is well;
    without it nothing is changed, and the nearest existing parent is checked instead. Where `require_mount` is set
    and nothing is mounted, nothing is made: the tier is down until something is. Raises ConfigError.
    """
    found: list[str | None] = [""] * len(config.storage)
    for step in (methodcaller("check_here", starting=create), methodcaller("prepare_here"))[: 1 + create]:
        left = [i for i, problem in enumerate(found) if problem == ""]
        for i, problem in zip(left, all_of([partial(_problem, step, config.storage[i]) for i in left]), strict=True):
            if problem:
                raise ConfigError(f"tiers[{i + 1}].{problem}")
            found[i] = problem
    return [problem is not None for problem in found]


def _problem(step: Callable[[StorageConfig], None], tier: StorageConfig) -> str:
    try:
        step(tier)
    except ConfigError as error:
        return str(error)
    except Exception as error:  # noqa: BLE001 (of a tier of others; no other tier is at fault)
        return f"type: {tier.type!r} cannot be checked, {type(error).__name__}: {error}"
    return ""


def check_rows(config: TiersConfig, row_bytes: int) -> None:
    """Refuse a tier that does not hold one row of `row_bytes` bytes. Raises ConfigError."""
    for i, tier in enumerate(config.tiers):
        parts = 1 if isinstance(tier, CpuConfig) else len(tier.members)
        if tier.capacity // parts < row_bytes:
            each = f", for each of {parts} directories," if parts > 1 else ""
            raise ConfigError(
                f"tiers[{i}].capacity: {format_size(tier.capacity)}{each} does not hold one chunk, "
                f"which takes {format_size(row_bytes)} here"
            )
