"""`inspect` and `purge` on a prefix of a bucket, also while a tier uses it."""

from __future__ import annotations

import json
import re
import secrets
from typing import Any

import pytest

from nixl_tiers.base.chunk import Geometry, Outcome, object_name
from nixl_tiers.base.manifest import Description, Manifest
from nixl_tiers.cli import FAILED, OK, main
from nixl_tiers.tiers import manifests
from tests.support.servers import S3Server
from tests.system.tiers.s3.harness import NAMESPACE, TierDriver, wait_until

pytestmark = pytest.mark.moto

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
