"""The vLLM that is installed has the interface that we use, and a newer one is asked at its start."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import pytest
from typing_extensions import override

pytest.importorskip("vllm")

from nixl_tiers.vllm import compat, contract
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


def test_a_method_that_vllm_no_longer_calls_is_a_difference() -> None:
    submit: Callable[..., bool] = lambda self, job, spec, expedited=False: True  # noqa: E731
    gone: Callable[..., None] = lambda self: None  # noqa: E731
    assert differences(submit=submit, gone=gone) == ["Theirs has no method gone any more"]
    assert differences(submit=submit, lock=property(lambda self: None)) == []
    assert differences(submit=submit, several=lambda self, *args, **kwargs: None) == []


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


@pytest.mark.parametrize("version", [(0, 26), contract.NEWEST, None])
def test_versions_that_were_tried_are_not_asked(
    version: tuple[int, int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(contract, "differences", lambda: pytest.fail("asked"))
    contract.check_newer(version)


def test_the_classes_that_are_compared_are_vllms() -> None:
    theirs = {cls.__name__ for _, cls in contract._classes()}
    assert {"OffloadingSpec", "OffloadingManager", "OffloadingWorker", "OffloadingConnector"} == theirs
