"""Choosing a copy strategy by measuring, on the fake driver, which has a clock of its own and real bytes."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
import pytest

from nixl_tiers.swap import autotune, device_tables, kernels
from nixl_tiers.swap.autotune import Fixed, Measured, best, choose, guess
from nixl_tiers.swap.cuda import CudaSwap
from nixl_tiers.swap.driver import Device
from nixl_tiers.swap.kernels import Kernels
from nixl_tiers.swap.pinned import PinnedRegion
from nixl_tiers.swap.strategies import NAMES
from tests.swap.fake_gpu import FakeGpu, leftovers
from tests.swap.scenario import CopyScenario, assert_same, scenario_of


def scenario() -> CopyScenario:
    return scenario_of(np.random.default_rng(1), [[2048] * 4, [16] * 2], blocks=40, rows=20, sub_blocks=3, gap=16)


@contextmanager
def parts(fake: FakeGpu, here: CopyScenario) -> Iterator[tuple[Device, PinnedRegion, Kernels | None]]:
    with ExitStack() as undo:
        device = Device(fake.driver, 0)
        undo.callback(device.close)
        loaded = kernels.load(device)
        pinned = PinnedRegion(device, here.plan)
        undo.callback(pinned.release)
        yield device, pinned, loaded
        undo.close()
        assert [left for left in leftovers(fake) if "modules" not in left] == []


@pytest.fixture
def start(fake_library: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., FakeGpu]:
    monkeypatch.setattr(kernels, "images", lambda *_: iter([("here", lambda: b"image\0")]))
    monkeypatch.delenv(autotune.ENVIRONMENT, raising=False)
    monkeypatch.setattr(autotune, "SAMPLE_BYTES", 1 << 20)

    def make(here: CopyScenario, version: int = 13000) -> FakeGpu:
        fake = FakeGpu(fake_library, 1, version)
        fake.own(here)
        return fake

    return make


def test_every_strategy_is_measured_and_the_region_restored(start: Callable[..., FakeGpu], tmp_path: Path) -> None:
    here = scenario()
    fake = start(here)
    region, memory = here.region.copy(), [tensor.copy() for tensor in here.memory]
    with parts(fake, here) as (device, pinned, loaded):
        choice = choose(device, here.plan, pinned, loaded, tmp_path)
    assert isinstance(choice, Measured)
    for direction in ("store", "load"):
        for group in range(2):
            for times in choice.seconds[direction][group].values():
                assert set(times) == set(NAMES)
                assert min(times.values()) > 0
    assert_same(here.region, region, "region")
    for tensor, wanted in zip(here.memory, memory, strict=True):
        assert_same(tensor, wanted, "the engine's memory")
    fake.check()


def test_a_measurement_is_cached_per_geometry(
    start: Callable[..., FakeGpu], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = scenario()
    fake = start(here)
    with parts(fake, here) as (device, pinned, loaded):
        first = choose(device, here.plan, pinned, loaded, tmp_path)
        launched = fake.calls("cuLaunchKernel")
        assert choose(device, here.plan, pinned, loaded, tmp_path) == first
        assert fake.calls("cuLaunchKernel") == launched
        monkeypatch.setenv(autotune.ENVIRONMENT, "measure")
        choose(device, here.plan, pinned, loaded, tmp_path)
        assert fake.calls("cuLaunchKernel") > launched
        monkeypatch.delenv(autotune.ENVIRONMENT)
        (kept,) = tmp_path.iterdir()
        assert json.loads(kept.read_text())["about"]["gpu"] == "Fake GPU"
        odd = kept.read_bytes().replace(b'"staged"', b'"unheard of"')
        for damage in (
            b"",
            b"{}",
            b'{"seconds": {}}',
            b'{"seconds": {"store": [], "load": []}}',
            b'{"seconds": 3}',
            odd,
        ):
            kept.write_bytes(damage)
            choose(device, here.plan, pinned, loaded, tmp_path)
            assert json.loads(kept.read_text())["seconds"]["store"][0]
    other = scenario_of(np.random.default_rng(1), [[2064] * 4, [16] * 2], blocks=40, rows=20, sub_blocks=3, gap=16)
    fake = start(other)
    with parts(fake, other) as (device, pinned, loaded):
        choose(device, other.plan, pinned, loaded, tmp_path)
    assert len(list(tmp_path.iterdir())) == 2


def test_a_strategy_that_copies_wrong_bytes_is_not_used(
    start: Callable[..., FakeGpu], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Here the kernels think that tiles are of half their size, so that they leave out the second half of each row."""
    monkeypatch.setattr(device_tables, "first_parts", lambda parts: np.zeros(1, np.uint32))
    here = scenario()
    fake = start(here)
    with caplog.at_level(logging.WARNING), parts(fake, here) as (device, pinned, loaded):
        choice = choose(device, here.plan, pinned, loaded, tmp_path)
    assert isinstance(choice, Measured)
    assert {name for times in choice.seconds["store"][0].values() for name in times} == {"copy_engine"}
    assert "the copy strategy staged is not used: stores of" in caplog.text


def test_identical_groups_are_measured_once(start: Callable[..., FakeGpu], tmp_path: Path) -> None:
    here = scenario_of(np.random.default_rng(1), [[2048] * 2] * 3, blocks=20, rows=10, sub_blocks=2)
    fake = start(here)
    with parts(fake, here) as (device, pinned, loaded):
        choice = choose(device, here.plan, pinned, loaded, tmp_path)
    assert isinstance(choice, Measured)
    assert choice.seconds["load"][0] is choice.seconds["load"][1] is choice.seconds["load"][2]


@pytest.mark.parametrize("name", NAMES)
def test_the_environment_sets_the_strategy(
    start: Callable[..., FakeGpu], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    here = scenario()
    fake = start(here)
    monkeypatch.setenv(autotune.ENVIRONMENT, name)
    with parts(fake, here) as (device, pinned, loaded):
        choice = choose(device, here.plan, pinned, loaded, tmp_path)
    assert [choice(True, 1, 3), choice(False, 0, 300)] == [name, name]
    assert list(tmp_path.iterdir()) == []


def test_an_unknown_strategy_in_the_environment_is_refused_without_leaks(
    start: Callable[..., FakeGpu], monkeypatch: pytest.MonkeyPatch
) -> None:
    here = scenario()
    fake = start(here)
    monkeypatch.setenv(autotune.ENVIRONMENT, "fastest")
    with pytest.raises(ValueError, match="NIXL_TIERS_SWAP is 'fastest'; it can be auto, measure, copy_engine, staged"):
        CudaSwap(here.plan, compute_stream=lambda: 0, driver=fake.driver)
    assert list(leftovers(fake)) == []


def test_a_swap_measures_by_itself(
    start: Callable[..., FakeGpu], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    here = scenario()
    fake = start(here)
    swap = CudaSwap(here.plan, compute_stream=lambda: 0, driver=fake.driver)
    blocks, places = here.transfer(np.random.default_rng(3))
    expected = here.store(0, blocks, places)
    swap.store(0, blocks, places).wait()
    assert_same(here.region, expected, "region")
    swap.close()
    assert list(leftovers(fake)) == []
    assert len(list((tmp_path / "nixl_tiers").iterdir())) == 1


def test_memory_that_is_not_pinned_is_not_measured(start: Callable[..., FakeGpu], tmp_path: Path) -> None:
    here = scenario()
    fake = start(here)
    fake.fail("cuMemHostRegister_v2", 2)
    with parts(fake, here) as (device, pinned, loaded):
        assert choose(device, here.plan, pinned, loaded, tmp_path) == Fixed(("staged", "staged"))
        assert guess(here.plan, None) == Fixed(("copy_engine", "copy_engine"))


def test_a_measurement_is_used_without_a_cache_folder(
    start: Callable[..., FakeGpu], monkeypatch: pytest.MonkeyPatch
) -> None:
    here = scenario()
    fake = start(here)
    monkeypatch.setattr(autotune, "cache_folder", lambda: None)
    with parts(fake, here) as (device, pinned, loaded):
        assert isinstance(choose(device, here.plan, pinned, loaded), Measured)


def test_without_gpu_memory_the_strategy_is_chosen_by_size(
    start: Callable[..., FakeGpu], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    here = scenario()
    fake = start(here)
    with parts(fake, here) as (device, pinned, loaded):
        fake.fail("cuMemAlloc_v2", 2)
        assert choose(device, here.plan, pinned, loaded, tmp_path) == Fixed(("staged", "staged"))
    assert "could not be measured, and are chosen by size: cuMemAlloc_v2 failed" in caplog.text
    assert list(tmp_path.iterdir()) == []


def test_a_transfer_takes_the_strategy_of_the_nearest_size() -> None:
    few, many = {"copy_engine": 1.0, "staged": 2.0}, {"copy_engine": 2.0, "staged": 1.0}
    measured = Measured({"store": [{"16": few, "1024": many}], "load": [{"16": many}]})
    assert [measured(True, 0, blocks) for blocks in (1, 16, 128, 129, 5000)] == ["copy_engine"] * 3 + ["staged"] * 2
    assert measured(False, 0, 7) == "staged"


def test_multiprocessors_cost_a_little() -> None:
    assert best({"copy_engine": 1.0, "ring8": 0.95}) == "copy_engine"
    assert best({"copy_engine": 1.0, "ring8": 0.8, "ring2": 0.82}) == "ring2"


def test_the_doctor_sees_a_gpu(start: Callable[..., FakeGpu], monkeypatch: pytest.MonkeyPatch) -> None:
    doctor = pytest.importorskip("nixl_tiers.cli.doctor", exc_type=ImportError)
    fake = start(scenario())
    monkeypatch.setattr(doctor, "open_driver", lambda: fake.driver)
    assert list(doctor._gpus()) == [
        "CUDA driver: 13.0, copies in batches",
        "GPU 0: Fake GPU at ffff:ff:00.0; kernels: here",
    ]
