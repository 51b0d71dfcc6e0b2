"""Coordinators without movers, as in the pure tree."""

from __future__ import annotations

from tests.runtime.test_mover_link import beside_loaders, coordinator

__all__ = ["beside_loaders", "coordinator"]
