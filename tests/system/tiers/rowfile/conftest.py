"""A directory of row files, as in the pure tree."""

from tests.tiers.rowfile.conftest import directory

__all__ = ["directory"]
