"""The vLLM that is installed has the interface that we use, and a newer one is asked at its start."""

from __future__ import annotations

import importlib
import logging
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import pytest
from typing_extensions import override

pytest.importorskip("vllm")

import nixl_tiers
from nixl_tiers.vllm import compat, contract, plugin
from nixl_tiers.vllm.spec import NixlTiersSpec


def test_this_vllm_has_what_we_use() -> None:
    assert contract.differences() == []


class Theirs(ABC):
    @abstractmethod
    def submit(self, job: int, spec: str, expedited: bool = False) -> bool: ...

    @property
    def lock(self) -> None:
        return None

    def several(self, *args: int, **kwargs: int) -> None:
        return None


def differences(**methods: Any) -> list[str]:
    for method in methods.values():
        override(getattr(method, "fget", method))
    return [*contract._of_methods(type("Ours", (Theirs,), methods), Theirs)]


@pytest.mark.parametrize(
    ("methods", "expected"),
    [
        ({"submit": lambda self, job, spec, expedited=False: True}, []),
        ({"submit": lambda self, job, spec, **more: True}, []),
        ({"submit": lambda self, job, spec, expedited=False, ours=1: True}, []),
        ({"submit": lambda self, job, spec: True}, ["Theirs.submit has another argument, expedited"]),
        ({"submit": lambda self, job, spec, expedited: True}, ["Theirs.submit has another argument, expedited"]),
        ({"submit": lambda self, job, spec, more, expedited=False: True}, ["Theirs.submit has another argument, more"]),
        ({}, ["Theirs has a method submit that has to be written"]),
    ],
)
def test_a_method_takes_what_vllm_passes(methods: dict[str, Any], expected: list[str]) -> None:
    assert differences(**methods) == expected


def test_a_field_that_is_gone_is_a_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    path = "vllm.v1.kv_offload.config.OffloadingGroupConfig"
    monkeypatch.setattr(contract, "FIELDS", {path: ("layer_names", "slots"), "vllm.no.such": (), f"{path}Two": ()})
    assert contract.differences()[:3] == [
        "OffloadingGroupConfig has no slots any more",
        "there is no vllm.no.such any more",
        f"there is no {path}Two any more",
    ]


def test_a_newer_vllm_starts_with_one_warning_if_nothing_differs(
    offloading_config: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(logging.getLogger("nixl_tiers"), "propagate", True)
    monkeypatch.setattr(compat, "version", lambda: (0, 99))
    monkeypatch.setattr(compat, "full_version", lambda: "0.99.0")
    monkeypatch.setattr(contract, "differences", list)
    NixlTiersSpec(offloading_config())
    newer = [text for text in caplog.messages if "vLLM 0.99.0 is newer than what was tried" in text]
    assert len(newer) == 1
    monkeypatch.setattr(contract, "differences", lambda: ["OffloadingManager has no method touch any more", "more"])
    with pytest.raises(compat.UnsupportedVllm, match=r"of vLLM 0\.99\.0: OffloadingManager has no method touch"):
        NixlTiersSpec(offloading_config())


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


def test_registering_twice_is_harmless() -> None:
    from vllm.v1.kv_offload.factory import OffloadingSpecFactory

    plugin.register()
    plugin.register()
    spec = OffloadingSpecFactory.get_spec_cls({"spec_name": "NixlTiersSpec"})
    assert spec.__name__ == "NixlTiersSpec"
