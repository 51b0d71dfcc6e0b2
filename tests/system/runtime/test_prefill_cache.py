"""The prefill estimate survives a restart."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from nixl_tiers.base.chunk import Geometry, Namespace
from nixl_tiers.config import schema
from nixl_tiers.memory.region import HostRegion
from nixl_tiers.runtime.coordinator import Coordinator
from nixl_tiers.runtime.prefill_cache import PrefillCache

GEOMETRY = Geometry(cells=1, cell_payload=8192)
ONE, OTHER = Namespace.of({"model": 1}), Namespace.of({"model": 2})
Start = Callable[..., Coordinator]


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Start:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    def make(namespace: Namespace = ONE, device: str | None = "GPU", **fields: object) -> Coordinator:
        config = schema.load({"tiers": [{"type": "cpu", "capacity": 4 * GEOMETRY.row_bytes}], **fields})
        return Coordinator.open(config, namespace, HostRegion.create(GEOMETRY, 4), device=device)

    return make


def learn(coordinator: Coordinator, steps: int = 8) -> None:
    for _ in range(steps):
        coordinator.prefill.observe(1000, 500.0, 2.0)


def speed(coordinator: Coordinator) -> float:
    found = coordinator.counters()["cpu"]["prefill_tokens_per_s"]
    coordinator.close()
    return found


def test_speed_is_known_after_a_restart_of_the_same_model_on_the_same_device(start: Start) -> None:
    first = start()
    assert first.counters()["cpu"]["prefill_tokens_per_s"] == 0
    learn(first)
    learned = speed(first)
    assert learned == pytest.approx(500, rel=0.1)
    assert speed(start()) == pytest.approx(learned, rel=0.01)
    assert speed(start(OTHER)) == 0
    assert speed(start(device="another GPU")) == 0


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"samples": [[1, 2]]}', '{"samples": [["a", 1, 1]]}', "\xff"])
def test_damaged_file_is_learned_anew(start: Start, text: str) -> None:
    path = PrefillCache(ONE, "GPU").path
    assert path is not None
    path.parent.mkdir(parents=True)
    path.write_bytes(text.encode("latin1"))
    assert speed(start()) == 0
