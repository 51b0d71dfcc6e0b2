"""The C sources and the kernels under the sanitizers, and that every compiler at hand takes them."""

from __future__ import annotations

import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from nixl_tiers.swap.plan import Segment
from nixl_tiers.swap.submit import first_parts, parts_of
from tests.support.compiled import sanitizer_flags
from tests.swap.conftest import ROOT
from tests.swap.fake_gpu import FakeGpu
from tests.swap.scenario import CopyScenario, assert_same, random_scenario, scenario_of
from tests.swap.test_cuda import machine, swap_of, with_kernels

__all__ = ["machine", "with_kernels"]  # fixtures


def built(compiler: str, folder: Path, name: str, *flags: str) -> Path:
    """The program of that source under AddressSanitizer and UBSan."""
    program, source = folder / "program", Path(__file__).with_name(name)
    flags = (*sanitizer_flags(compiler, folder), *flags, "-Wall", "-Wextra", "-Werror")
    subprocess.run([compiler, *flags, "-o", str(program), str(source), "-lpthread"], check=True)
    return program


@pytest.fixture(scope="module")
def sanitized(tmp_path_factory: pytest.TempPathFactory) -> Path:
    cxx = shutil.which("g++") or shutil.which("clang++")
    if cxx is None:
        pytest.skip("no C++ compiler here")
    return built(cxx, tmp_path_factory.mktemp("kernels"), "kernels.cpp", "-std=c++17", f"-I{ROOT / 'tests/swap'}")


@pytest.fixture(scope="session")
def driver(compiler: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built(compiler, tmp_path_factory.mktemp("driver"), "driver.c")


def run(
    driver: Path, folder: Path, scenario: CopyScenario, group: int, pairs: np.ndarray, *, to_host: bool, kernel: int
) -> bytes:
    """Engine bytes (from each segment's first page to the end of its last) and region bytes after one swap."""
    plan, geometry = scenario.plan, scenario.geometry
    segments = plan.groups[group].segments
    sizes = [(scenario.blocks - 1) * segment.block_stride + segment.nbytes for segment in segments]
    skew = segments[0].address % 64 if segments else 0
    numbers = [int(to_host), kernel, plan.rows, skew]
    numbers += [geometry.row_bytes, plan.cell_offset, geometry.sub_block_bytes, geometry.sub_blocks]
    numbers += [len(segments), len(plan.groups[group].gaps), len(pairs)]
    for segment, size in zip(segments, sizes, strict=True):
        numbers += [segment.block_stride, segment.nbytes, segment.offset, size]
    for gap in plan.groups[group].gaps:
        numbers += gap
    numbers += pairs.ravel().tolist()
    case, result = folder / "case", folder / "result"
    engine = [
        engine_bytes(scenario, scenario.memory, segment, size) for segment, size in zip(segments, sizes, strict=True)
    ]
    case.write_bytes(np.array(numbers, dtype="<u8").tobytes() + b"".join(engine) + scenario.region.tobytes())
    ended = subprocess.run([str(driver), str(case), str(result)], check=False, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    return result.read_bytes()


def engine_bytes(scenario: CopyScenario, memory: list[np.ndarray], segment: Segment, size: int) -> bytes:
    for before, tensor in zip(scenario.memory, memory, strict=True):
        first = segment.address - before.ctypes.data
        if 0 <= first < tensor.size:
            return tensor[first : first + size].tobytes()
    raise AssertionError("a segment outside of the engine's memory")


@pytest.mark.parametrize("kernel", [1, 2, 3], ids=["plain", "avx2", "avx512"])
@pytest.mark.parametrize("seed", range(100, 112))
def test_no_access_out_of_bounds(driver: Path, tmp_path: Path, seed: int, kernel: int) -> None:
    rng = np.random.default_rng(seed)
    scenario = random_scenario(rng)
    for group in range(len(scenario.layers)):
        segments = scenario.plan.groups[group].segments
        sizes = [(scenario.blocks - 1) * segment.block_stride + segment.nbytes for segment in segments]
        blocks, places = scenario.transfer(rng)
        pairs = scenario.plan.pairs(group, blocks, places)

        stored = run(driver, tmp_path, scenario, group, pairs, to_host=True, kernel=kernel)
        region = scenario.store(group, blocks, places)
        assert_same(np.frombuffer(stored[-region.size :], np.uint8), region, "region after a store")

        loaded = run(driver, tmp_path, scenario, group, pairs, to_host=False, kernel=kernel)
        memory, start = scenario.load(group, blocks, places), 0
        for segment, size in zip(segments, sizes, strict=True):
            wanted = np.frombuffer(engine_bytes(scenario, memory, segment, size), np.uint8).copy()
            got = np.frombuffer(loaded[start : start + size], np.uint8).copy()
            start += size
            # Where layers lie together, the bytes between two of this segment's pages are another segment's.
            for block in range(scenario.blocks - 1):
                between = slice(block * segment.block_stride + segment.nbytes, (block + 1) * segment.block_stride)
                if len(segments) > 1 and len(scenario.memory) < len(segments):
                    wanted[between] = got[between] = 0
            assert_same(got, wanted, "engine memory after a load")


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


def test_a_stream_can_be_held_while_another_thread_waits(
    machine: Callable[..., FakeGpu], monkeypatch: pytest.MonkeyPatch
) -> None:
    """To hold a stream takes no time: not even as long as another thread waits for the same bytes."""
    rng = np.random.default_rng(9)
    scenario = scenario_of(rng, [[2048] * 2], blocks=12, rows=6, sub_blocks=2)
    fake = machine(9)
    swap = swap_of(fake, scenario, "staged")
    transfer = swap.store(0, range(12), range(12))
    waits, go_on = threading.Event(), threading.Event()
    original = fake.driver.wait

    def slow(event: int) -> None:
        waits.set()
        assert go_on.wait(60)
        original(event)

    monkeypatch.setattr(fake.driver, "wait", slow)
    waiter = threading.Thread(target=transfer.wait)
    waiter.start()
    assert waits.wait(60)
    held = threading.Thread(target=transfer.hold, args=(0,))
    held.start()
    held.join(60)
    assert not held.is_alive()
    assert not transfer.done()
    go_on.set()
    waiter.join(60)
    assert transfer.done()
    swap.close()
