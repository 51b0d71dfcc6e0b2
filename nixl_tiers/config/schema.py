"""The one configuration: a dict, a JSON file or a YAML file becomes a checked, frozen `TiersConfig`.

Whatever is wrong is told as one sentence that names the field (`ConfigError`), before anything is started
and without touching the network. Secrets never stand in a configuration, because engines log it and it stands
on command lines: the schema only has fields that say where a secret is kept.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    JsonValue,
    TypeAdapter,
    ValidationError,
    model_validator,
)
from pydantic.fields import FieldInfo

from nixl_tiers.config import fields
from nixl_tiers.config import source as config_source
from nixl_tiers.config.errors import ConfigError, refuse_secrets, sentence
from nixl_tiers.config.fields import (
    MAX_CAPACITY_BYTES,
    format_seconds,
    format_size,
    parse_age,
    parse_seconds,
    parse_size,
)
from nixl_tiers.mounts import nearest, not_mounted

__all__ = [
    "MAX_CAPACITY_BYTES",
    "AbsolutePath",
    "Age",
    "ConfigError",
    "CpuConfig",
    "EnvironmentName",
    "Eviction",
    "FileConfig",
    "S3Config",
    "Seconds",
    "Size",
    "Sse",
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
]

Size = Annotated[int, BeforeValidator(parse_size)]
Seconds = Annotated[float, BeforeValidator(parse_seconds)]  # a field adds its bounds
AbsolutePath = Annotated[Path, BeforeValidator(fields.absolute)]
EnvironmentName = Annotated[str | None, BeforeValidator(fields.environment_name)]
Write = Literal["through", "on_evict", "off"]
Eviction = Literal["lru", "s3fifo", "arc"]
Sse = Literal["AES256", "aws:kms", "aws:kms:dsse"]


def unset(field: FieldInfo) -> str:
    """What holds while a field whose default is None is not given, for people; "" where that needs no words."""
    extra = field.json_schema_extra
    return str(extra.get("unset", "")) if isinstance(extra, dict) else ""


def _unset(meaning: str) -> dict[str, JsonValue]:
    return {"unset": meaning}


EvictionField = Annotated[Eviction, Field(description="eviction policy")]
WriteField = Annotated[
    Write,
    BeforeValidator(fields.write_policy),
    Field(
        description="`through`: every chunk is written; `on_evict`: when the tier above evicts it (write-back); "
        "`off`: read only"
    ),
]
Age = Annotated[
    float | None,
    BeforeValidator(parse_age),
    Field(
        description="chunks older than this (TTL) are misses, and are deleted",
        json_schema_extra=_unset("none, chunks stay for as long as they fit"),
    ),
]


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=False, allow_inf_nan=False, protected_namespaces=())


class CpuConfig(_Model):
    """The host tier: `capacity` bytes of memory per node."""

    type: Literal["cpu"] = Field(description="kind of the tier")
    capacity: Size = Field(description="budget in host memory, per node")
    eviction: EvictionField = "lru"


class FileConfig(_Model):
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
    write: WriteField = "through"
    eviction: EvictionField = "lru"
    max_age: Age = None

    @property
    def place(self) -> str:
        """Where it is, for people."""
        return str(self.path)


class S3Config(_Model):
    """A prefix of a bucket. Without any credential field: the usual AWS chain."""

    type: Literal["s3"] = Field(description="kind of the tier")
    bucket: Annotated[str, BeforeValidator(fields.bucket)] = Field(description="name of the bucket")
    prefix: Annotated[str, BeforeValidator(fields.prefix)] = Field(
        "nixl-tiers",
        description="where in the bucket the tier's objects are",
    )
    endpoint: Annotated[str | None, BeforeValidator(fields.endpoint)] = Field(
        None,
        description="URL of the server, `http:` or `https:`",
        json_schema_extra=_unset("AWS"),
    )
    region: Annotated[str | None, BeforeValidator(fields.region)] = Field(
        None,
        description="region that requests are signed for",
        json_schema_extra=_unset("AWS_REGION, AWS_DEFAULT_REGION, the profile's, or the bucket's own"),
    )
    capacity: Size = Field(description="budget of all rows below `prefix`, of all namespaces that ever lived there")
    shared: bool = Field(
        False,
        strict=True,
        description="several engines use this prefix, find each other's chunks and keep its `capacity` together",
    )
    write: WriteField = "through"
    eviction: EvictionField = "lru"
    max_age: Age = None
    profile: Annotated[str, Field(min_length=1, max_length=128)] | None = Field(
        None,
        description="profile of AWS's own files that has the credentials",
    )
    credentials_file: AbsolutePath | None = Field(
        None,
        description="file that has the credentials, in the format of AWS's `credentials` file",
    )
    access_key_env: EnvironmentName = Field(
        None,
        description="name of the environment variable that holds the access key id",
    )
    secret_key_env: EnvironmentName = Field(
        None,
        description="name of the environment variable that holds the secret key",
    )
    session_token_env: EnvironmentName = Field(
        None,
        description="name of the environment variable that holds the session token",
    )
    ca_file: AbsolutePath | None = Field(None, description="certificates (PEM) that verify the endpoint")
    sse: Sse | None = Field(
        None,
        description="default encryption that the bucket must have; the tier is down while it has another",
    )
    sse_key: Annotated[str, Field(min_length=1, max_length=2048)] | None = Field(
        None,
        description="KMS key that this encryption must use: its id, alias or ARN",
    )

    @property
    def place(self) -> str:
        """Where it is, for people."""
        return f"s3://{self.bucket}/{self.prefix}" + (f" on {self.endpoint}" if self.endpoint else "")

    @model_validator(mode="after")
    def _agree(self) -> S3Config:
        if (self.access_key_env is None) != (self.secret_key_env is None):
            given, missing = ("access", "secret") if self.access_key_env else ("secret", "access")
            raise ValueError(f"{given}_key_env needs {missing}_key_env beside it")
        if self.session_token_env and not self.access_key_env:
            raise ValueError("session_token_env needs access_key_env and secret_key_env beside it")
        ways = [way for way in ("profile", "credentials_file", "access_key_env") if getattr(self, way) is not None]
        if len(ways) > 1:
            raise ValueError(f"{' and '.join(ways)} are different ways to find credentials; give one")
        if self.ca_file and self.endpoint and self.endpoint.startswith("http:"):
            raise ValueError("ca_file has no use with an endpoint that begins with http:")
        if self.sse_key and self.sse in (None, "AES256"):
            raise ValueError('sse_key needs sse: "aws:kms" or "aws:kms:dsse" beside it')
        return self


StorageConfig = FileConfig | S3Config
TierConfig = Annotated[CpuConfig | FileConfig | S3Config, Field(discriminator="type")]


class TiersConfig(_Model):
    """What `load` returns."""

    tiers: tuple[TierConfig, ...] = Field(
        description="the cpu tier first and once, then storage tiers in the order in which they are searched",
    )
    model_id: Annotated[str, Field(min_length=1, max_length=512)] | None = Field(
        None,
        description="names the weights, where they cannot be identified by their files",
        json_schema_extra=_unset("the weights are recognised by their files"),
    )
    salt: Annotated[str, Field(max_length=512)] = Field(
        "",
        description="engines with different salts never share a chunk; not a secret",
    )
    lora_storage: bool = Field(
        False,
        strict=True,
        description="allows storage tiers with LoRA, of whose adapters vLLM hashes the names only",
    )
    on_reset: Literal["new_epoch", "keep"] = Field(
        "new_epoch",
        description="`new_epoch`: after sleep or a weight update nothing stored before is a hit; `keep`: "
        "it stays valid",
    )
    wait_s: Annotated[Seconds, Field(gt=0, le=3600)] = Field(
        10.0,
        description="the longest that a request waits for chunks to be promoted (prefetched) from storage",
    )
    probe_s: Annotated[Seconds, Field(ge=0, le=60)] = Field(
        0.25,
        description="the longest that a request waits for existence checks on a shared prefix, of chunks "
        "that another engine may have stored; 0: no checks",
    )
    ready_s: Annotated[Seconds, Field(ge=0, le=3600)] | None = Field(
        None,
        description="the longest that opening waits for tiers to list what they hold; 0: not at all",
        json_schema_extra=_unset("10 s in nixl_tiers.open, 3 s in vLLM"),
    )
    flush_on_exit_s: Annotated[Seconds, Field(ge=0, le=3600)] = Field(
        0.0,
        description="the longest that closing waits for chunks that no tier with `write: on_evict` holds yet",
    )
    replicas: Annotated[int, Field(strict=True, ge=1, le=1024)] | None = Field(
        None,
        description="how many data-parallel engines of this node share the `capacity` of the cpu tier",
        json_schema_extra=_unset("as vLLM says"),
    )

    @model_validator(mode="after")
    def _agree(self) -> TiersConfig:
        kinds = [tier.type for tier in self.tiers]
        if not kinds or kinds[0] != "cpu" or kinds.count("cpu") > 1:
            raise ValueError('tiers: the first tier must be the "cpu" tier, and the only one of that type')
        for i, tier in enumerate(self.tiers):
            for j, other in enumerate(self.tiers[:i]):
                if _overlap(tier, other):
                    raise ValueError(f"tiers[{i}]: shares its place with tiers[{j}], so neither budget could hold")
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
        """One name a storage tier: its type, numbered from the second of a type on ("file", "file2", "s3", "s3-2")."""
        names: list[str] = []
        seen: dict[str, int] = {}
        for tier in self.storage:
            number = seen[tier.type] = seen.get(tier.type, 0) + 1
            dash = "-" if tier.type[-1].isdigit() else ""
            names.append(tier.type if number == 1 else f"{tier.type}{dash}{number}")
        return tuple(names)


def _overlap(one: BaseModel, other: BaseModel) -> bool:
    if isinstance(one, FileConfig) and isinstance(other, FileConfig):
        return one.path.is_relative_to(other.path) or other.path.is_relative_to(one.path)
    if (
        isinstance(one, S3Config)
        and isinstance(other, S3Config)
        and (one.endpoint, one.bucket)
        == (
            other.endpoint,
            other.bucket,
        )
    ):
        return f"{one.prefix}/".startswith(f"{other.prefix}/") or f"{other.prefix}/".startswith(f"{one.prefix}/")
    return False


_MODELS: Final[dict[str, type[BaseModel]]] = {"cpu": CpuConfig, "file": FileConfig, "s3": S3Config}
_TIER: Final[TypeAdapter[CpuConfig | FileConfig | S3Config]] = TypeAdapter(TierConfig)


def load(source: Mapping[str, Any] | str | Path) -> TiersConfig:
    """The configuration in `source`: a dict, JSON text, or the path of a .json, .yaml or .yml file.

    Each of them may be the whole value of vLLM's --kv-transfer-config. A dict that holds nothing but
    `{"config": PATH}` stands for that file. Raises ConfigError.
    """
    raw: object = source
    if isinstance(source, str) and source.lstrip().startswith(("{", "[")):
        raw = config_source.from_json(source)
    if isinstance(raw, (str, Path)):
        return _from_file(Path(raw))
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
    try:
        refuse_secrets(raw)
        return TiersConfig.model_validate(dict(raw))
    except RecursionError:
        raise ConfigError("tiers: is nested too deeply, or within itself") from None
    except ValidationError as error:
        # Not chained: the original's text repeats the input, whatever stands in it.
        raise ConfigError(sentence(error.errors(), TiersConfig, _MODELS)) from None


def tier_to_dict(tier: StorageConfig) -> dict[str, Any]:
    """What travels to a tier's mover, as JSON types. Holds no secret, because no tier does."""
    return tier.model_dump(mode="json")


def tier_from_dict(raw: Mapping[str, Any]) -> StorageConfig:
    """The inverse of `tier_to_dict`. Raises ConfigError."""
    refuse_secrets(raw)
    try:
        tier = _TIER.validate_python(dict(raw))
    except ValidationError as error:
        raise ConfigError(sentence(error.errors(), TiersConfig, _MODELS)) from None
    if isinstance(tier, CpuConfig):
        raise ConfigError('type: "cpu" is not a storage tier')
    return tier


def check_paths(config: TiersConfig, create: bool = True) -> None:
    """Refuse directories that cannot be written, files that cannot be read and environment variables that are unset.

    With `create`, a missing directory of a file tier is made (mode 0700) and written to once, if all else is well;
    without it nothing is changed, and its nearest existing parent is looked at instead. Where `require_mount` is set
    and nothing is mounted, nothing is made: the tier is down until something is. Raises ConfigError.
    """
    for i, tier in enumerate(config.tiers):
        if isinstance(tier, FileConfig):
            _check_directory(f"tiers[{i}].path", tier, create)
        elif isinstance(tier, S3Config):
            for field in ("credentials_file", "ca_file"):
                path = getattr(tier, field)
                if path is not None and not (path.is_file() and os.access(path, os.R_OK)):
                    raise ConfigError(f"tiers[{i}].{field}: there is no readable file at {path}")
            for field in ("access_key_env", "secret_key_env", "session_token_env"):
                name = getattr(tier, field)
                if name is not None and not os.environ.get(name):
                    raise ConfigError(f"tiers[{i}].{field}: the environment variable {name} is not set")
    for i, tier in enumerate(config.tiers):
        if create and isinstance(tier, FileConfig) and not (tier.require_mount and not_mounted(tier.path)):
            _make_directory(f"tiers[{i}].path", tier.path)


def _check_directory(field: str, tier: FileConfig, starting: bool) -> None:
    """`starting`: a missing mount may come later."""
    path = tier.path
    try:
        missing = not_mounted(path) if tier.require_mount else ""
        parent = nearest(path)
    except OSError as error:
        raise ConfigError(f"{field}: cannot write to {path} ({error.strerror})") from None
    if missing and starting:
        return
    if missing:
        raise ConfigError(f"{field}: {missing}")
    if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
        raise ConfigError(f"{field}: cannot write to {path} ({parent} is not a writable directory)")


def _make_directory(field: str, path: Path) -> None:
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        raise ConfigError(f"{field}: cannot write to {path} ({error.strerror})") from None


def check_rows(config: TiersConfig, row_bytes: int) -> None:
    """Refuse a tier that does not hold one row of `row_bytes` bytes. Raises ConfigError."""
    for i, tier in enumerate(config.tiers):
        if tier.capacity < row_bytes:
            raise ConfigError(
                f"tiers[{i}].capacity: {format_size(tier.capacity)} does not hold one chunk, "
                f"which takes {format_size(row_bytes)} here"
            )
