"""`nixl-tiers doctor [CONFIG]` on real directories and S3 servers, with faults planted one by one."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from botocore.exceptions import ClientError

import nixl_tiers
from nixl_tiers.cli import disk_room, main
from nixl_tiers.cli.checks import bucket, directory, machine, probe, tiers
from nixl_tiers.cli.checks.finding import Finding, Status, advise, ok, warning
from nixl_tiers.cli.checks.trial import NAME
from nixl_tiers.config.schema import S3Config
from tests.support.file_tier import file_config
from tests.support.servers import S3Server


def named(findings: Iterable[Finding]) -> dict[str, Finding]:
    return {finding.name: finding for finding in findings}


def scratch_in(path: Path) -> list[Path]:
    return list(path.glob(f"{directory.SCRATCH_PREFIX}*"))


@pytest.fixture
def quiet_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the tiers count."""
    monkeypatch.setattr(machine, "examine", lambda config: iter([ok("machine", "is left out")]))
    monkeypatch.setattr(tiers, "plugins", lambda scratch, config: iter(()))


@pytest.mark.usefixtures("quiet_machine")
@pytest.mark.parametrize(("connector", "code"), [("OffloadingConnector", 1), ("NixlTiersConnector", 0)])
def test_quotas_without_effect_are_found(connector: str, code: int, capsys: pytest.CaptureFixture[str]) -> None:
    """Only NixlTiersConnector tells us the salts of requests."""
    extra = {"tiers": [{"type": "cpu", "capacity": "64MiB"}], "quotas": {"*": {"share": "10%"}}}
    transfer = {"kv_connector": connector, "kv_connector_extra_config": {"spec_name": "NixlTiersSpec", **extra}}
    for command in ("doctor", "config"):
        assert main([command, json.dumps(transfer)]) == (code if command == "doctor" else 0)
        assert ("have no effect with OffloadingConnector" in capsys.readouterr().out) == bool(code)


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


def test_oldest_vllm_is_the_one_that_the_plugin_takes() -> None:
    source = Path(nixl_tiers.__file__).with_name("vllm") / "compat.py"  # not imported: that takes vLLM half a minute
    assert f"OLDEST: Final = {machine.OLDEST_VLLM}\n" in source.read_text()


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"write": "off", "layout": "files"}, "`write` is off"),
        ({"capacity": "64MiB"}, "are used, too much for a trial"),
    ],
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


def s3_tier(endpoint: str, name: str, prefix: str, **fields: Any) -> S3Config:
    return S3Config(type="s3", bucket=name, prefix=prefix, endpoint=endpoint, **({"capacity": "1GiB"} | fields))


def objects(server: S3Server, config: S3Config) -> list[str]:
    answer = server.client().list_objects_v2(Bucket=config.bucket, Prefix=f"{config.prefix}/")
    return [found["Key"] for found in answer.get("Contents", ())]


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


class Pages:
    """A server that lists so many objects, a few a page, as one that knows only small pages."""

    def __init__(self, names: list[str], denied: str = "") -> None:
        self.names, self.denied = names, denied

    def list_objects_v2(self, *, Prefix: str, ContinuationToken: str = "", **_: Any) -> dict[str, Any]:  # noqa: N803
        left = sorted(name for name in self.names if name.startswith(Prefix) and name > ContinuationToken)
        ages = {name: timedelta(seconds=2 * directory.STALE_S * name.endswith("old")) for name in left[:3]}
        page = {"Contents": [{"Key": name, "LastModified": datetime.now(UTC) - age} for name, age in ages.items()]}
        return page | ({"NextContinuationToken": left[2]} if len(left) > 3 else {})

    def delete_objects(self, *, Delete: dict[str, Any], **_: Any) -> dict[str, Any]:  # noqa: N803
        (found,) = Delete["Objects"]
        if self.denied:
            return {"Errors": [{"Key": found["Key"], "Code": self.denied}]}
        self.names.remove(found["Key"])
        return {}


def test_all_objects_of_a_trial_are_deleted_and_only_those() -> None:
    """Those of a killed doctor, too. Of small rows there are more than a page has; the rest stayed in the bucket."""
    mine, running, killed, foreign = (
        f"p/{bucket.SCRATCH_PREFIX}{name}/" for name in ("a" * 16, "b" * 16, "c" * 16, "notes")
    )
    scratch, others = mine, [f"{running}x", f"{foreign}old", "p/row"]
    server = Pages([*others, f"{killed}old", *(f"{scratch}{number}" for number in range(10))])
    config = s3_tier("http://127.0.0.1:1", "kv-cache", "p")
    assert bucket._clean(server, config, "a" * 16) == ""
    assert server.names == others
    assert bucket._clean(Pages([f"{scratch}1"], "AccessDenied"), config, "a" * 16) == "AccessDenied"
