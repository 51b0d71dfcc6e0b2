"""Which GPUs the children of the doctor see: of cuFile's the one that is examined, and no other library any."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import IO, Any

import pytest

from nixl_tiers.cli.checks import tiers
from nixl_tiers.cli.children import Children
from nixl_tiers.cli.gds import report
from tests.support.file_tier import file_config

FINDINGS = {
    "gpus": [{"gpu": 0, "name": "A", "address": "0"}, {"gpu": 1, "name": "B", "address": "1"}],
    "library": [{"library": "/lib/libcufile.so.0"}],
}
Seen = list[tuple[list[str], str | None]]


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Seen:
    """What each child is asked, and its CUDA_VISIBLE_DEVICES."""
    seen: Seen = []

    class Ended:
        returncode = 0

        def __init__(self, command: list[str], *, stdout: IO[bytes], env: dict[str, str], **_: Any) -> None:
            seen.append((command[3:], env.get("CUDA_VISIBLE_DEVICES")))
            for finding in FINDINGS.get(command[3], []):
                stdout.write(json.dumps(finding).encode() + b"\n")

        def wait(self, _: float) -> int:
            return 0

        def poll(self) -> int:
            return 0

    monkeypatch.setattr(subprocess, "Popen", Ended)
    return seen


@pytest.mark.parametrize(
    ("inherited", "gpu", "given"),
    [(None, 1, "1"), ("3,5", 0, "3"), ("3,5", 1, "5"), ("GPU-1234,GPU-5678", 1, "GPU-5678"), ("3,5", 2, "")],
)
def test_gds_is_examined_with_one_gpu(  # noqa: PLR0917
    seen: Seen, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, inherited: str | None, gpu: int, given: str
) -> None:
    """cuFile opens what it sees: beside an engine, the GPUs of all ranks."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if inherited is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", inherited)
    probes = report._probe(Children(tmp_path, "probe", 1.0), tmp_path / "file", gpu)
    assert probes.mapped is not None or not given
    (gpus, all_of_them), *others = seen
    assert (gpus, all_of_them) == (["gpus"], inherited)
    assert {device for _, device in others} == {given}
    ordinals = {asked[0]: asked[2] for asked, _ in others if asked[0] == "driver"}
    assert ordinals == {"driver": "0" if given else "-1"}


def test_only_cufile_gets_a_gpu_from_the_doctor(seen: Seen, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    list(tiers.plugins(tmp_path, None))
    assert {asked[1]: device for asked, device in seen} == {"POSIX": "", "OBJ": "", "GDS_MT": "3"}
    seen.clear()
    for backend in ("posix", "gds_mt"):
        list(tiers.examine(tmp_path, file_config(tmp_path, 1 << 20, backend=backend)))
    assert [device for _, device in seen] == ["", "3"]
