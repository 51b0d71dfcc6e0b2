"""`inspect` and `purge` on a prefix of a bucket, also while a tier uses it."""

from __future__ import annotations

import json
import math
import re
import secrets
from typing import Any

import pytest
from botocore.client import BaseClient
from botocore.exceptions import ClientError

from nixl_tiers.base.chunk import Geometry, Outcome, object_name
from nixl_tiers.base.manifest import Description, Manifest
from nixl_tiers.cli import FAILED, INCOMPLETE, OK, main
from nixl_tiers.config.schema import S3Config
from nixl_tiers.tiers import manifests
from nixl_tiers.tiers.s3 import answers
from nixl_tiers.tiers.s3.answers import answered_at_s
from nixl_tiers.tiers.s3.record import Record
from nixl_tiers.tiers.stored import find_stored
from tests.support.servers import S3Server, SeaweedServer
from tests.system.tiers.s3.harness import NAMESPACE, TierDriver, wait_until

pytestmark = pytest.mark.moto

DENIED: Any = {"Error": {"Code": "AccessDenied"}, "ResponseMetadata": {"HTTPStatusCode": 403}}
GEOMETRY = Geometry(cells=1, cell_payload=30_000)


def test_prefix_is_inspected_verified_and_purged_under_an_open_tier(
    s3_server: S3Server,
    place: dict[str, Any],
    fast_budget: None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(manifests, "CHECK_S", 0.02)
    url = f"s3://{place['bucket']}/{place['prefix']}"

    def run(*given: str) -> tuple[int, Any]:
        code = main([given[0], url, "--endpoint", place["endpoint"], *given[1:], "--json"])
        return code, json.loads(capsys.readouterr().out)

    with TierDriver(GEOMETRY, 8, engine="node/1/abcd", **place) as driver:
        driver.tier.describe(Description(model="org/model").of("blue"))
        driver.open()
        for number in (1, 2, 3):  # one by one: what was stored is found on a shared prefix, not stored again
            assert wait_until(lambda number=number: driver.store([number]) == [Outcome.OK])  # type: ignore[misc]

        def manifest() -> Any:
            return run("inspect")[1]["namespaces"][0]["manifest"]

        assert wait_until(lambda: manifest() is not None)
        assert manifest()["description"]["model"] == "org/model"
        code, shown = run("inspect")
        (found,) = shown["namespaces"]
        assert (code, found["place"], found["rows"]) == (OK, url, 3)
        assert found["bytes"] == 3 * GEOMETRY.row_bytes
        assert found["held_by"] == "at least one engine"

        code, shown = run("inspect", "--verify")
        assert (code, shown["namespaces"][0]["ok"]) == (OK, 3)
        driver.tier._control.connection.client.put_object(
            Bucket=place["bucket"], Key=driver.name(2), Body=b"\0" * GEOMETRY.row_bytes
        )
        code, shown = run("inspect", "--verify")
        (found,) = shown["namespaces"]
        assert (code, found["ok"], found["corrupt"]) == (FAILED, 2, 1)
        assert found["damaged"][0]["row"].endswith(driver.name(2))

        assert run("purge", "--salt", "red", "--yes") == (OK, {"deleted": True, "namespaces": []})
        assert run("purge", "--all")[1]["namespaces"][0]["rows"] == 3
        assert run("inspect")[1]["namespaces"][0]["rows"] == 3
        code, shown = run("purge", "--salt", "blue", "--namespace", NAMESPACE.hex(), "--yes")
        assert (code, shown["namespaces"][0]["rows"], shown["namespaces"][0]["left"]) == (OK, 3, 0)
        assert manifest() is not None  # of the engine that goes on
        client = driver.tier._control.connection.client
        listed = client.list_objects_v2(Bucket=place["bucket"], Prefix=f"{place['prefix']}/")["Contents"]
        left = {each["Key"].removeprefix(f"{place['prefix']}/") for each in listed}
        assert left - {f"{NAMESPACE.hex()}/about.json"} == {
            name for name in left if re.fullmatch(r"\.(owner|janitor|usage|landed-[0-9a-f]+)", name)
        }, "numbers and names of engines"
        assert driver.load([1, 2, 3]) == [Outcome.MISSING] * 3
        assert wait_until(lambda: driver.store([1]) == [Outcome.OK])
        assert driver.load([1]) == [Outcome.OK]
    code, shown = run("purge", "--older-than", "1h", "--yes")
    assert (code, shown["namespaces"]) == (OK, [])


def test_rows_that_were_written_since_they_were_listed_stay(s3_server: S3Server, place: dict[str, Any]) -> None:
    client, bucket, home = s3_server.client(), place["bucket"], f"{place['prefix']}/{NAMESPACE.hex()}"
    manifest = Manifest(NAMESPACE.hex(), Description(model="org/model"), 4096)
    names = {f"{home}/{object_name(b'%d' % number)}": b"row" for number in range(2)}
    for name, body in {**names, f"{home}/about.json": manifest.encode()}.items():
        client.put_object(Bucket=bucket, Key=name, Body=body)
    config = S3Config.model_validate({"type": "s3", "capacity": "1GiB", **place})
    (found,) = find_stored(config, math.inf)
    assert found.newest_s is not None
    found.newest_s -= 3600.0  # all were written later than what was listed
    found.delete(lambda _: None)
    left = client.list_objects_v2(Bucket=bucket, Prefix=home)["Contents"]
    assert {each["Key"] for each in left} == {*names, f"{home}/about.json"}


def test_versions_are_deleted_too_and_left_is_what_is_there(
    s3_server: S3Server, place: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    """Of a bucket with versioning: a delete without a version would leave all rows readable."""
    bucket = f"versioned-{secrets.token_hex(4)}"
    client = s3_server.client()
    client.create_bucket(Bucket=bucket)
    client.put_bucket_versioning(Bucket=bucket, VersioningConfiguration={"Status": "Enabled"})
    url = f"s3://{bucket}/{place['prefix']}"

    def run(*given: str) -> tuple[int, Any]:
        code = main([given[0], url, "--endpoint", place["endpoint"], *given[1:], "--json"])
        return code, json.loads(capsys.readouterr().out)

    def versions() -> list[str]:
        return [each["Key"] for each in client.list_object_versions(Bucket=bucket).get("Versions", ())]

    home = f"{place['prefix']}/{NAMESPACE.hex()}"
    foreign = f"{home}/notes/my-thesis.row"
    for number in range(3):
        for body in (b"old", b"new"):
            client.put_object(Bucket=bucket, Key=f"{home}/{object_name(b'%d' % number)}", Body=body)
    manifest = Manifest(NAMESPACE.hex(), Description(model="org/model").of("blue"), 4096)
    client.put_object(Bucket=bucket, Key=f"{home}/about.json", Body=manifest.encode())
    client.put_object(Bucket=bucket, Key=foreign, Body=b"precious")
    assert run("inspect")[1]["namespaces"][0]["rows"] == 3
    for name in {*versions()} - {foreign}:  # as an older version of this command did
        client.delete_object(Bucket=bucket, Key=name)
    assert run("purge", "--salt", "red", "--yes") == (OK, {"deleted": True, "namespaces": []})
    code, shown = run("purge", "--salt", "blue", "--yes")
    (report,) = shown["namespaces"]
    assert (code, report["rows"], report["left"], report["problem"]) == (OK, 6, 0, None)
    assert versions() == [foreign]
    about = f"{place['prefix']}/{bytes(16).hex()}/about.json"
    client.put_object(Bucket=bucket, Key=about, Body=b"about something else")
    assert run("purge", "--all", "--yes")[0] == OK
    assert sorted(versions()) == sorted([about, foreign])


def test_versions_of_many_pages_are_deleted(
    s3_server: S3Server, place: dict[str, Any], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of which some end among the versions of one object: what is deleted meanwhile hides no others."""
    bucket = f"versioned-{secrets.token_hex(4)}"
    client = s3_server.client()
    client.create_bucket(Bucket=bucket)
    client.put_bucket_versioning(Bucket=bucket, VersioningConfiguration={"Status": "Enabled"})
    for number in range(4):
        name = f"p/{NAMESPACE.hex()}/{object_name(b'%d' % number)}"
        for body in (b"oldest", b"old", b"new"):
            client.put_object(Bucket=bucket, Key=name, Body=body)
    real, calls = BaseClient._make_api_call, list[str]()

    def call(self: BaseClient, operation: str, given: dict[str, Any]) -> Any:
        calls.append(operation)
        if operation == "ListObjectVersions":
            given = {**given, "MaxKeys": min(2, given.get("MaxKeys", 2))}
        return real(self, operation, given)

    with monkeypatch.context() as patch:
        patch.setattr(BaseClient, "_make_api_call", call)
        patch.setattr("nixl_tiers.tiers.s3.deletes.MAX_DELETES", 5)
        code = main(["purge", f"s3://{bucket}/p", "--endpoint", place["endpoint"], "--all", "--yes", "--json"])
    (report,) = json.loads(capsys.readouterr().out)["namespaces"]
    assert (code, report["rows"], report["left"], report["problem"]) == (OK, 12, 0, None)
    assert "Versions" not in client.list_object_versions(Bucket=bucket)
    assert calls.count("ListObjectVersions") > 6
    assert calls.count("DeleteObjects") >= 3


@pytest.mark.parametrize("denied", [["ListObjectVersions"], ["ListObjectVersions", "GetBucketVersioning"]])
def test_versions_that_may_be_left_are_a_problem(
    denied: list[str],
    s3_server: S3Server,
    place: dict[str, Any],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bucket = f"versioned-{secrets.token_hex(4)}"
    client = s3_server.client()
    client.create_bucket(Bucket=bucket)
    client.put_bucket_versioning(Bucket=bucket, VersioningConfiguration={"Status": "Suspended"})
    client.put_object(Bucket=bucket, Key=f"p/{NAMESPACE.hex()}/{object_name(b'1')}", Body=b"row")
    real = BaseClient._make_api_call

    def call(self: BaseClient, operation: str, given: dict[str, Any]) -> Any:
        if operation in denied:
            raise ClientError(DENIED, operation)
        answer = real(self, operation, given)
        for each in answer.get("Deleted", ()):
            each["DeleteMarker"] = True  # as AWS says of a bucket with versioning
        return answer

    monkeypatch.setattr(BaseClient, "_make_api_call", call)
    command = ["purge", f"s3://{bucket}/p", "--endpoint", place["endpoint"], "--all", "--json"]
    if len(denied) == 1:  # else nothing tells before a delete is answered
        assert main(command) == INCOMPLETE
        assert "allow s3:ListBucketVersions" in json.loads(capsys.readouterr().out)["namespaces"][0]["problem"]
    code = main([*command, "--yes"])
    (report,) = json.loads(capsys.readouterr().out)["namespaces"]
    assert (code, report["left"]) == (INCOMPLETE, 0)
    assert "older versions" in report["problem"]


def test_verify_goes_on_after_an_object_that_may_not_be_read(
    s3_server: S3Server, place: dict[str, Any], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    client = s3_server.client()
    names = [f"{place['prefix']}/{NAMESPACE.hex()}/{object_name(b'%d' % number)}" for number in range(3)]
    for name in names:
        client.put_object(Bucket=place["bucket"], Key=name, Body=b"no row")
    real = BaseClient._make_api_call

    def call(self: BaseClient, operation: str, given: dict[str, Any]) -> Any:
        if operation == "GetObject" and given["Key"] == min(names):
            raise ClientError(DENIED, operation)
        return real(self, operation, given)

    monkeypatch.setattr(BaseClient, "_make_api_call", call)
    url = f"s3://{place['bucket']}/{place['prefix']}"
    code = main(["inspect", "--verify", url, "--endpoint", place["endpoint"], "--json"])
    (report,) = json.loads(capsys.readouterr().out)["namespaces"]
    assert (code, report["unreadable"], report["corrupt"]) == (INCOMPLETE, 1, 2)


@pytest.mark.usefixtures("server_credentials")
@pytest.mark.parametrize(
    ("name", "body", "ahead_s", "held_by"),
    [
        (".usage", Record(0, writer="mover").encode(), 0, "at least one engine"),
        (".usage", Record(0, writer="mover").encode(), -3600, "at least one engine"),
        (".usage", Record(0, writer="mover").encode(), 240, "at least one engine"),
        (".usage", Record(0, writer="mover").encode(), 600, None),
        (".usage", Record(0, writer="").encode(), 0, None),
        (".owner", b'{"engine": "pod-7", "since": 0, "lease": 60}', 240, "engine pod-7"),
        (".owner", b'{"engine": "pod-7", "since": 0, "lease": 60}', 600, None),
        (".janitor", b"mover 1", 240, "engine mover"),
        (".janitor", b"", 0, None),
    ],
)
def test_holder_is_alive_to_a_date_that_is_minutes_ahead(  # noqa: PLR0917 (of pytest's)
    name: str,
    body: bytes,
    ahead_s: float,
    held_by: str | None,
    seaweedfs: SeaweedServer,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A gateway's Date, and a Last-Modified of the storage behind it. Released: at once."""
    client, bucket = seaweedfs.client(), f"kv-{secrets.token_hex(4)}"
    client.create_bucket(Bucket=bucket)
    client.put_object(Bucket=bucket, Key=f"p/{NAMESPACE.hex()}/{object_name(b'key')}", Body=b"row")
    client.put_object(Bucket=bucket, Key=f"p/{name}", Body=body)
    monkeypatch.setattr(answers, "answered_at_s", lambda answer: (answered_at_s(answer) or 0.0) + ahead_s)
    assert main(["inspect", f"s3://{bucket}/p", "--endpoint", seaweedfs.endpoint, "--json"]) == OK
    (found,) = json.loads(capsys.readouterr().out)["namespaces"]
    assert found["held_by"] == held_by
