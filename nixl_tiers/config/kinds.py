"""Which class reads a tier's table, by its `type`: a built-in name, a name that an installed package registers under
the entry-point group `nixl_tiers.tiers`, or "package.module:Class"."""

from __future__ import annotations

import importlib
import re
from collections.abc import Mapping
from importlib.metadata import entry_points
from typing import Any, Final

from pydantic import ValidationError
from pydantic_core import InitErrorDetails, PydanticCustomError, PydanticKnownError

from nixl_tiers.config.fields import shown
from nixl_tiers.config.file import FileConfig
from nixl_tiers.config.s3 import S3Config
from nixl_tiers.config.tier import CpuConfig, StorageConfig

GROUP: Final = "nixl_tiers.tiers"
BUILT_IN: Final[Mapping[str, type[CpuConfig | StorageConfig]]] = {"cpu": CpuConfig, "file": FileConfig, "s3": S3Config}
_OBJECT: Final = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*", re.ASCII)


def class_of(kind: object) -> type[CpuConfig | StorageConfig]:
    """The configuration class of a tier's `type`. Imports a third-party tier's package.

    Raises ValueError with one sentence for what is no type of tier, or cannot be imported.
    """
    if isinstance(kind, str) and kind in BUILT_IN:
        return BUILT_IN[kind]
    named = shown(kind)
    found: object = None
    try:
        if isinstance(kind, str) and _OBJECT.fullmatch(kind):
            named = f'"{kind}"'
            found = import_object(kind)
        elif isinstance(kind, str) and (registered := tuple(entry_points(group=GROUP, name=kind))):
            found = registered[0].load()
    except Exception as error:  # noqa: BLE001 - importing runs any code
        raise ValueError(f"{named} cannot be imported ({in_one_line(error)})") from None
    if found is None:
        raise ValueError(
            f'must be "cpu", "file" or "s3", not {named}; the type of a third-party tier is '
            f'"package.module:Class", or a name that an installed package registers under {GROUP}'
        )
    if not isinstance(found, type) or not issubclass(found, StorageConfig):
        raise ValueError(f"{named} is not a class that derives from {StorageConfig.__module__}.StorageConfig")
    return found


def import_object(path: str) -> Any:
    """What "package.module:name" names. Raises ImportError, AttributeError, or anything that the module raises."""
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)


def in_one_line(error: BaseException) -> str:
    """An exception's kind and text, for a sentence."""
    return " ".join(f"{type(error).__name__}: {error}".split())


def known_class(raw: object) -> type[CpuConfig | StorageConfig] | None:
    """The class for a tier's table, or None if there is none."""
    try:
        return class_of(raw.get("type")) if isinstance(raw, Mapping) else None
    except ValueError:
        return None


def read_tier(raw: object) -> CpuConfig | StorageConfig:
    """A tier's table, checked. Raises the errors of pydantic."""
    if isinstance(raw, (CpuConfig, StorageConfig)):
        return raw
    if not isinstance(raw, Mapping):
        raise PydanticKnownError("model_type", {"class_name": "tier"})
    if "type" not in raw:
        raise _error_of_type("missing", raw)
    try:
        model = class_of(raw["type"])
    except ValueError as error:
        raise _error_of_type(_because(str(error)), raw["type"]) from None
    tier = model.model_validate(dict(raw))
    if isinstance(tier, StorageConfig) and not _OBJECT.fullmatch(tier.implementation):
        what = f'{model.__module__}:{model.__name__} has no implementation ("package.module:Name")'
        raise _error_of_type(_because(what), raw["type"])
    return tier


def _because(sentence: str) -> PydanticCustomError:
    return PydanticCustomError("tier_type", "{sentence}", {"sentence": sentence})


def _error_of_type(kind: str | PydanticCustomError, value: object) -> ValidationError:
    return ValidationError.from_exception_data("tier", [InitErrorDetails(type=kind, loc=("type",), input=value)])
