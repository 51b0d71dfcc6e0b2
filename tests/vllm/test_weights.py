from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest

pytest.importorskip("vllm")

from nixl_tiers.vllm.weights import UnknownWeights, digest_of_files, identify, resolved_commit


def change_config(folder: Path) -> None:
    (folder / "config.json").write_text('{"hidden_size": 9}')


def change_how_images_are_prepared(folder: Path) -> None:
    (folder / "preprocessor_config.json").write_text('{"image_mean": [0.4]}')


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


@pytest.mark.parametrize(
    "change",
    [
        *(change_config, change_how_images_are_prepared, change_a_header),
        *(change_content, change_length, rename, remove),
    ],
)
def test_other_weights_have_another_identity(weights_folder: Path, change: object) -> None:
    before = digest_of_files(weights_folder)
    change(weights_folder)  # type: ignore[operator]
    assert digest_of_files(weights_folder) != before


def test_all_files_of_a_split_model_are_hashed(tmp_path: Path) -> None:
    """It is named by one of them, as it is for GGUF."""
    first, second = (tmp_path / f"model-0000{number}-of-00002.gguf" for number in (1, 2))
    for file in (first, second, tmp_path / "other-00002-of-00002.gguf"):
        file.write_bytes(b"before")
    before = identify(str(first), None)
    (tmp_path / "other-00002-of-00002.gguf").write_bytes(b"after!")
    assert identify(str(first), None) == before == identify(str(second), None)
    second.write_bytes(b"after!")
    assert identify(str(first), None) != before


MIB = 1 << 20
COMMIT, OTHER = "0123456789abcdef0123456789abcdef01234567", "f" * 40


def save(file: Path, tensors: Mapping[str, int]) -> dict[str, int]:
    """A safetensors file of byte tensors of these sizes, zero but for the first byte of each, most of it a hole on the
    disk. Returns where each begins."""
    at, header = 0, {}
    for name, size in tensors.items():
        header[name] = {"dtype": "U8", "shape": [size], "data_offsets": [at, at + size]}
        at += size
    raw = json.dumps(header).encode()
    starts = {name: 8 + len(raw) + int(fields["data_offsets"][0]) for name, fields in header.items()}
    with file.open("wb") as opened:
        opened.write(len(raw).to_bytes(8, "little") + raw)
        for start in starts.values():
            opened.seek(start)
            opened.write(b"1")
        opened.truncate(8 + len(raw) + at)
    return starts


def overwrite(file: Path, start: int, size: int, with_: bytes = b"x") -> None:
    with file.open("r+b") as opened:
        opened.seek(start)
        opened.write(with_ * size)


class TestWhatHasChangedIsNoticed:
    @pytest.fixture
    def file(self, tmp_path: Path) -> Path:
        return tmp_path / "model.safetensors"

    def test_a_change_in_a_large_header_is_detected(self, file: Path) -> None:
        starts = save(file, {f"model.layers.{n}.self_attn.weight_scale": 4 for n in range(6_000)})
        at = file.read_bytes().index(b"layers.5871.")
        assert at > 256 << 10
        assert self.differs(file, at + 7, 1)
        assert self.differs(file, starts["model.layers.5999.self_attn.weight_scale"], 4)

    def differs(self, file: Path, start: int, size: int) -> bool:
        before = digest_of_files(file)
        with file.open("rb") as opened:
            opened.seek(start)
            old = opened.read(size)
        overwrite(file, start, size)
        after = digest_of_files(file)
        overwrite(file, start, 1, old)
        assert digest_of_files(file) == before
        return after != before

    def test_a_change_of_any_matrix_is_detected(self, file: Path) -> None:
        starts = save(file, {f"w{n}": 2 * MIB + 512 * n for n in range(128)})
        assert all(self.differs(file, starts[f"w{n}"], 2 * MIB) for n in range(0, 128, 8))

    @pytest.mark.parametrize("name", ["model.safetensors", "model.gguf"])
    def test_a_change_of_2_mib_in_a_larger_tensor_or_file_is_detected(self, tmp_path: Path, name: str) -> None:
        file = tmp_path / name
        save(file, {"experts": 256 * MIB})
        last = file.stat().st_size - 2 * MIB
        assert all(self.differs(file, last * n // 20, 2 * MIB) for n in range(21))

    def test_a_change_of_any_scale_or_norm_is_detected(self, file: Path) -> None:
        """Though they are a thousandth of the file."""
        sizes = {"w": 3 * MIB, "w.weight_scale": 3584, "norm": 8192, "bias": 2}
        starts = save(file, {f"{n}.{name}": size for n in range(60) for name, size in sizes.items()})
        small = [name for name in starts if not name.endswith(".w")]
        assert all(self.differs(file, starts[name] + 1, 1) for name in small[::9])

    def test_a_change_of_any_byte_of_a_small_tensor_is_detected(self, file: Path) -> None:
        starts = save(file, {"a": MIB, "whole": 256 << 10, "larger": (256 << 10) + 1, "z": MIB})
        assert all(self.differs(file, starts["whole"] + at, 1) for at in range(0, 256 << 10, 9973))
        assert self.differs(file, starts["larger"], 1)
        assert self.differs(file, starts["z"] - 1, 1)

    @pytest.mark.parametrize("start", [b"", (1 << 62).to_bytes(8, "little"), (40).to_bytes(8, "little") + b"[" * 40])
    def test_a_file_without_a_valid_header_is_sampled(self, file: Path, start: bytes) -> None:
        file.write_bytes(start)
        with file.open("ab") as opened:
            opened.truncate(8 * MIB + len(start))
        assert self.differs(file, 3 * MIB, 2 * MIB)

    def test_a_change_of_any_archive_member_is_detected(self, tmp_path: Path) -> None:
        """As PyTorch's own format is one."""
        import numpy as np

        arrays = {f"tensor-{n}": np.zeros(n % 7 * 100_000 + 50) for n in range(200)}
        np.savez(tmp_path / "model.npz", **arrays)
        before = digest_of_files(tmp_path)
        arrays["tensor-23"][199_234] = 1.0
        np.savez(tmp_path / "model.npz", **arrays)
        assert digest_of_files(tmp_path) != before


@pytest.mark.parametrize(
    ("revision", "config_commit", "own", "hubs", "commit"),
    [
        (COMMIT, OTHER, False, False, COMMIT),
        *((revision, OTHER, False, False, OTHER) for revision in (None, "main", "v1")),
        ("main", OTHER, True, False, COMMIT),
        ("v1", None, True, False, OTHER),
        ("v2", None, True, False, None),
        (None, None, False, True, COMMIT),
    ],
)
def test_a_revision_is_resolved(
    revision: str | None,
    config_commit: str | None,
    *,
    own: bool,
    hubs: bool,
    commit: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = tmp_path / "cache" / "models--org--name" / "refs"
    folder.mkdir(parents=True)
    (folder / "main").write_text(COMMIT)
    (folder / "v1").write_text(OTHER + "\n")
    cache = str(tmp_path / "cache")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", cache if hubs else str(tmp_path / "none"))
    assert (resolved_commit("org/name", revision, config_commit, cache if own else None) or None) == commit


@pytest.mark.parametrize("commit", [None, "", "main"])
def test_a_name_without_a_commit_is_unknown(commit: str | None) -> None:
    with pytest.raises(UnknownWeights, match="org/name"):
        identify("org/name", commit)


def test_a_directory_without_weights_is_unknown(tmp_path: Path) -> None:
    with pytest.raises(UnknownWeights, match="no weight file"):
        identify(str(tmp_path), None)
