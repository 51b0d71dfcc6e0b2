"""The kernels' sources: the kernels under sanitizers, and that every compiler at hand takes them."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from nixl_tiers.swap.kernels import CAPACITIES
from nixl_tiers.swap.submit import first_parts, parts_of
from tests.swap.conftest import ROOT
from tests.swap.scenario import assert_same, random_scenario, scenario_of
from tests.swap.test_kernels import ARCHITECTURES
from tests.system.swap.test_sanitized import SANITIZE

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def cxx() -> str:
    found = shutil.which("g++") or shutil.which("clang++")
    if found is None:
        pytest.skip("no C++ compiler here")
    return found


@pytest.fixture(scope="module")
def sanitized(cxx: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """kernels.cpp under AddressSanitizer and UBSan, or the reason for skipping."""
    folder = tmp_path_factory.mktemp("kernels")
    (folder / "probe.cpp").write_text("int main() { return 0; }\n")
    try:
        subprocess.run([cxx, *SANITIZE, "-o", folder / "probe", folder / "probe.cpp"], check=True, capture_output=True)
        subprocess.run([folder / "probe"], check=True, capture_output=True)
    except subprocess.CalledProcessError:
        pytest.skip("this compiler has no sanitizers")
    program = folder / "kernels"
    flags = ["-std=c++17", "-Wall", "-Wextra", "-Werror", *SANITIZE, f"-I{ROOT / 'tests/swap'}"]
    subprocess.run([cxx, *flags, "-o", str(program), str(HERE / "kernels.cpp")], check=True)
    return program


@pytest.mark.parametrize("seed", range(400, 412))
def test_no_kernel_writes_out_of_bounds(sanitized: Path, tmp_path: Path, seed: int) -> None:
    """Both directions, on buffers that end where their bytes end, against the oracle."""
    rng = np.random.default_rng(seed)
    scenario = (
        random_scenario(rng) if seed % 2 else scenario_of(rng, [[2064, 16, 4096], [1040] * 3], blocks=7, rows=3, gap=32)
    )
    geometry, plan = scenario.geometry, scenario.plan
    for group in range(len(scenario.layers)):
        parts = parts_of(plan.groups[group])
        segments = parts[parts[:, 0] > 0]
        sizes = (scenario.blocks - 1) * segments[:, 1] + segments[:, 2]
        blocks, places = scenario.transfer(rng)
        pairs = plan.pairs(group, blocks, places)
        rows = (geometry.row_bytes, plan.cell_offset, geometry.sub_block_bytes, geometry.sub_blocks, plan.rows)
        numbers = [*rows, len(parts), len(pairs), scenario.blocks]
        engine = []
        for address, size in zip(segments[:, 0].tolist(), sizes.tolist(), strict=True):
            tensor = next(t for t in scenario.memory if t.ctypes.data <= address < t.ctypes.data + t.size)
            engine.append(tensor[address - tensor.ctypes.data :][:size].tobytes())
        case, result = tmp_path / "case", tmp_path / "result"
        words = np.concatenate([np.array(numbers, np.uint64), parts.ravel(), pairs.ravel().astype(np.uint64)])
        tile_table = first_parts(parts).astype(np.uint64)
        head = np.concatenate([words, np.array([len(tile_table)], np.uint64), tile_table])
        case.write_bytes(head.tobytes() + b"".join(engine) + scenario.region.tobytes())
        ended = subprocess.run([sanitized, case, result], check=False, capture_output=True, text=True)
        assert ended.returncode == 0, ended.stderr
        expected = scenario.store(group, blocks, places)
        stores = np.frombuffer(result.read_bytes(), np.uint8)
        assert_same(stores, expected, "region after a store")


def test_the_driver_is_called_as_cuda_h_declares(tmp_path: Path) -> None:
    """Function pointers of other types than NVIDIA's header has would not compile. The header comes with a wheel
    (nvidia-cuda-runtime) or with nvcc."""
    found = [Path(folder, "cuda.h") for folder in _include_folders()]
    headers = [header for header in found if header.exists()]
    if not headers or shutil.which("gcc") is None:
        pytest.skip("no cuda.h or no gcc here")
    source = tmp_path / "check.c"
    calls = {
        "ctx_push": "cuCtxPushCurrent", "ctx_pop": "cuCtxPopCurrent", "stream_wait_event": "cuStreamWaitEvent",
        "stream_synchronize": "cuStreamSynchronize", "event_record": "cuEventRecord",
        "event_synchronize": "cuEventSynchronize", "event_query": "cuEventQuery",
        "event_elapsed": "cuEventElapsedTime", "memcpy_async": "cuMemcpyAsync", "launch": "cuLaunchKernel",
    }  # fmt: skip
    lines = [f"    driver->{ours} = {theirs};" for ours, theirs in calls.items()]
    source.write_text(
        '#define SWAP_CUDA_H\n#include "swap_submit.c"\nvoid check(swap_driver *driver);\n'
        "void check(swap_driver *driver) {\n" + "\n".join(lines) + "\n}\n"
        '_Static_assert(sizeof(CUmemcpyAttributes) == 24, "as the batch of CUDA 12.8 takes them");\n'
    )
    for header in headers:
        flags = ["-std=c11", "-D_GNU_SOURCE", "-Wall", "-Wextra", "-Werror", f"-I{ROOT / 'csrc'}", f"-I{header.parent}"]
        subprocess.run(["gcc", *flags, "-c", "-o", str(tmp_path / "check.o"), str(source)], check=True)


def _include_folders() -> list[str]:
    wheels = [f"{root}/nvidia/{name}/include" for root in sys.path for name in ("cuda_runtime", "cu12", "cu13")]
    nvcc = shutil.which("nvcc")
    return [*wheels, *([str(Path(nvcc).resolve().parents[1] / "include")] if nvcc else [])]


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_nvcc_compiles_the_kernels_without_spilling(tmp_path: Path, arch: str) -> None:
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        pytest.skip("no nvcc here")
    flags = ["--cubin", "-std=c++17", f"-arch={arch}", "-Werror=all-warnings", "-Xptxas=-v"]
    source = str(ROOT / "csrc" / "swap.cu")
    output = subprocess.run(
        [nvcc, *flags, "-o", str(tmp_path / "swap.cubin"), source], check=True, capture_output=True, text=True
    ).stderr
    assert output.count("0 bytes spill stores, 0 bytes spill loads") == len(CAPACITIES)
