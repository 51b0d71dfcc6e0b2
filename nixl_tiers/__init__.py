"""nixl_tiers: a multi-tier KV cache for vLLM. GPU -> pinned CPU -> file -> S3, moved by NIXL."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nixl_tiers.config.schema import ConfigError as ConfigError
    from nixl_tiers.store import TieredStore as TieredStore
    from nixl_tiers.store import open as open  # noqa: A004

    __version__: str

_HOMES = {"ConfigError": "nixl_tiers.config.schema", "TieredStore": "nixl_tiers.store", "open": "nixl_tiers.store"}


def __getattr__(name: str) -> Any:
    # Lazily: vLLM imports this package in processes that never use it.
    if name == "__version__":
        from importlib.metadata import PackageNotFoundError, version

        try:
            return version("nixl-tiers")
        except PackageNotFoundError:  # a checkout that is not installed
            return "0.0"
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*_HOMES, "__version__"])
