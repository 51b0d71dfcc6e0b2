"""The kernels' sources: the kernels under sanitizers, and that every compiler at hand takes them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from nixl_tiers.swap import kernels
from nixl_tiers.swap.kernels import CompileError, Nvrtc

ARCHITECTURES = ("sm_80", "sm_90", "sm_100", "sm_120")


@pytest.fixture(scope="module")
def compiler() -> Nvrtc:
    found = kernels.open_nvrtc(os.environ.get("NIXL_TIERS_TEST_NVRTC"))
    if found is None:
        pytest.skip("no NVRTC here (the wheel nvidia-cuda-nvrtc has one; NIXL_TIERS_TEST_NVRTC may name its library)")
    return found


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_nvrtc_compiles_the_kernels_and_the_disk_caches_them(compiler: Nvrtc, tmp_path: Path, arch: str) -> None:
    image = kernels.compile_cached(compiler, arch, tmp_path / "cache")
    assert image[:4] == b"\x7fELF"
    assert b"nixl_tiers_stage_3968" in image
    (kept,) = (tmp_path / "cache").iterdir()
    assert kept.name == f"swap-{kernels.source_digest()}-{arch}-nvrtc{compiler.version[0]}.{compiler.version[1]}.cubin"
    assert kept.parent.stat().st_mode & 0o777 == 0o700


def test_a_gpu_that_is_newer_than_nvrtc_gets_ptx(compiler: Nvrtc) -> None:
    newest = compiler.architectures()[-1]
    source = 'extern "C" __global__ void one(int *out) { *out = 1; }'
    assert compiler.compile(source, {}, f"sm_{newest}")[:4] == b"\x7fELF"
    image = compiler.compile(source, {}, f"sm_{newest + 1}")
    assert f".target sm_{newest}".encode() in image
    assert image.endswith(b"\0"), "the driver looks for the end of the text"
    with pytest.raises(CompileError, match="does not know sm_20 or anything before it"):
        compiler.compile(source, {}, "sm_20")


def test_nvrtc_is_never_newer_than_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wheels of both generations may be installed, and a driver of CUDA 12 loads nothing that NVRTC 13 has made."""

    class Found:
        def __init__(self, name: str) -> None:
            if name == "broken":
                raise CompileError(name)
            self.version = (int(name), 4)

    monkeypatch.setattr(kernels.ctypes, "CDLL", lambda name: name)
    monkeypatch.setattr(kernels, "Nvrtc", Found)
    monkeypatch.setattr(kernels, "_candidates", lambda: ["broken", "13", "12"])
    opened = [kernels.open_nvrtc.__wrapped__(newest=major) for major in (None, 14, 13, 12, 11)]
    assert [found and found.version[0] for found in opened] == [13, 13, 13, 12, None]


class OneCompiler:
    """A compiler that counts."""

    version = (13, 0)

    def __init__(self) -> None:
        self.compiled: list[str] = []

    def compile(self, source: str, headers: dict[str, str], arch: str) -> bytes:
        assert "nixl_tiers_stage_" in source
        assert sorted(headers) == ["swap.h"]
        self.compiled.append(arch)
        return b"machine code for " + arch.encode()


def test_compiled_images_are_cached_and_corruption_is_detected(tmp_path: Path) -> None:
    compiler, folder = OneCompiler(), tmp_path / "cache"
    wanted = b"machine code for sm_90"
    for _ in range(2):
        assert kernels.compile_cached(compiler, "sm_90", folder) == wanted  # type: ignore[arg-type]
    assert compiler.compiled == ["sm_90"]
    (kept,) = folder.iterdir()
    kept.write_bytes(kept.read_bytes()[:-1])
    assert kernels.compile_cached(compiler, "sm_90", folder) == wanted  # type: ignore[arg-type]
    assert kernels.compile_cached(compiler, "sm_80", folder) == b"machine code for sm_80"  # type: ignore[arg-type]
    assert compiler.compiled == ["sm_90", "sm_90", "sm_80"]


def test_a_built_image_comes_before_a_compiled_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "_HERE", tmp_path)
    monkeypatch.setattr(kernels, "open_nvrtc", lambda newest: OneCompiler() if newest >= 13 else None)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    digest = kernels.source_digest()
    assert digest
    assert [origin for origin, _ in kernels.images("sm_90", 13)] == ["compiled by NVRTC 13.0"]
    assert list(kernels.images("sm_90", 12)) == []
    (tmp_path / kernels.fatbin_name(digest)).write_bytes(b"built")
    (tmp_path / kernels.fatbin_name("0" * 16)).write_bytes(b"stale")
    assert [(origin, image()) for origin, image in kernels.images("sm_90", 13)] == [
        ("built with the package", b"built"),
        ("compiled by NVRTC 13.0", b"machine code for sm_90"),
    ]
