"""Names of rows below a prefix: `<prefix>/<namespace in hex>/<2 hex>/<key in hex>`."""

from __future__ import annotations

from functools import lru_cache
from typing import Final

from nixl_tiers.base.chunk import NAMESPACE_BYTES, Key, key_of_object, object_name
from nixl_tiers.base.manifest import MANIFEST_NAME

CONDITIONS_NAME: Final = ".probe"
"""Below the prefix, and the mover's ID: an object by which it finds out whether conditional writes are supported."""

RECENT_NAMES: Final = 2048  # more than transfers run at once: each of them asks several times

_HEX_DIGITS: Final = frozenset("0123456789abcdef")


def below(prefix: str, name: str) -> str:
    """An object's name below a prefix, which may be empty, as may be the name."""
    return f"{prefix}/{name}" if prefix and name else prefix or name


class RowNames:
    """Of one prefix. Objects with any other name are never counted or deleted."""

    def __init__(self, prefix: str) -> None:
        self.root = f"{prefix}/"
        self.name = lru_cache(RECENT_NAMES)(self._name)
        """The name of a row, by namespace in hexadecimal and key."""

    def _name(self, namespace: str, key: Key) -> str:
        return f"{self.root}{namespace}/{object_name(key)}"

    def manifest(self, namespace: str) -> str:
        return f"{self.root}{namespace}/{MANIFEST_NAME}"

    def parse(self, name: str) -> tuple[str, Key] | None:
        """(namespace, key), or None if this is not the name of a row."""
        if not name.startswith(self.root):
            return None
        namespace, _, rest = name[len(self.root) :].partition("/")
        if len(namespace) != 2 * NAMESPACE_BYTES or not _HEX_DIGITS.issuperset(namespace):
            return None
        key = key_of_object(rest)
        return None if key is None else (namespace, key)
