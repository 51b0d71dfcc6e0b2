"""The swap on a real GPU: `python -m pytest -m gpu tests/swap`. Needs torch with CUDA, and nothing that vLLM brings."""

from __future__ import annotations

import mmap
import shutil
import subprocess
import sys
from collections.abc import Iterator

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from nixl_tiers.swap.cuda import CudaSwap  # noqa: E402
from nixl_tiers.swap.plan import CopyPlan, Segment, Share  # noqa: E402
from nixl_tiers.swap.strategies import NAMES  # noqa: E402
from tests.support.places import places_of  # noqa: E402
from tests.swap.conftest import ROOT  # noqa: E402
from tests.swap.scenario import LAYOUTS, CopyScenario, assert_same, layout_of, random_scenario, scenario_of  # noqa: E402

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def _gpu() -> Iterator[None]:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device here")
    yield
    torch.cuda.synchronize()


class GpuScenario:
    """A scenario whose engine memory is mirrored by GPU tensors, and whose region is page-aligned shared memory."""

    def __init__(self, scenario: CopyScenario) -> None:
        self.scenario = scenario
        self.tensors = [torch.from_numpy(tensor).cuda() for tensor in scenario.memory]
        self.mapping = mmap.mmap(-1, scenario.region.size)
        self.region = np.frombuffer(self.mapping, dtype=np.uint8)
        self.region[:] = scenario.region
        segments = [
            [
                Segment(self.tensors[tensor].data_ptr() + first, stride, nbytes, offset, scenario.blocks)
                for tensor, first, stride, nbytes, offset in group
            ]
            for group in scenario.layers
        ]
        self.plan = CopyPlan(segments, scenario.geometry, Share(scenario.cell), self.region.ctypes.data, scenario.rows)

    def swap(self, strategy: str) -> CudaSwap:
        swap = CudaSwap(self.plan, torch.cuda.current_device(), strategies=(strategy,) * len(self.scenario.layers))
        assert swap.pinned
        return swap

    def store_and_check(self, swap: CudaSwap, group: int, blocks: list[int], places: list[int]) -> None:
        """All of the region is compared: a poisoned byte that was not to be written must still be there."""
        expected = self.scenario.store(group, blocks, places)
        swap.store(group, blocks, places).wait()
        assert_same(self.region, expected, "region")
        self.scenario.region[:] = expected

    def load_and_check(self, swap: CudaSwap, group: int, blocks: list[int], places: list[int]) -> None:
        expected = self.scenario.load(group, blocks, places)
        swap.load(group, blocks, places).wait()
        for tensor, wanted, ours in zip(self.tensors, expected, self.scenario.memory, strict=True):
            assert_same(tensor.cpu().numpy(), wanted, "engine memory")
            ours[:] = wanted


def round_trips(here: GpuScenario, swap: CudaSwap, rng: np.random.Generator) -> None:
    for group in range(len(here.scenario.layers)):
        for _ in range(2):
            here.store_and_check(swap, group, *here.scenario.transfer(rng))
            here.load_and_check(swap, group, *here.scenario.transfer(rng))


@pytest.mark.parametrize("strategy", NAMES)
@pytest.mark.parametrize("seed", range(300, 312))
def test_any_geometry(seed: int, strategy: str) -> None:
    rng = np.random.default_rng(seed)
    here = GpuScenario(random_scenario(rng))
    swap = here.swap(strategy)
    round_trips(here, swap, rng)
    swap.close()
    swap.close()
    assert not swap.pinned


@pytest.mark.parametrize("strategy", NAMES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_of_engines(layout: str, strategy: str) -> None:
    """In chunks of any number of blocks: random ones, and from the middle of a chunk to the middle of another."""
    rng = np.random.default_rng(7)
    for sub_blocks in (1, 3, 4):
        here = GpuScenario(layout_of(layout, rng, sub_blocks))
        swap = here.swap(strategy)
        assert swap.kernels is not None, "kernels are to be had on every machine that runs this"
        round_trips(here, swap, rng)
        for group in range(len(here.scenario.layers)):
            blocks = rng.permutation(30)[: 2 * sub_blocks]
            places = places_of(here.plan, rng.permutation(9)[:3], sub_blocks // 2, len(blocks))
            here.load_and_check(swap, group, blocks.tolist(), places.tolist())
            here.store_and_check(swap, group, blocks[::2].tolist(), places[::2].tolist())
        swap.close()


@pytest.mark.parametrize("strategy", NAMES)
def test_many_blocks(strategy: str) -> None:
    """Several halves of the staging buffer, more pairs than a launch holds, batches that are full."""
    rng = np.random.default_rng(11)
    here = GpuScenario(scenario_of(rng, [[2048] * 16], blocks=5000, rows=320, sub_blocks=16))
    swap = here.swap(strategy)
    here.store_and_check(swap, 0, *here.scenario.transfer(rng, 4500))
    here.load_and_check(swap, 0, *here.scenario.transfer(rng, 4500))
    swap.close()


@pytest.mark.parametrize("own_stream", [False, True], ids=["default stream", "stream of its own"])
@pytest.mark.parametrize("strategy", NAMES)
def test_transfers_run_after_the_compute_before_them(strategy: str, own_stream: bool) -> None:
    """A store behind slow work that writes the very blocks; a load behind slow work that reads them; and work that is
    held behind the load."""
    here = GpuScenario(scenario_of(np.random.default_rng(2), [[65536] * 4], blocks=64, rows=16, sub_blocks=4))
    swap = here.swap(strategy)
    blocks = list(range(64))
    with torch.cuda.stream(torch.cuda.Stream() if own_stream else torch.cuda.default_stream()):
        busy = torch.randn((4096, 4096), device="cuda")
        for turn in range(4):
            for _ in range(20):
                busy = torch.tanh(busy @ busy)
            for tensor, ours in zip(here.tensors, here.scenario.memory, strict=True):
                tensor.fill_(turn + 1)
                ours[:] = turn + 1
            here.store_and_check(swap, 0, blocks, blocks)
            here.region[:] = here.scenario.region[:] = 200 + turn
            for _ in range(20):
                busy = torch.tanh(busy @ busy)
            read = [tensor.clone() for tensor in here.tensors]
            loaded = swap.load(0, blocks, blocks)
            loaded.hold(torch.cuda.current_stream().cuda_stream)
            found = [tensor.clone() for tensor in here.tensors]
            torch.cuda.current_stream().synchronize()
            assert all(bool((tensor == turn + 1).all()) for tensor in read)
            assert all(int((tensor == 200 + turn).sum()) == 64 * 65536 for tensor in found)
            assert loaded.done()
            assert loaded.elapsed_s() > 0
            for tensor, ours in zip(here.tensors, here.scenario.memory, strict=True):
                ours[:] = tensor.cpu().numpy()
    swap.close()


def test_the_strategy_is_checked_before_it_is_used(caplog: pytest.LogCaptureFixture) -> None:
    rng = np.random.default_rng(6)
    here = GpuScenario(scenario_of(rng, [[8192] * 8], blocks=600, rows=150, sub_blocks=4))
    swap = CudaSwap(here.plan)
    assert swap._strategies == ("staged",)
    assert not caplog.records
    round_trips(here, swap, rng)
    swap.close()


@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", ["memcheck", "racecheck"])
def test_compute_sanitizer_finds_nothing(kind: str) -> None:
    tool = shutil.which("compute-sanitizer")
    if tool is None:
        pytest.skip("no compute-sanitizer here")
    command = [tool, "--tool", kind, "--error-exitcode", "9", sys.executable, "-m", "pytest", "-q", "-m", "gpu"]
    command += ["-p", "no:cacheprovider", __file__, "-k", "test_layouts_of_engines and staged and (gaps or tiles)"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=500)
    if "Device not supported" in ended.stdout + ended.stderr:
        pytest.skip("compute-sanitizer does not support this device")
    assert ended.returncode == 0, ended.stdout[-4000:] + ended.stderr[-1000:]
