"""The C sources under the sanitizers, and the shared header in every language that includes it."""

from __future__ import annotations

import subprocess
from pathlib import Path

import numpy as np
import pytest

from nixl_tiers.swap.plan import Segment
from tests.swap.scenario import CopyScenario, assert_same, random_scenario

SANITIZE = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-g", "-O1"]


def built(compiler: str, folder: Path, name: str, flags: list[str]) -> Path:
    probe = folder / "probe.c"
    probe.write_text("int main(void) { return 0; }\n")
    try:
        subprocess.run([compiler, *flags, "-o", str(folder / "probe"), str(probe)], check=True, capture_output=True)
        subprocess.run([str(folder / "probe")], check=True, capture_output=True)
    except subprocess.CalledProcessError:
        pytest.skip("this compiler has no sanitizers")
    program = folder / "driver"
    warnings = ["-Wall", "-Wextra", "-Werror"]
    source = Path(__file__).with_name(name)
    subprocess.run([compiler, *flags, *warnings, "-o", str(program), str(source), "-lpthread"], check=True)
    return program


@pytest.fixture(scope="session")
def driver(compiler: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built(compiler, tmp_path_factory.mktemp("driver"), "driver.c", SANITIZE)


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


HEADER_USER = """
#include "swap.h"
#ifdef __CUDACC__
extern "C" __global__ void use(swap_rows rows, swap_segment segment, swap_u64 *out) {
    out[0] = swap_place_address(&rows, 7) + swap_page_address(&segment, 3);
}
#else
int main(void) {
    swap_rows rows = {1000, 8192, 4096, 100, 4};
    swap_segment segment = {50, 20, 10, 0};
    swap_segment far_away = {0, (swap_u64)1 << 30, 1, 0};
    swap_rows large = {0, (swap_u64)1 << 30, 0, 1, 1};
    return !(swap_place_address(&rows, 7) == 1000 + 8192 + 4096 + 300 && swap_page_address(&segment, 3) == 110 &&
             swap_page_address(&far_away, 4000000000u) == 4000000000ull << 30 &&
             swap_place_address(&large, 2000000000u) == 2000000000ull << 30);
}
#endif
"""
