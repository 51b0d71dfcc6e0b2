from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("vllm")

from nixl_tiers.vllm.weights import UnknownWeights, identify, resolved_commit


def test_a_hub_snapshot_is_its_commit(tmp_path: Path) -> None:
    commit = "0123456789abcdef0123456789abcdef01234567"
    folder = tmp_path / "models--org--name" / "snapshots" / commit
    folder.mkdir(parents=True)
    assert identify(str(folder), None) == f"hub:org--name@{commit}" == identify("org/name", commit)


COMMIT, OTHER = "0123456789abcdef0123456789abcdef01234567", "f" * 40


class TestRevision:
    @pytest.fixture
    def cache(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        from huggingface_hub import constants

        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "none"))
        folder = tmp_path / "cache" / "models--org--name" / "refs"
        folder.mkdir(parents=True)
        (folder / "main").write_text(COMMIT)
        (folder / "v1").write_text(OTHER + "\n")
        return tmp_path / "cache"

    def test_a_commit_is_itself(self) -> None:
        assert resolved_commit("org/name", COMMIT, OTHER, None) == COMMIT

    @pytest.mark.parametrize("revision", [None, "main", "v1"])
    def test_a_hub_name_resolves_to_the_configurations_commit(self, cache: Path, revision: str | None) -> None:
        assert resolved_commit("org/name", revision, OTHER, None) == OTHER

    def test_a_hub_name_resolves_by_the_weights_own_cache(self, cache: Path) -> None:
        assert resolved_commit("org/name", "main", OTHER, str(cache)) == COMMIT
        assert resolved_commit("org/name", "v1", None, str(cache)) == OTHER
        assert not resolved_commit("org/name", "v2", None, str(cache))

    def test_a_hub_name_resolves_by_the_hubs_cache_without_a_commit(
        self, cache: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from huggingface_hub import constants

        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
        assert resolved_commit("org/name", None, None, None) == COMMIT


@pytest.mark.parametrize("commit", [None, "", "main"])
def test_a_name_without_a_commit_is_unknown(commit: str | None) -> None:
    with pytest.raises(UnknownWeights, match="org/name"):
        identify("org/name", commit)


def test_a_directory_without_weights_is_unknown(tmp_path: Path) -> None:
    with pytest.raises(UnknownWeights, match="no weight file"):
        identify(str(tmp_path), None)
