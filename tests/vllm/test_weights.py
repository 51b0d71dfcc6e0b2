from __future__ import annotations

import shutil
from pathlib import Path

import pytest

pytest.importorskip("vllm")

from nixl_tiers.vllm.weights import UnknownWeights, digest_of_files, identify


def test_equal_files_elsewhere_are_equal_weights(weights_folder: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(weights_folder, tmp_path / "elsewhere")
    assert identify(str(weights_folder), None) == identify(str(copy), None)


def change_config(folder: Path) -> None:
    (folder / "config.json").write_text('{"hidden_size": 9}')


def change_a_header(folder: Path) -> None:
    file = folder / "model-1.safetensors"
    file.write_bytes(file.read_bytes().replace(b'"w"', b'"v"', 1))


def change_content(folder: Path) -> None:
    """Everywhere but in the header, as an update of the weights does."""
    file = folder / "model-0.safetensors"
    raw = bytearray(file.read_bytes())
    raw[1 << 20 :: 64] = bytes(len(range(1 << 20, len(raw), 64)))
    file.write_bytes(raw)


def change_length(folder: Path) -> None:
    with (folder / "model-0.safetensors").open("ab") as file:
        file.write(b"x")


def rename(folder: Path) -> None:
    (folder / "model-0.safetensors").rename(folder / "model-7.safetensors")


def remove(folder: Path) -> None:
    (folder / "model-0.safetensors").unlink()


@pytest.mark.parametrize("change", [change_config, change_a_header, change_content, change_length, rename, remove])
def test_other_weights_are_told_apart(weights_folder: Path, change: object) -> None:
    before = digest_of_files(weights_folder)
    change(weights_folder)  # type: ignore[operator]
    assert digest_of_files(weights_folder) != before


def test_a_hub_snapshot_is_its_commit(tmp_path: Path) -> None:
    commit = "0123456789abcdef0123456789abcdef01234567"
    folder = tmp_path / "models--org--name" / "snapshots" / commit
    folder.mkdir(parents=True)
    assert identify(str(folder), None) == f"hub:org--name@{commit}" == identify("org/name", commit)


@pytest.mark.parametrize("commit", [None, "", "main"])
def test_a_name_without_a_commit_is_unknown(commit: str | None) -> None:
    with pytest.raises(UnknownWeights, match="org/name"):
        identify("org/name", commit)


def test_a_directory_without_weights_is_unknown(tmp_path: Path) -> None:
    with pytest.raises(UnknownWeights, match="no weight file"):
        identify(str(tmp_path), None)
