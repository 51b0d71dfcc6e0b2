"""Ranks that hold the same KV bytes share a cell, and others never do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm.model_executor.layers import linear

from nixl_tiers.memory.rendezvous import OtherSizes
from nixl_tiers.vllm.replicated import Copies, told
from nixl_tiers.vllm.spec import NixlTiersSpec
from tests.vllm.test_replicated import Projection


@pytest.fixture(autouse=True)
def projection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "QKVParallelLinear", Projection)


@pytest.mark.parametrize("confirm", [True, False])
def test_workers_and_scheduler_meet_whatever_the_layers_say(
    confirm: bool,
    offloading_config: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Workers come first: the scheduler takes their geometry, if it is the one without copies."""
    asked: list[tuple[int, int]] = []

    def meet(_name: str, geometry: Any, *_: object, copies: int, **__: object) -> Any:
        if asked and asked[0] != (geometry.cells, copies):
            asked.append((geometry.cells, copies))
            raise OtherSizes("other sizes")
        asked.append((geometry.cells, copies))
        raise KeyboardInterrupt

    monkeypatch.setattr("nixl_tiers.vllm.spec.rendezvous", meet)
    monkeypatch.setattr("nixl_tiers.vllm.spec.replicated.confirmed", lambda *_: confirm)
    with told(Copies(2, declared=False)):
        specs = [NixlTiersSpec(offloading_config(world_size=8)) for _ in range(2)]
    with pytest.raises(KeyboardInterrupt):
        specs[0].get_worker(None)  # type: ignore[arg-type]
    with pytest.raises(KeyboardInterrupt):
        specs[1].get_manager()
    assert asked == ([(4, 2), (4, 2)] if confirm else [(8, 1), (4, 2), (8, 1)])
    assert (specs[0].geometry, specs[0].rows) == (specs[1].geometry, specs[1].rows)
    assert ("its layers do not confirm it" in caplog.text) is not confirm
