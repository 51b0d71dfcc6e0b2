from __future__ import annotations

import importlib
import sys

import pytest

pytest.importorskip("vllm")

import nixl_tiers
from nixl_tiers.vllm import compat, plugin


@pytest.mark.parametrize("version", [(0, 31), (0, 9), (0, 11)])
def test_an_old_vllm_is_refused_in_one_sentence(version: tuple[int, int]) -> None:
    with pytest.raises(compat.UnsupportedVllm, match=rf"needs vLLM 0\.32 or newer, and this is 0\.{version[1]}"):
        compat.check(version)


@pytest.mark.parametrize("version", [(0, 32), (0, 33), (1, 0), None])
def test_a_new_or_unnumbered_vllm_is_not(version: tuple[int, int] | None) -> None:
    compat.check(version)


def test_an_unknown_interface_is_refused_in_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the first import of our package that vLLM makes."""
    from vllm.v1.kv_offload import base

    monkeypatch.delattr(base, "CanonicalKVCaches")
    monkeypatch.setattr(nixl_tiers, "vllm", nixl_tiers.vllm)
    for name in [name for name in sys.modules if name.startswith("nixl_tiers.vllm")]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(ImportError, match="CanonicalKVCaches") as raised:
        importlib.import_module("nixl_tiers.vllm.spec")
    assert type(raised.value).__name__ == "UnsupportedVllm"
    assert str(raised.value).startswith("nixl_tiers does not know the offloading interface of vLLM")


def test_a_histogram_begins_without_a_sample_whatever_else_the_statistics_hold() -> None:
    """From 0.33 on they have facts of the configuration besides, or None."""
    for more in ({}, {"info": None}, {"info": [{"model": "m"}]}):
        stats = compat.OffloadingConnectorStats()
        stats.data |= more
        compat.declare_histogram(stats, "h", ("cpu",))
        assert stats.data["data"] == {"h": {("cpu",): []}}


def test_registering_twice_is_harmless() -> None:
    from vllm.v1.kv_offload.factory import OffloadingSpecFactory

    plugin.register()
    plugin.register()
    spec = OffloadingSpecFactory.get_spec_cls({"spec_name": "NixlTiersSpec"})
    assert spec.__name__ == "NixlTiersSpec"
