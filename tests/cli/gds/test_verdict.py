"""The verdict from made-up findings: native only where cuFile says so and counters moved with every transfer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nixl_tiers.cli.children import Step
from nixl_tiers.cli.gds.probe import nvidia_fs
from nixl_tiers.cli.gds.verdict import Kind, Probes, claimed_way, decide

TRANSFERS = 13
SAYS_NOTHING: dict[str, Any] = {
    "nvidia_fs": None, "storage_flags": 0, "feature_flags": 15, "nvme_p2p_flags": 0, "allow_compat_mode": True,
    "force_compat_mode": False, "use_pci_p2pdma": False,
}  # fmt: skip
SAYS_NVFS = {**SAYS_NOTHING, "nvidia_fs": "2.26"}
SAYS_P2P = {**SAYS_NOTHING, "feature_flags": 31}


def ok(**findings: Any) -> Step:
    return Step((findings,), "", 0.1)


def failed(sentence: str) -> Step:
    return Step((), sentence, 0.1)


def counts(nvfs: int = 0, p2p: int = 0, posix: int = 0, machine: int | None = None) -> dict[str, Any]:
    cufile = {
        f"{way}{direction}": number
        for direction in ("reads", "writes")
        for way, number in (("", nvfs + p2p + posix), ("nvfs_", nvfs), ("p2p_", p2p), ("posix_", posix))
    }
    return {"cufile": cufile, "nvidia_fs": None if machine is None else {"reads": machine, "writes": machine}}


def moved(before: dict[str, Any] | None, after: dict[str, Any]) -> Step:
    return ok(transfers=TRANSFERS, before=before, after=after)


def probes(said: dict[str, Any], allocated: Step | None) -> Probes:
    fine = ok(nixl="1.5.1")
    return Probes(fine, ok(library="libcufile.so.0"), ok(driver=said), fine, allocated, fine, fine)


@pytest.mark.parametrize(
    ("said", "after"),
    [
        (SAYS_NVFS, counts(nvfs=TRANSFERS)),
        (SAYS_P2P, counts(p2p=TRANSFERS)),
        ({**SAYS_NOTHING, "nvme_p2p_flags": 1}, counts(p2p=TRANSFERS)),
        (SAYS_NVFS, counts(nvfs=2 * TRANSFERS)),  # a large transfer may be counted in parts
        (SAYS_NVFS, {**counts(machine=100 + TRANSFERS), "cufile": None}),  # cuFile before 1.15
    ],
)
def test_native_needs_both_witnesses(said: dict[str, Any], after: dict[str, Any]) -> None:
    before = {"cufile": None, "nvidia_fs": {"reads": 100, "writes": 100} if after["nvidia_fs"] else None}
    assert decide(probes(said, moved(before, after))).kind is Kind.NATIVE


@pytest.mark.parametrize(
    ("said", "after", "reason"),
    [
        (SAYS_NOTHING, counts(nvfs=TRANSFERS), "cuFile finds neither nvidia-fs nor PCI P2PDMA"),
        ({**SAYS_NVFS, "force_compat_mode": True}, counts(nvfs=TRANSFERS), "the configuration forces it"),
        (SAYS_NVFS, counts(posix=TRANSFERS), "cuFile's statistics count 0 and 0 as direct, and 26 as POSIX"),
        (SAYS_NVFS, counts(nvfs=6, posix=7), "cuFile's statistics count 6 and 6 as direct, and 14 as POSIX"),
        (SAYS_NVFS, counts(nvfs=TRANSFERS, posix=1), "count 13 and 13 as direct, and 2 as POSIX"),
        (SAYS_NVFS, {"cufile": None, "nvidia_fs": None}, "neither cuFile nor nvidia-fs counts"),
        (SAYS_NVFS, {"cufile": None, "nvidia_fs": {"reads": None, "writes": None}}, "neither cuFile nor nvidia-fs"),
        (SAYS_NVFS, {**counts(machine=5), "cufile": None}, "nvidia-fs counts 5 and 5, for the whole machine"),
        (SAYS_P2P, {**counts(machine=99), "cufile": None}, "no statistics of its GPUs, and nothing else counts P2PDMA"),
    ],
)
def test_one_witness_is_not_enough(said: dict[str, Any], after: dict[str, Any], reason: str) -> None:
    verdict = decide(probes(said, moved(None, after)))
    assert verdict.kind is Kind.COMPATIBILITY
    assert reason in verdict.reason


def test_what_was_counted_before_the_test_does_not_count() -> None:
    same = counts(nvfs=1000)
    assert decide(probes(SAYS_NVFS, moved(same, same))).kind is Kind.COMPATIBILITY


@given(
    st.sampled_from([SAYS_NOTHING, SAYS_NVFS, SAYS_P2P, {**SAYS_NVFS, "force_compat_mode": True}]),
    st.integers(0, 30),
    st.integers(0, 30),
    st.integers(0, 30),
)
def test_native_never_comes_without_a_claim_and_all_transfers(
    said: dict[str, Any], nvfs: int, p2p: int, posix: int
) -> None:
    verdict = decide(probes(said, moved(None, counts(nvfs, p2p, posix))))
    entitled = claimed_way(ok(driver=said)) and nvfs + p2p >= TRANSFERS and not posix
    assert (verdict.kind is Kind.NATIVE) == bool(entitled)


# --- the second witness: what nvidia-fs counts

STATS = """GDS Version: 1.10.0.4
NVFS statistics(ver: 4.0)
NVFS Driver(version: 2.20.5)
IO stats: Enabled, peer IO stats: Enabled

Active Shadow-Buffer (MiB): 0
Batches\t\t\t\t: n=0 ok=0 err=0 Avg-Submit-Latency(usec)=0
Reads\t\t\t\t: n=12 ok=11 err=1 readMiB=3 io_state_err=0
Reads\t\t\t\t: Bandwidth(MiB/s)=0 Avg-Latency(usec)=0
Sparse Reads\t\t        : n=6 io=0 holes=0 pages=0
Writes\t\t\t\t: n=8 ok=8 err=0 writeMiB=2 io_state_err=0 pg-cache=0 pg-cache-fail=0 pg-cache-eio=0
Ops\t\t\t\t: Read=0 Write=0 BatchIO=0
"""
STATS_OFF = """IO stats: Disabled, peer IO stats: Enabled
Reads                           : err=0 io_state_err=0
Sparse Reads                    : n=0 io=0 holes=0 pages=0
Writes                          : err=0 io_state_err=0 pg-cache=0 pg-cache-fail=0 pg-cache-eio=0
"""


def with_stats(root: Path, text: str) -> Path:
    folder = root / "proc/driver/nvidia-fs"
    folder.mkdir(parents=True)
    (folder / "stats").write_text(text)
    return root


def test_counters_of_nvidia_fs_are_those_that_succeeded(tmp_path: Path) -> None:
    assert nvidia_fs(with_stats(tmp_path, STATS)) == {"reads": 11, "writes": 8}


@pytest.mark.parametrize("text", [STATS_OFF, "", "Reads: none"])
def test_counters_that_are_off_are_none_and_not_zero(text: str, tmp_path: Path) -> None:
    assert nvidia_fs(with_stats(tmp_path, text)) == {"reads": None, "writes": None}


def test_without_the_module_there_are_no_counters(tmp_path: Path) -> None:
    assert nvidia_fs(tmp_path) is None
