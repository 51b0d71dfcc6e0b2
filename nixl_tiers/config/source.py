"""Reads a configuration into plain values: from JSON or YAML text, or from vLLM's --kv-transfer-config."""

from __future__ import annotations

import json
from collections.abc import Hashable, Iterable, Mapping
from pathlib import Path
from typing import Any, Final

import yaml

from nixl_tiers.config.errors import ConfigError

MAX_FILE_BYTES: Final = 1 << 20
SPEC: Final = "NixlTiersSpec"
CONNECTORS: Final = ("OffloadingConnector", "NixlTiersConnector")
_EXTRA: Final = "kv_connector_extra_config"

# Fields of kv_connector_extra_config that are vLLM's own.
VLLM_FIELDS: Final = frozenset(
    {
        "spec_name",
        "spec_module_path",
        "blocks_per_chunk",
        "block_size",
        "offload_prompt_only",
        "self_describing_kv_events",
        "canonical_layout",
        "sync_load_budget_bytes",
    }
)


def ours(raw: object) -> Any:
    """The part of `raw` that configures nixl_tiers: all of it, unless `raw` is vLLM's --kv-transfer-config or its
    kv_connector_extra_config.

    Raises ConfigError for a --kv-transfer-config with which vLLM would not use nixl_tiers.
    """
    if not isinstance(raw, Mapping):
        return raw
    if raw.get("spec_name") == SPEC:
        return without_vllm(raw)
    if not {"kv_connector", _EXTRA} & set(raw):
        return raw
    extra = raw.get(_EXTRA)
    if not isinstance(extra, Mapping):
        raise ConfigError(f"{_EXTRA}: must be a table of fields with the tiers in it")
    if isinstance(children := extra.get("connectors"), list):  # of a MultiConnector
        mine = next((child for child in children if _names_us(child)), None)
        if mine is None:
            raise ConfigError(f'{_EXTRA}.connectors: none of them has the spec_name "{SPEC}"')
        return ours(mine)
    if raw.get("kv_connector") not in CONNECTORS and "kv_connector_module_path" not in raw:
        raise ConfigError(f'kv_connector: must be "{CONNECTORS[0]}" or "{CONNECTORS[1]}", else vLLM uses no tiers')
    if extra.get("spec_name") != SPEC:
        raise ConfigError(f'{_EXTRA}.spec_name: must be "{SPEC}", else vLLM does not use these tiers')
    return without_vllm(extra)


def connector_of(source: Mapping[str, Any] | str | Path) -> str:
    """The `kv_connector` by which vLLM uses nixl_tiers, if `source`, as for `schema.load`, is a --kv-transfer-config;
    else "". Raises ConfigError."""
    raw = taken(source)
    raw = read(raw) if isinstance(raw, Path) else raw
    extra = raw.get(_EXTRA) if isinstance(raw, Mapping) else None
    if isinstance(extra, Mapping) and isinstance(children := extra.get("connectors"), list):
        raw = next((child for child in children if _names_us(child)), None)
    return str(raw.get("kv_connector", "")) if isinstance(raw, Mapping) else ""


def taken(source: object) -> Any:
    """The parsed JSON text, the path of a file, or what is neither. Raises ConfigError."""
    if isinstance(source, str):
        return from_json(source) if source.lstrip().startswith(("{", "[")) else Path(source)
    return source


def without_vllm(extra: Mapping[str, Any]) -> dict[str, Any]:
    """kv_connector_extra_config without the fields that are vLLM's own."""
    return {name: value for name, value in extra.items() if name not in VLLM_FIELDS}


def _names_us(child: object) -> bool:
    extra = child.get(_EXTRA) if isinstance(child, Mapping) else None
    return isinstance(extra, Mapping) and extra.get("spec_name") == SPEC


def pointer(raw: object) -> Path | None:
    """The path in `{"config": PATH}`; None for anything else. Raises ConfigError."""
    if not isinstance(raw, Mapping) or "config" not in raw:
        return None
    if not isinstance(raw["config"], (str, Path)):
        raise ConfigError("config: must be the path of a .json, .yaml or .yml file")
    if len(raw) > 1:
        raise ConfigError("config: excludes all other fields; write them into the file that it names")
    return Path(raw["config"])


class _UniqueLoader(yaml.SafeLoader):
    """YAML in which a duplicate key is an error; by default the last one wins."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        _refuse_duplicates((self.construct_object(key, deep=True), key.start_mark.line + 1) for key, _ in node.value)
        return super().construct_mapping(node, deep)


def _refuse_duplicates(names: Iterable[tuple[object, int]]) -> None:
    """Raise ConfigError for a duplicate. names: (name, line number or 0)."""
    seen: set[str] = set()
    for name, line in names:
        if str(name) in seen:
            raise ConfigError(f"{name}: duplicate field in the same table{f' (line {line})' if line else ''}")
        seen.add(str(name))


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    _refuse_duplicates((name, 0) for name, _ in pairs)
    return dict(pairs)


def from_json(text: str, place: str = "the configuration") -> Any:
    """Parse JSON. place: what error messages call the text. Raises ConfigError."""
    try:
        return json.loads(text, object_pairs_hook=_unique)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{place}: not valid JSON in line {error.lineno} ({error.msg})") from None
    except ConfigError as error:
        raise ConfigError(f"{place}: {error}") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{place}: not valid JSON ({_why(error)})") from None


def _from_yaml(text: str, place: str) -> Any:
    try:
        return yaml.load(text, Loader=_UniqueLoader)  # noqa: S506 - it is a SafeLoader
    except yaml.YAMLError as error:
        mark, begun = (getattr(error, name, None) for name in ("problem_mark", "context_mark"))
        where = f" in line {mark.line + 1}" if mark else ""
        since = f", begun in line {begun.line + 1}" if begun and mark and begun.line < mark.line else ""
        what = getattr(error, "problem", None) or "unreadable"
        raise ConfigError(f"{place}: not valid YAML{where} ({what}{since})") from None
    except ConfigError as error:
        raise ConfigError(f"{place}: {error}") from None
    except (ValueError, TypeError, RecursionError) as error:
        raise ConfigError(f"{place}: not valid YAML ({_why(error)})") from None


def _why(error: Exception) -> str:
    # Not the exception's text: it may repeat the value (a 13th month, a number of 5000 digits).
    return "nested too deeply" if isinstance(error, RecursionError) else "a value that cannot be read"


def read(path: Path) -> object:
    """Parse the file `path`, without validation. Raises ConfigError, which names the file."""
    if path.suffix not in (".json", ".yaml", ".yml"):
        raise ConfigError(f"{path}: a configuration file must end in .json, .yaml or .yml")
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_FILE_BYTES + 1)
        text = raw.decode("utf-8-sig")
    except (OSError, ValueError) as error:
        if isinstance(error, UnicodeDecodeError):
            raise ConfigError(f"{path}: is not UTF-8 text") from None
        why = error.strerror if isinstance(error, OSError) else "not a path"
        raise ConfigError(f"{path}: cannot be read ({why})") from None
    if len(raw) > MAX_FILE_BYTES:
        raise ConfigError(f"{path}: is larger than {MAX_FILE_BYTES >> 20} MiB, so it is no configuration")
    if not text.strip():
        raise ConfigError(f"{path}: is empty")
    return from_json(text, str(path)) if path.suffix == ".json" else _from_yaml(text, str(path))
