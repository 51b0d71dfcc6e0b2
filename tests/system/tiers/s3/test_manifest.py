"""Manifests in a bucket: an object beside a namespace's rows that no listing takes for one, and nothing deletes."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from nixl_tiers.base.chunk import Geometry, Outcome
from nixl_tiers.base.manifest import Description, Manifest
from nixl_tiers.tiers import manifests
from nixl_tiers.tiers.s3 import tier as tier_module
from nixl_tiers.tiers.s3.conditional import get_object
from tests.support.servers import MotoServer
from tests.system.tiers.s3.harness import NAMESPACE, OTHER_NAMESPACE, FaultyS3, Request, TierDriver, wait_until

GEOMETRY = Geometry(cells=1, cell_payload=30_000)
ABOUT = Description(model="org/model", note="test rows")


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manifests, "CHECK_S", 0.02)


@pytest.fixture
def place(moto: MotoServer, s3_credentials: Any, s3_bucket: Any, s3_prefix: str) -> dict[str, Any]:
    s3_credentials(moto)
    return {"bucket": s3_bucket(moto), "endpoint": moto.endpoint, "prefix": s3_prefix}


def name_of(driver: TierDriver, namespace: bytes = NAMESPACE) -> str:
    return f"{driver.config.prefix}/{namespace.hex()}/about.json"


def manifest_in(moto: MotoServer, driver: TierDriver) -> Manifest | None:
    found = get_object(moto.client(), driver.config.bucket, name_of(driver))
    return None if found is None else Manifest.decode(found["Body"].read())


def looked(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Grows each time that a tier has looked whether there are rows."""
    found: list[bool] = []
    is_wanted = tier_module._Manifests.is_wanted

    def noted(self: tier_module._Manifests) -> bool:
        found.append(is_wanted(self))
        return found[-1]

    monkeypatch.setattr(tier_module._Manifests, "is_wanted", noted)
    return found


def start(place: dict[str, Any], **fields: Any) -> TierDriver:
    driver = TierDriver(GEOMETRY, 8, engine="node/1/abcd", **place, **fields)
    driver.tier.describe(ABOUT)
    driver.open()
    return driver


def test_manifest_is_written_with_the_first_rows_and_is_no_row(
    moto: MotoServer, place: dict[str, Any], fast_budget: None
) -> None:
    with start(place, max_age=1000) as driver:
        assert manifest_in(moto, driver) is None
        assert wait_until(lambda: driver.store([1]) == [Outcome.OK])
        assert wait_until(lambda: manifest_in(moto, driver) is not None)
        found = manifest_in(moto, driver)
        assert found is not None
        assert (found.namespace, found.description) == (NAMESPACE.hex(), ABOUT)
    with start(place) as again:
        assert again.load([1]) == [Outcome.OK]
        assert manifest_in(moto, again) is not None


def test_server_that_hangs_does_not_hang_the_close(place: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manifests, "CHECK_S", 1e6)
    looks = looked(monkeypatch)
    hangs, goes_on = threading.Event(), threading.Event()

    def hang(*_: object) -> None:
        hangs.set()
        goes_on.wait(300)

    monkeypatch.setattr(tier_module, "get_object", hang)
    driver = start(place)
    assert wait_until(lambda: bool(looks))
    assert wait_until(lambda: driver.store([1]) == [Outcome.OK])
    closing = threading.Thread(target=driver.tier.close, daemon=True)
    closing.start()
    try:
        assert hangs.wait(300)
        closing.join(300)
        assert not closing.is_alive()
    finally:
        goes_on.set()
        driver.region.close()


def test_no_manifest_for_weights_that_were_replaced(moto: MotoServer, place: dict[str, Any]) -> None:
    with TierDriver(GEOMETRY, 8, **place) as driver:
        driver.tier.describe(ABOUT)
        driver.open(OTHER_NAMESPACE, 7)
        assert driver.store([1]) == [Outcome.OK]
        driver.open(NAMESPACE, 0)
        assert driver.store([1]) == [Outcome.OK]
        assert wait_until(lambda: manifest_in(moto, driver) is not None)
        assert get_object(moto.client(), driver.config.bucket, name_of(driver, OTHER_NAMESPACE)) is None


def test_server_that_takes_no_manifest_costs_no_row(faulty: FaultyS3) -> None:
    tried: list[str] = []

    def fault(request: Request) -> int | None:
        if not request.name.endswith("/about.json"):
            return None
        tried.append(request.method)
        return 503

    faulty.fault = fault
    with start({"bucket": "kv-test", "endpoint": faulty.endpoint, "prefix": "p"}) as driver:
        assert driver.store([1]) == [Outcome.OK]
        assert wait_until(lambda: bool(tried))
        assert driver.load([1]) == [Outcome.OK]
        assert driver.store([2]) == [Outcome.OK]
