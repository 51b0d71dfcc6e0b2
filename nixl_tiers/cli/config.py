"""`nixl-tiers config FILE`: validates a configuration and prints what it means."""

from __future__ import annotations

from typing import Any, Final

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from nixl_tiers.config import schema
from nixl_tiers.config.schema import CpuConfig, S3Config, TiersConfig
from nixl_tiers.config.warnings import warnings_here, warnings_of

_MEANINGS: Final = {
    ("write", "through"): "every chunk is written",
    ("write", "on_evict"): "evicted chunks are written",
    ("write", "off"): "read only",
    ("on_reset", "new_epoch"): "stored chunks are no longer used",
    ("on_reset", "keep"): "stored chunks stay valid",
    ("lora_storage", True): "chunks of LoRA adapters are stored too",
}
_CREDENTIALS: Final = ("profile", "credentials_file", "access_key_env")


def check(source: str) -> int:
    """Print a summary of `source`, a file or JSON text, and warnings.

    Raises ConfigError. Changes nothing and uses no network: a missing directory is not created.
    """
    read = schema.load(source)
    schema.check_paths(read, create=False)
    print("\n".join(_summary(read)))
    for warning in (*warnings_of(read), *warnings_here(read)):
        print(f"warning: {warning}")
    return 0


def _summary(read: TiersConfig) -> list[str]:
    names = ("cpu", *read.names)
    lines: list[str] = []
    for i, (name, tier) in enumerate(zip(names, read.tiers, strict=True)):
        place = "host memory of this node" if isinstance(tier, CpuConfig) else tier.place
        lines += [f"tiers[{i}] {name}: {schema.format_size(tier.capacity)}, {place}", *_fields(tier), ""]
    return [*lines, "all tiers", *_fields(read), ""]


def _fields(model: BaseModel) -> list[str]:
    """One line per field that is set, and per default that matters."""
    rows = []
    for name, field in type(model).model_fields.items():
        value = getattr(model, name)
        given = name in model.model_fields_set
        if name in ("type", "tiers") or (not given and field.default in (None, "") and not schema.unset(field)):
            continue
        described = field.description if name.endswith("_s") else None
        meaning = _MEANINGS.get((name, value)) or (described or "").replace("`", "")
        rows.append((name, _shown(name, value, field) + ("" if given else " (default)"), meaning))
    if isinstance(model, S3Config) and all(getattr(model, way) is None for way in _CREDENTIALS):
        rows.append(("credentials", "the AWS chain (default)", ""))
    widest = max((len(name) for name, _, _ in rows), default=0)
    return [
        f"  {name:<{widest}}  {text}{f': {meaning}' if meaning else ''}".replace("`", "")
        for name, text, meaning in rows
    ]


def _shown(name: str, value: Any, field: FieldInfo) -> str:
    if value is None:
        return schema.unset(field) or "none"
    if isinstance(value, bool):
        return str(value).lower()
    if name in ("capacity", "min_free") and isinstance(value, int):
        return f"{schema.format_size(value)} ({value} bytes)"
    if name == "max_age" or name.endswith("_s"):
        return schema.format_seconds(value)
    return str(value)
