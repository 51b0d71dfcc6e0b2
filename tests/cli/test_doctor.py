"""`nixl-tiers doctor [CONFIG]` on real directories and S3 servers, with faults planted one by one."""

from __future__ import annotations

import io
import json
import os
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from botocore.exceptions import ClientError

import nixl_tiers
from nixl_tiers.base.chunk import Geometry
from nixl_tiers.cli import BAD_INPUT, disk_room, main
from nixl_tiers.cli.checks import bucket, directory, machine, probe, tiers, trial
from nixl_tiers.cli.checks.finding import Finding, Status, advise, broken, exit_code, not_tried, ok, warning
from nixl_tiers.cli.checks.trial import NAME
from nixl_tiers.config.schema import S3Config, load
from nixl_tiers.memory.cgroup import Room
from nixl_tiers.memory.region import HostRegion
from nixl_tiers.swap.driver import Driver, NoDriver
from nixl_tiers.tiers import staging_trial
from nixl_tiers.tiers.s3.lease_state import OWNER_TERMS, Record
from tests.support.file_tier import file_config, file_tier
from tests.support.machine import SHMEM_ENABLED, setting
from tests.support.proxy import FaultKind, FaultProxy, ProxyFault
from tests.support.servers import S3Server, SeaweedServer, free_ports

SLOW_MACHINE_S = 300.0


def named(findings: Iterable[Finding]) -> dict[str, Finding]:
    return {finding.name: finding for finding in findings}


def scratch_in(path: Path) -> list[Path]:
    return list(path.glob(f"{directory.SCRATCH_PREFIX}*"))


# --- the command ------------------------------------------------------------------------------------------------------


def no_driver() -> Driver:
    raise NoDriver("there is no CUDA driver here: it was hidden")


@pytest.fixture
def quiet_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the tiers count."""
    monkeypatch.setattr(machine, "examine", lambda config: iter([ok("machine", "is left out")]))
    monkeypatch.setattr(tiers, "plugins", lambda scratch, config: iter(()))


def test_missing_gpu_is_reported(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "open_driver", no_driver)
    monkeypatch.setattr(tiers, "_PLUGIN_S", SLOW_MACHINE_S)
    assert main(["doctor"]) in (0, 1)
    output = capsys.readouterr().out
    assert "copies in host memory" in output
    assert "there is no CUDA driver here: it was hidden\n" in output
    assert "NIXL POSIX" in output
    assert "opens\n" in output


def test_remembered_staging_is_shown(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    staging_trial.remember(staging_trial.Measured("loads", str(tmp_path), 4096, 3.6e9, 4.8e9))
    line = f"loads of rows of 4096 bytes, {tmp_path}: 4.80 GB/s staged, 3.60 GB/s direct; they are staged"
    assert line in [finding.text for finding in machine.examine(None)]


def test_staging_that_was_measured_in_a_directory_is_shown_with_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for row_bytes, path in ((4096, tmp_path / "kv"), (8192, tmp_path / "other")):
        path.mkdir()
        staging_trial.remember(staging_trial.Measured("stores", str(path), row_bytes, 3.6e9, 3.6e9))
    found = named(directory.examine(file_config(tmp_path / "kv", "1GiB"), "token"))
    assert found["staging of stores"].text.startswith(f"stores of rows of 4096 bytes, {tmp_path}/kv: ")


@pytest.mark.usefixtures("quiet_machine")
def test_json_has_every_finding_and_the_exit_code(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    storage = file_tier(tmp_path / "file" / "kv", "1GiB")
    config = {"tiers": [{"type": "cpu", "capacity": "64MiB"}, storage]}
    assert main(["doctor", json.dumps(config), "--json"]) == 2
    found = json.loads(capsys.readouterr().out)
    assert found["exit_code"] == 2
    assert [finding["status"] for finding in found["findings"]] == ["ok", "broken"]
    assert "is not a writable directory" in found["findings"][1]["text"]
    assert found["findings"][1]["change"]


@pytest.mark.usefixtures("quiet_machine")
@pytest.mark.parametrize(("connector", "code"), [("OffloadingConnector", 1), ("NixlTiersConnector", 0)])
def test_quotas_without_effect_are_found(connector: str, code: int, capsys: pytest.CaptureFixture[str]) -> None:
    """Only NixlTiersConnector tells us the salts of requests."""
    extra = {"tiers": [{"type": "cpu", "capacity": "64MiB"}], "quotas": {"*": {"share": "10%"}}}
    transfer = {"kv_connector": connector, "kv_connector_extra_config": {"spec_name": "NixlTiersSpec", **extra}}
    for command in ("doctor", "config"):
        assert main([command, json.dumps(transfer)]) == (code if command == "doctor" else 0)
        assert ("have no effect with OffloadingConnector" in capsys.readouterr().out) == bool(code)


def test_refused_configuration_is_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", '{"tiers": []}']) == BAD_INPUT
    assert capsys.readouterr().err.count("\n") == 1


def test_exit_code_is_that_of_the_worst_finding() -> None:
    findings = [ok("a", ""), not_tried("b", "")]
    assert exit_code(findings) == 0
    assert exit_code([*findings, advise("c", "")]) == 0
    assert exit_code([advise("c", ""), warning("d", "")]) == 1
    assert exit_code([warning("c", ""), broken("d", ""), ok("e", "")]) == 2


def test_index_that_was_not_compiled_is_warned_about(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "most_rows", lambda: 250_000)
    (finding,) = (each for each in machine._host() if each.name == "index of storage tiers")
    assert (finding.status, "holds at most 250000 chunks" in finding.text) == (Status.WARNING, True)


@pytest.mark.usefixtures("quiet_machine")
@pytest.mark.parametrize(
    ("findings", "code", "verdict"),
    [
        ([], 0, "all is well"),
        ([advise("huge pages", "none")], 0, "it works, and could be faster"),
        ([advise("huge pages", "none"), warning("memory", "is taken")], 1, "it works, and something should be changed"),
    ],
)
def test_advice_on_speed_is_shown_and_is_no_failure(
    findings: list[Finding],
    code: int,
    verdict: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """So that the exit code can gate an init container: few machines have huge pages for shared memory."""
    monkeypatch.setattr(machine, "examine", lambda config: iter([ok("machine", "fits"), *findings]))
    assert main(["doctor"]) == code
    assert f"verdict: {verdict} (1 ok" in capsys.readouterr().out
    assert main(["doctor", "--json"]) == code
    found = json.loads(capsys.readouterr().out)
    assert (found["exit_code"], found["verdict"]) == (code, verdict)
    assert [each["status"] for each in found["findings"]] == ["ok", *(each.status for each in findings)]


@pytest.mark.parametrize(("gpus", "built", "status"), [(1, False, Status.BROKEN), (1, True, None), (0, False, None)])
def test_missing_library_for_gpu_copies_is_broken_where_there_is_a_gpu(
    gpus: int, built: bool, status: Status | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine refuses to start there."""
    driver = SimpleNamespace(
        version=13000,
        batches=True,
        device_count=lambda: gpus,
        capability=lambda ordinal: (9, 0),
        pci_address=lambda ordinal: "0000:00:00.0",
        device_name=lambda ordinal: "a GPU",
    )
    monkeypatch.setattr(machine, "open_driver", lambda: driver)
    monkeypatch.setattr(machine.submit, "built", lambda: built)
    found = named(machine._gpus())
    assert (found["submission"].status if "submission" in found else None) == status


def test_cpu_tier_that_does_not_fit_is_broken() -> None:
    config = load({"tiers": [{"type": "cpu", "capacity": "1PiB"}]})
    memory = next(machine._memory(config))
    assert memory.status is Status.BROKEN
    assert "the region needs 1048576.00 GiB" in memory.text


@pytest.mark.parametrize(("free", "status"), [(64 << 20, Status.OK), (62 << 20, Status.WARNING)])
def test_pool_of_huge_pages_that_is_too_small_is_a_warning(
    free: int, status: Status, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = load({"tiers": [{"type": "cpu", "capacity": "64MiB", "huge_pages": "hugetlb"}]})
    monkeypatch.setattr(machine, "hugetlb_rooms", lambda: [Room("the pool", 1 << 40), Room("the cgroup", free)])
    (found,) = machine._pages(config)
    assert found.status is status
    assert f"{free >> 21} pages of 2 MiB in the pool are free" in found.text
    assert ("vm.nr_hugepages of at least 32 more" in found.change) == (status is Status.WARNING)


@pytest.mark.parametrize("value", ["advise", "never"])
def test_pages_that_shared_memory_gets_are_found_out(value: str) -> None:
    with setting(SHMEM_ENABLED, value):
        (found,) = machine._pages(None)
    assert f"(shmem_enabled: {value};" in found.text
    if value == "advise":
        assert found.status is Status.OK
    else:
        assert (found.status, found.details["huge_bytes"]) == (Status.ADVICE, 0)
        assert "write `advise`" in found.change


@pytest.mark.parametrize(("free", "status"), [(2 << 30, Status.OK), (1 << 20, Status.BROKEN)])
def test_memory_out_of_a_pool_need_not_fit_into_other_limits(
    free: int, status: Status, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pool's pages are not charged to them, unlike those that the region gets where the pool has too few."""
    config = load({"tiers": [{"type": "cpu", "capacity": "1GiB", "huge_pages": "hugetlb"}]})
    monkeypatch.setattr(machine, "hugetlb_rooms", lambda: [Room("the pool", free)])
    monkeypatch.setattr(machine, "rooms", lambda: [Room("the memory cgroup", 64 << 20, 64 << 20)])
    (memory,) = machine._memory(config)
    assert memory.status is status


def test_memory_that_is_taken_now_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that runs has taken it."""
    monkeypatch.setattr(machine, "rooms", lambda: [Room("the machine", 0)])
    config = load({"tiers": [{"type": "cpu", "capacity": "64MiB"}]})
    assert next(machine._memory(config)).status is Status.WARNING


def test_oldest_vllm_is_the_one_that_the_plugin_takes() -> None:
    source = Path(nixl_tiers.__file__).with_name("vllm") / "compat.py"  # not imported: that takes vLLM half a minute
    assert f"OLDEST: Final = {machine.OLDEST_VLLM}\n" in source.read_text()


@pytest.mark.parametrize(("release", "status"), [("0.25.9", Status.BROKEN), ("0.26.0", Status.OK)])
def test_old_vllm_is_broken(release: str, status: Status, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "packages_distributions", lambda: {"vllm": ["vllm"]})
    monkeypatch.setattr(machine, "version", lambda name: release)
    assert next(machine.examine(None)).status is status


# --- children ---------------------------------------------------------------------------------------------------------


def test_tier_that_hangs_is_broken_after_the_deadline(tmp_path: Path) -> None:
    (tmp_path / "kv").mkdir()
    found = named(tiers.examine(tmp_path, file_config(tmp_path / "kv", "1GiB"), deadline_s=0.1))
    assert found["examination"].status is Status.BROKEN
    assert "did not return within 0.1 s" in found["examination"].text
    assert scratch_in(tmp_path / "kv") == []


def test_missing_plugin_is_broken_only_where_it_is_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for package in ("nixl_cu12", "nixl_cu13", "nixl"):
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").write_text("raise ImportError('hidden')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    config = load({"tiers": [{"type": "cpu", "capacity": 1}, file_tier("/kv", "1G")]})
    monkeypatch.setattr(tiers, "_PLUGINS", {"POSIX": "file tiers", "OBJ": "s3 tiers"})
    found = named(tiers.plugins(tmp_path, config))
    assert found["NIXL POSIX"].status is Status.BROKEN
    assert found["NIXL OBJ"].status is Status.WARNING


# --- directories ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["slabs", "files"])
def test_directory_is_tried_and_left_as_it_was(layout: str, tmp_path: Path) -> None:
    path = tmp_path / "kv"
    found = named(tiers.examine(tmp_path, file_config(path, "1GiB", layout=layout), SLOW_MACHINE_S))
    assert found[NAME].status in (Status.OK, Status.ADVICE), found  # advice: this disk is slow
    assert "64 rows of 1 MiB written" in found[NAME].text
    assert found[NAME].details["read_bytes_per_s"] > 0
    assert not path.exists()
    assert scratch_in(tmp_path) == []


def test_trial_sees_one_wrong_byte_of_any_cell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which the tier has verified before: here it is put wrong behind its back."""
    regions: list[HostRegion] = []
    create, timed = HostRegion.create, trial._timed

    def kept(*given: Any) -> HostRegion:
        regions.append(create(*given))
        return regions[-1]

    def spoilt(tier: Any, start: Any, what: str) -> float:
        seconds = timed(tier, start, what)
        if what.startswith("read"):
            regions[-1].rows_view[1, 8192 + 4999] ^= 1  # the last byte of the second cell
        return seconds

    monkeypatch.setattr(HostRegion, "create", kept)
    geometry = Geometry(cells=2, cell_payload=5000)
    config = file_config(tmp_path / "kv", "1MiB")
    (tmp_path / "kv").mkdir()
    assert trial.write_read_verify(config, 2, geometry).status in (Status.OK, Status.ADVICE)
    monkeypatch.setattr(trial, "_timed", spoilt)
    found = trial.write_read_verify(config, 2, geometry)
    assert (found.status, found.text) == (Status.BROKEN, "bytes that were read differ from those that were written")


def test_nothing_is_written_beside_an_engine(tmp_path: Path) -> None:
    storage = file_tier(tmp_path, "64MiB")
    config = {"tiers": [{"type": "cpu", "capacity": "8MiB"}, storage]}
    with nixl_tiers.open(config, chunk_bytes=1 << 20, namespace="engine") as store:
        assert store.wait_ready(SLOW_MACHINE_S)
        before = tmp_path.stat().st_mtime_ns
        found = named(directory.examine(file_config(tmp_path, "1GiB"), "token"))
        assert tmp_path.stat().st_mtime_ns == before
    assert found[NAME].status is Status.NOT_TRIED
    assert found[NAME].text == f"an engine uses {tmp_path} (part-0): nothing was written here"
    assert directory.parts_in_use(tmp_path) == ""


@pytest.mark.parametrize(
    ("fields", "text"),
    [({"write": "off"}, "`write` is off"), ({"capacity": "64MiB"}, "are used, too much for a trial")],
)
def test_nothing_is_written_that_the_configuration_does_not_allow(
    fields: dict[str, Any], text: str, tmp_path: Path
) -> None:
    before = tmp_path.stat().st_mtime_ns
    found = named(directory.examine(file_config(tmp_path, **{"capacity": "1GiB", **fields}), "token"))
    assert found[NAME].status is Status.NOT_TRIED
    assert text in found[NAME].text
    assert tmp_path.stat().st_mtime_ns == before


def test_other_layout_is_broken(tmp_path: Path) -> None:
    (tmp_path / ".incoming").mkdir()
    assert named(directory.examine(file_config(tmp_path, "1GiB"), "token"))["layout"].status is Status.BROKEN


def test_capacity_beyond_the_file_system_is_a_warning(tmp_path: Path) -> None:
    found = named(directory.examine(file_config(tmp_path, "1EiB", write="off"), "token"))
    assert found["file system"].status is Status.WARNING
    assert found["file system"].change


def test_capacity_beyond_what_others_leave_is_a_warning_with_the_room_that_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """100 GiB, 30 GiB free, 10 GiB in the tier, 5 GiB for `min_free`: 35 GiB for the tier."""
    with (tmp_path / "slab").open("wb") as file:
        file.truncate(10 << 30)
    disk = SimpleNamespace(f_blocks=100, f_frsize=1 << 30, f_bavail=30)
    monkeypatch.setattr(disk_room, "os", SimpleNamespace(**{**vars(os), "statvfs": lambda _: disk}))
    monkeypatch.setattr(directory, "file_systems", lambda: {directory.device_of(tmp_path): "ext4"})
    for capacity, status in (("35GiB", Status.OK), ("36GiB", Status.WARNING)):
        found = next(directory._file_system(file_config(tmp_path, capacity, min_free="5GiB"), tmp_path))
        assert found.status is status
    assert "a capacity of 35 GiB" in found.change


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_directory_that_cannot_be_written_is_broken(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    assert named(directory.examine(file_config(tmp_path / "kv", "1GiB"), "token"))["directory"].status is Status.BROKEN


def test_failing_disk_is_broken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> bool:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(directory, "direct_works", full)
    found = named(directory.examine(file_config(tmp_path, "1GiB"), "token"))
    assert found[NAME].status is Status.BROKEN
    assert "No space left on device" in found[NAME].text
    assert scratch_in(tmp_path) == []


def test_scratch_of_a_doctor_that_was_killed_is_removed(tmp_path: Path) -> None:
    tokens = [digit * 16 for digit in "abc"]
    mine, old, running = (tmp_path / f"{directory.SCRATCH_PREFIX}{name}" for name in tokens)
    foreign = tmp_path / f"{directory.SCRATCH_PREFIX}notes"
    for scratch in (mine, old, running, foreign):
        scratch.mkdir()
    long_ago = time.time() - 2 * directory.STALE_S
    for scratch in (old, foreign):
        os.utime(scratch, (long_ago, long_ago))
    probe.clean(file_config(tmp_path, "1GiB"), tokens[0])
    assert sorted(scratch_in(tmp_path)) == [running, foreign]


# --- buckets ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def place(
    s3_server: S3Server,
    s3_credentials: Callable[[S3Server], None],
    s3_bucket: Callable[[S3Server], str],
    s3_prefix: str,
) -> S3Config:
    s3_credentials(s3_server)
    return s3_tier(s3_server.endpoint, s3_bucket(s3_server), s3_prefix)


def s3_tier(endpoint: str, name: str, prefix: str, **fields: Any) -> S3Config:
    return S3Config(type="s3", bucket=name, prefix=prefix, endpoint=endpoint, **({"capacity": "1GiB"} | fields))


def objects(server: S3Server, config: S3Config) -> list[str]:
    answer = server.client().list_objects_v2(Bucket=config.bucket, Prefix=f"{config.prefix}/")
    return [found["Key"] for found in answer.get("Contents", ())]


def test_bucket_is_tried_and_left_as_it_was(place: S3Config, s3_server: S3Server, tmp_path: Path) -> None:
    found = named(tiers.examine(tmp_path, place, SLOW_MACHINE_S))
    assert [name for name in ("connection", "list", "head", "get", "put", "delete") if found[name].status != "ok"] == []
    assert found["conditional put"].status is Status.OK
    assert found[NAME].status in (Status.OK, Status.ADVICE), found
    assert "16 rows of 1 MiB written" in found[NAME].text
    assert objects(s3_server, place) == []


def test_bucket_is_tried_with_rows_of_an_engine(place: S3Config, s3_server: S3Server, tmp_path: Path) -> None:
    found = named(tiers.examine(tmp_path, place, SLOW_MACHINE_S, Geometry(cells=2, cell_payload=1 << 18)))
    assert "31 rows of 512 KiB written" in found[NAME].text
    assert objects(s3_server, place) == []


@pytest.mark.parametrize(
    ("answer", "status", "text"),
    [
        ({"Status": "Enabled"}, Status.WARNING, "deleted and overwritten objects stay as old versions"),
        ({"Status": "Suspended"}, Status.OK, "off"),
        ({}, Status.OK, "off"),
        (ClientError({"ResponseMetadata": {"HTTPStatusCode": 403}}, "GetBucketVersioning"), Status.NOT_TRIED, "403"),
    ],
    ids=["enabled", "suspended", "never", "denied"],
)
def test_bucket_that_keeps_deleted_rows_is_a_warning(
    answer: dict[str, str] | ClientError, status: Status, text: str
) -> None:
    server = mock.Mock()
    server.get_bucket_versioning.side_effect = [answer]
    found = bucket._versioning(server, s3_tier("http://127.0.0.1:1", "kv-cache", "p"))
    assert found.status is status
    assert text in found.text
    assert ("suspend versioning" in found.change) is (status is Status.WARNING)


def test_versioning_of_a_real_bucket_is_found(
    s3_server: S3Server, s3_credentials: Callable[[S3Server], None], s3_prefix: str
) -> None:
    s3_credentials(s3_server)
    name = s3_server.make_bucket("kv-versions")
    status = {"Status": "Enabled"}
    s3_server.client().put_bucket_versioning(Bucket=name, VersioningConfiguration=status)
    found = named(bucket.examine(s3_tier(s3_server.endpoint, name, s3_prefix, write="off"), "token"))
    assert found["versioning"].status is Status.WARNING


@pytest.fixture
def proxied(
    seaweedfs: SeaweedServer,
    s3_credentials: Callable[[S3Server], None],
    s3_bucket: Callable[[S3Server], str],
    s3_prefix: str,
) -> Iterator[tuple[S3Config, FaultProxy]]:
    s3_credentials(seaweedfs)
    with FaultProxy(seaweedfs.port) as proxy:
        yield s3_tier(proxy.endpoint, s3_bucket(seaweedfs), s3_prefix), proxy


DENIED = ProxyFault(FaultKind.ERROR_STATUS, status=403, code="AccessDenied")
SCRATCH = bucket.SCRATCH_PREFIX


@pytest.mark.parametrize(
    ("right", "action", "fault"),
    [
        ("put", "s3:PutObject", replace(DENIED, methods=frozenset({"PUT"}))),
        ("get", "s3:GetObject", replace(DENIED, methods=frozenset({"GET"}), target=SCRATCH)),
        ("head", "s3:GetObject", replace(DENIED, methods=frozenset({"HEAD"}), target=SCRATCH)),
        ("delete", "s3:DeleteObject", replace(DENIED, methods=frozenset({"POST"}), target="delete")),
        ("list", "s3:ListBucket", replace(DENIED, methods=frozenset({"GET"}), target="list-type")),
    ],
)
def test_denied_right_is_named(
    right: str, action: str, fault: ProxyFault, proxied: tuple[S3Config, FaultProxy]
) -> None:
    config, proxy = proxied
    proxy.inject(fault)
    found = named(bucket.examine(config, "token"))
    assert {name for name, finding in found.items() if finding.status is Status.BROKEN} == {right}, found
    assert action in found[right].change
    assert config.bucket in found[right].change
    assert found[NAME].status is Status.NOT_TRIED


def test_request_that_fails_is_not_taken_for_a_missing_right(proxied: tuple[S3Config, FaultProxy]) -> None:
    config, proxy = proxied
    fault = replace(DENIED, status=500, code="InternalError", methods=frozenset({"PUT"}), target=SCRATCH)
    proxy.inject(fault)
    found = named(bucket.examine(config, "token"))["put"]
    assert (found.status, found.text) == (Status.BROKEN, "fails (InternalError)")
    assert "s3:PutObject" not in found.change


def test_delete_that_is_denied_in_an_answer_of_success_is_an_error() -> None:
    """AWS denies the delete of an object so."""

    class Server:
        def delete_objects(self, **_: Any) -> dict[str, Any]:
            return {"Errors": [{"Key": "k", "Code": "AccessDenied"}]}

    with pytest.raises(ClientError, match="AccessDenied"):
        bucket._delete(Server(), "bucket", "k")


def test_corrupted_rows_are_broken(proxied: tuple[S3Config, FaultProxy]) -> None:
    config, proxy = proxied
    proxy.inject(
        ProxyFault(FaultKind.BIT_FLIP, target=OWNER_TERMS.name, probability=0.0),
        ProxyFault(FaultKind.BIT_FLIP, methods=frozenset({"GET"}), target=SCRATCH),
    )
    found = named(bucket.examine(config, "token"))
    assert found[NAME].status is Status.BROKEN
    assert "rows were not read and verified (CORRUPT" in found[NAME].text


def test_wrong_credentials_are_named(
    seaweedfs: SeaweedServer, s3_bucket: Callable[[S3Server], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = s3_tier(seaweedfs.endpoint, s3_bucket(seaweedfs), "p", access_key_env="KV_ID", secret_key_env="KV_SECRET")
    assert "KV_ID is not set" in named(bucket.examine(config, "token"))["credentials"].text
    monkeypatch.setenv("KV_ID", "nobody")
    monkeypatch.setenv("KV_SECRET", "not-the-secret")
    (found,) = bucket.examine(config, "token")
    assert (found.name, found.status) == ("credentials", Status.BROKEN)
    assert "the server does not know this access key" in found.text


def test_missing_bucket_and_dead_server_are_broken(
    seaweedfs: SeaweedServer, s3_credentials: Callable[[S3Server], None]
) -> None:
    s3_credentials(seaweedfs)
    (missing,) = bucket.examine(s3_tier(seaweedfs.endpoint, "no-such-bucket", "p"), "token")
    assert (missing.name, missing.status) == ("connection", Status.BROKEN)
    assert 'there is no bucket "no-such-bucket"' in missing.text
    (dead,) = bucket.examine(s3_tier(f"http://127.0.0.1:{free_ports(1)[0]}", "bucket", "p"), "token")
    assert (dead.name, dead.status) == ("connection", Status.BROKEN)
    assert "does not answer" in dead.text


@pytest.mark.parametrize(("ahead_s", "alive"), [(240, True), (600, False)])
def test_owner_is_alive_to_a_date_that_is_minutes_ahead(ahead_s: float, alive: bool) -> None:
    """A gateway's Date, and a Last-Modified of the storage behind it."""
    written = datetime(2026, 1, 1, tzinfo=UTC)
    date = format_datetime(written + timedelta(seconds=ahead_s))
    client = mock.Mock()
    client.get_object.return_value = {
        "Body": io.BytesIO(Record("engine-7", 0.0, 60.0).encode()),
        "LastModified": written,
        "ResponseMetadata": {"HTTPHeaders": {"date": date}},
    }
    owner = bucket._owner(client, s3_tier("http://127.0.0.1:1", "bucket", "p"))
    assert ("engine-7" in owner) == alive


@pytest.mark.parametrize("write", ["through", "off"])
def test_nothing_is_written_beside_an_owner_or_with_write_off(write: str, place: S3Config, s3_server: S3Server) -> None:
    if write == "through":
        body = Record("engine-7", time.time(), 3600.0).encode()
        s3_server.client().put_object(Bucket=place.bucket, Key=f"{place.prefix}/{OWNER_TERMS.name}", Body=body)
    before = objects(s3_server, place)
    found = named(bucket.examine(place.model_copy(update={"write": write}), "token"))
    assert found[NAME].status is found["put, delete"].status is Status.NOT_TRIED
    assert ("engine-7" if write == "through" else "`write` is off") in found[NAME].text
    assert found["get"].status is found["head"].status is Status.OK
    assert objects(s3_server, place) == before
