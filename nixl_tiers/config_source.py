"""Where a configuration comes from: the text of a JSON or YAML file, read into plain values."""

from __future__ import annotations

import json
from collections.abc import Hashable, Iterable
from pathlib import Path
from typing import Any

import yaml

from nixl_tiers.config_errors import ConfigError


class _UniqueLoader(yaml.SafeLoader):
    """YAML in which a field that stands twice is an error instead of the last one winning."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        _refuse_twins(self.construct_object(key, deep=True) for key, _ in node.value)
        return super().construct_mapping(node, deep)


def _refuse_twins(names: Iterable[object]) -> None:
    seen: set[str] = set()
    for name in map(str, names):
        if name in seen:
            raise ConfigError(f"{name}: this field stands twice in the same table")
        seen.add(name)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    _refuse_twins(name for name, _ in pairs)
    return dict(pairs)


def read(path: Path) -> object:
    """What stands in `path`, unchecked. Raises ConfigError, which names the file."""
    if path.suffix not in (".json", ".yaml", ".yml"):
        raise ConfigError(f"{path}: a configuration file must end in .json, .yaml or .yml")
    try:
        text = path.read_text(encoding="utf-8")
        if path.suffix == ".json":
            return json.loads(text, object_pairs_hook=_unique)
        return yaml.load(text, Loader=_UniqueLoader)  # noqa: S506 - it is a SafeLoader
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror})") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: is not UTF-8 text") from None
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    except json.JSONDecodeError as error:
        raise ConfigError(f"{path}: not valid JSON in line {error.lineno} ({error.msg})") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f" in line {mark.line + 1}" if mark else ""
        raise ConfigError(
            f"{path}: not valid YAML{where} ({getattr(error, 'problem', None) or 'unreadable'})"
        ) from None
