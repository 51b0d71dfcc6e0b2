"""`inspect`, `verify` and `purge` on a prefix of a bucket, also while a tier uses it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from nixl_tiers.chunk import Geometry, Outcome
from nixl_tiers.cli import FAILED, OK, main
from nixl_tiers.manifest import Description
from nixl_tiers.testing.servers import S3Server, SeaweedServer
from nixl_tiers.tiers.s3 import tier as tier_module
from tests.tiers.s3.harness import NAMESPACE, TierDriver, wait_until

GEOMETRY = Geometry(cells=1, cell_payload=30_000)


def test_prefix_is_inspected_verified_and_purged_under_an_open_tier(
    s3_server: S3Server,
    place: dict[str, Any],
    fast_janitor: None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(tier_module, "MANIFEST_CHECK_S", 0.02)
    shared = isinstance(s3_server, SeaweedServer)  # one of each kind is enough
    url = f"s3://{place['bucket']}/{place['prefix']}"

    def run(*given: str) -> tuple[int, Any]:
        code = main([given[0], url, "--endpoint", place["endpoint"], *given[1:], "--json"])
        return code, json.loads(capsys.readouterr().out)

    with TierDriver(GEOMETRY, 8, engine="node/1/abcd", **place, shared=shared) as driver:
        driver.tier.describe(Description(model="org/model").of("blue"))
        driver.open()
        assert wait_until(lambda: driver.store([1, 2, 3]) == [Outcome.OK] * 3)

        def manifest() -> Any:
            return run("inspect")[1]["namespaces"][0]["manifest"]

        assert wait_until(lambda: manifest() is not None)
        assert manifest()["description"]["model"] == "org/model"
        code, shown = run("inspect")
        (found,) = shown["namespaces"]
        assert (code, found["place"], found["rows"]) == (OK, url, 3)
        assert found["bytes"] == 3 * GEOMETRY.row_bytes
        assert found["held_by"] == ("at least one engine" if shared else "engine node/1/abcd")

        code, shown = run("verify")
        assert (code, shown["namespaces"][0]["ok"]) == (OK, 3)
        driver.tier._control.connection.client.put_object(
            Bucket=place["bucket"], Key=driver.name(2), Body=b"\0" * GEOMETRY.row_bytes
        )
        code, shown = run("verify")
        (found,) = shown["namespaces"]
        assert (code, found["ok"], found["corrupt"]) == (FAILED, 2, 1)
        assert found["damaged"][0]["row"].endswith(driver.name(2))

        assert run("purge", "--salt", "red", "--yes") == (OK, {"deleted": True, "namespaces": []})
        assert run("purge", "--all")[1]["namespaces"][0]["rows"] == 3
        assert run("inspect")[1]["namespaces"][0]["rows"] == 3
        code, shown = run("purge", "--salt", "blue", "--namespace", NAMESPACE.hex(), "--yes")
        assert (code, shown["namespaces"][0]["rows"], shown["namespaces"][0]["left"]) == (OK, 3, 0)
        assert driver.load([1, 2, 3]) == [Outcome.MISSING] * 3
        assert wait_until(lambda: driver.store([1]) == [Outcome.OK])
        assert driver.load([1]) == [Outcome.OK]
    code, shown = run("purge", "--older-than", "1h", "--yes")
    assert (code, shown["namespaces"]) == (OK, [])


def test_server_that_does_not_answer_is_one_sentence(
    server_credentials: None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["inspect", "s3://kv-test/p", "--endpoint", "http://127.0.0.1:9"]) == 2
    error = capsys.readouterr().err
    assert "does not answer" in error
    assert error.count("\n") == 1
