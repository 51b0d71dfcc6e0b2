"""S3 servers that are gone, unresponsive, slow, faulty, or deny access."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from botocore.exceptions import ClientError

from nixl_tiers.config.schema import S3Config
from nixl_tiers.tiers.s3.names import CONDITIONS_NAME
from tests.support.leaks import ResourceCount
from tests.support.load import put
from tests.support.proxy import FaultKind, FaultProxy, ProxyFault
from tests.support.servers import SECRET_KEY, MotoServer
from tests.support.waiting import serves, until
from tests.system.faults.rig import CAPACITY, TIMEOUT_S, FaultRig

pytestmark = pytest.mark.timeout(900)

GET, PUT = frozenset({"GET"}), frozenset({"PUT"})
S3_FAULTS: dict[str, ProxyFault] = {
    "connection refused": ProxyFault(FaultKind.REFUSED),
    "black hole": ProxyFault(FaultKind.BLACK_HOLE),
    "black hole, uploads only": ProxyFault(FaultKind.BLACK_HOLE, methods=PUT),
    "1 byte/s": ProxyFault(FaultKind.THROTTLE),
    "1 byte/s, downloads only": ProxyFault(FaultKind.THROTTLE, methods=GET),
    "500 storm": ProxyFault(FaultKind.ERROR_STATUS, status=500, code="InternalError"),
    "503 storm": ProxyFault(FaultKind.ERROR_STATUS, status=503, code="SlowDown"),
    "503 for half of the requests": ProxyFault(FaultKind.ERROR_STATUS, status=503, code="SlowDown", probability=0.5),
    "connection reset mid-body": ProxyFault(FaultKind.RESET),
    "connection closed mid-body": ProxyFault(FaultKind.EARLY_EOF, methods=GET),
    "truncated bodies": ProxyFault(FaultKind.TRUNCATED, methods=GET),
    "bit flips in downloads": ProxyFault(FaultKind.BIT_FLIP, methods=GET),
    "bit flips in uploads": ProxyFault(FaultKind.BIT_FLIP, methods=PUT),
    "wrong credentials (403)": ProxyFault(FaultKind.ERROR_STATUS, status=403, code="InvalidAccessKeyId"),
    "expired credentials (400)": ProxyFault(FaultKind.ERROR_STATUS, status=400, code="ExpiredToken"),
    "bucket missing (404)": ProxyFault(FaultKind.ERROR_STATUS, status=404, code="NoSuchBucket"),
}
UNMARKED = {"black hole", "503 storm"}


@pytest.mark.parametrize(
    "fault", [pytest.param(name, marks=[] if name in UNMARKED else pytest.mark.faults) for name in S3_FAULTS]
)
def test_server_fault(s3_rig: Callable[..., FaultRig], proxy: FaultProxy, fault: str) -> None:
    rig, proxy_fault = s3_rig(fault), S3_FAULTS[fault]

    def begin() -> None:
        proxy.inject(proxy_fault)
        until(lambda: proxy.injected[proxy_fault.kind] or rig.load.stats.errors, "a request to fail", TIMEOUT_S)

    rig.ride_out(begin, proxy.clear, answers=30)


@pytest.mark.faults
@pytest.mark.parametrize("fault", ["connection refused", "black hole", "503 storm", "wrong credentials (403)"])
def test_server_fault_from_the_start(s3_rig: Callable[..., FaultRig], proxy: FaultProxy, fault: str) -> None:
    rig = s3_rig(f"{fault}, from the start")
    rig.ride_out(lambda: proxy.inject(S3_FAULTS[fault]), proxy.clear, warm=False)


DENIED = {
    "put": "uploads are denied (AccessDenied; the right is s3:PutObject)",
    "get": "downloads are denied (AccessDenied; the right is s3:GetObject)",
    "delete": "deletes are denied (AccessDenied; the right is s3:DeleteObject)",
    "list": "listings are denied (AccessDenied; the right is s3:ListBucket)",
}


@pytest.mark.parametrize("kind", ["put", *(pytest.param(each, marks=pytest.mark.faults) for each in list(DENIED)[1:])])
def test_missing_permission(
    s3_rig: Callable[..., FaultRig],
    patient: dict[str, Any],
    proxy: FaultProxy,
    caplog: pytest.LogCaptureFixture,
    kind: str,
) -> None:
    """It is logged once, shown in `problem` while it lasts, and heals."""
    caplog.set_level(logging.INFO, "nixl_tiers")
    # Small, so that objects are evicted; but with windows of more than one row.
    small = {"type": "tests.mover.stub_tiers:FastBudgetConfig", "window_share": 8, "ready_s": 1.0, "capacity": 4 << 20}
    rig = s3_rig(f"{kind} denied (403)", fields=small, **patient)
    assert isinstance(rig.tier, S3Config)
    denied = partial(ProxyFault, FaultKind.ERROR_STATUS, status=403, code="AccessDenied")
    proxy_fault = {
        "put": denied(methods=PUT),
        "get": denied(methods=GET, target=f"/{rig.tier.prefix}/"),
        "delete": denied(methods=frozenset({"POST"})),
        "list": denied(methods=GET, target="list-type"),
    }[kind]
    before = ResourceCount.take()
    if kind == "list":  # the only listing is at the start
        proxy.inject(proxy_fault)
    with rig.under_load(warm=kind != "list", before=before):
        rig.wait_for_answers()
        proxy.inject(proxy_fault)
        until(lambda: DENIED[kind] in rig.stats()["problem"], "the problem", TIMEOUT_S)
        rig.wait_for_answers(30)
        assert rig.stats()["denials"] == 1
        proxy.clear()
        rig.fault_ended()
        rig.wait_until_healed()
        until(lambda: rig.stats()["problem"] == "", "the problem to clear", TIMEOUT_S)
    assert caplog.text.count(DENIED[kind]) == 1
    assert caplog.text.count("denied (") == 1
    assert f"the s3 tier: {kind} is no longer denied" in caplog.text


@pytest.mark.parametrize("kind", [FaultKind.THROTTLE, pytest.param(FaultKind.BLACK_HOLE, marks=pytest.mark.faults)])
def test_fault_of_one_object(s3_rig: Callable[..., FaultRig], proxy: FaultProxy, kind: FaultKind) -> None:
    """All other objects are unaffected."""
    rig = s3_rig("1 byte/s, one object" if kind is FaultKind.THROTTLE else "black hole, one object")
    with rig.under_load() as load:
        slow_object = load.keys[0].hex()
        proxy.inject(ProxyFault(kind, target=slow_object))
        until(lambda: proxy.injected[kind] or load.stats.errors, "the object to be requested", TIMEOUT_S)
        rig.wait_for_answers(30)
        rig.wait_until_healed()
        proxy.clear()


@pytest.mark.parametrize("fault", ["1 byte/s", pytest.param("black hole", marks=pytest.mark.faults)])
def test_fault_of_the_tier_below_delays_nothing(
    file_rig: Callable[..., FaultRig], proxy: FaultProxy, bucket: str, s3_prefix: str, fault: str
) -> None:
    """Rows that cannot be demoted to S3 hold up neither the host nor the file tier."""
    evicted = {"type": "s3", "bucket": bucket, "prefix": s3_prefix, "endpoint": proxy.endpoint, "capacity": CAPACITY}
    rig = file_rig(f"s3 below, written on eviction: {fault}", "slabs", below=evicted | {"write": "on_evict"})
    proxy_fault, before = S3_FAULTS[fault], ResourceCount.take()
    with rig.under_load(before=before) as load:
        core = rig.store.coordinator._core
        upper, lower = core.tiers
        prompts = [[b"prompt-%d-%d" % (prompt, chunk) for chunk in range(8)] for prompt in range(140)]
        until(lambda: serves(rig.store.stats()["s3"]), "the server to be up", TIMEOUT_S)
        written = iter(prompts[:100])
        until(lambda: put(rig.store, next(written, [])) >= 0 and len(lower.index), "rows to leave the file tier", 600)
        proxy.inject(proxy_fault)
        for prompt in prompts[100:]:
            assert put(rig.store, prompt) == len(prompt)
            assert len(upper.staged) <= core.host.rows // 4
        rig.wait_for_answers(20)
        assert load.stats.hits
        proxy.clear()
        rig.fault_ended()
        rig.wait_until_healed()


@pytest.mark.faults
def test_deleted_bucket(s3_rig: Callable[..., FaultRig], moto: MotoServer, bucket: str) -> None:
    fresh, client = moto.make_bucket("to-be-deleted"), moto.client()
    rig = s3_rig("bucket deleted and recreated", fields={"bucket": fresh})
    rig.ride_out(
        lambda: until(lambda: _delete(client, fresh), "the bucket to be empty", TIMEOUT_S),
        lambda: moto.make_bucket(fresh),
        answers=30,
    )


def _delete(client: Any, name: str) -> bool:
    """Whether the bucket is deleted. It may not be empty at the first attempt, as uploads go on."""
    while found := client.list_objects_v2(Bucket=name).get("Contents"):
        client.delete_objects(Bucket=name, Delete={"Objects": [{"Key": each["Key"]} for each in found]})
    try:
        client.delete_bucket(Bucket=name)
    except ClientError:
        return False
    return True


@pytest.mark.faults
def test_expired_credentials_are_renewed(s3_rig: Callable[..., FaultRig], proxy: FaultProxy, tmp_path: Path) -> None:
    """The old ones are never accepted again; the new ones are written to the file some time later."""
    path = tmp_path / "credentials"

    def write(access_key: str) -> None:
        fresh = path.with_suffix(".new")
        fresh.write_text(f"[default]\naws_access_key_id = {access_key}\naws_secret_access_key = {SECRET_KEY}\n")
        fresh.rename(path)

    write("first-key")
    rig = s3_rig("credentials expire, new ones in the file", fields={"credentials_file": str(path)})
    expired = ProxyFault(FaultKind.ERROR_STATUS, status=403, code="ExpiredToken", authorization="first-key/")
    rig.ride_out(lambda: proxy.inject(expired), lambda: write("second-key"))


UNSUPPORTED = "this server does not support conditional writes"


@pytest.mark.faults
@pytest.mark.parametrize("how", ["refused", "deleted"])
def test_conditional_writes_are_doubted(
    s3_rig: Callable[..., FaultRig], proxy: FaultProxy, moto: MotoServer, bucket: str, *, s3_prefix: str, how: str
) -> None:
    """A gateway's answer to the first test write is no reason to do without conditions; nor is a second write that is
    let through because the object was deleted meanwhile. The tier says that it doubts them, asks again, and stores."""
    before, client, name = ResourceCount.take(), moto.client(), f"{s3_prefix}/{CONDITIONS_NAME}-"
    if how == "refused":
        rig = s3_rig("405 to one conditional write, from the start")
        fault = ProxyFault(FaultKind.ERROR_STATUS, PUT, target=name, status=405, code="MethodNotAllowed")
    else:
        rig = s3_rig("test object of conditional writes deleted between two of them")
        # Both the answer of the first write and the second write take seconds, in which the object is deleted.
        fault = ProxyFault(FaultKind.THROTTLE, PUT, target=name, bytes_per_s=400.0)
    found: list[dict[str, Any]] = []

    def struck() -> bool:
        if how == "refused":
            return bool(proxy.injected[fault.kind])
        found.extend(client.list_objects_v2(Bucket=bucket, Prefix=name).get("Contents", ()))
        return bool(found)

    proxy.inject(fault)
    with rig.under_load(warm=False, before=before):
        until(struck, "the first test write", TIMEOUT_S)
        for each in found[:1]:
            client.delete_object(Bucket=bucket, Key=each["Key"])
        proxy.clear()
        rig.fault_ended()
        until(lambda: UNSUPPORTED in rig.stats()["problem"], "the problem", TIMEOUT_S)
        assert not rig.stats()["stored"]
        rig.wait_until_healed()
        until(lambda: rig.stats()["problem"] == "", "the problem to clear", TIMEOUT_S)


@pytest.mark.faults
def test_date_ahead_of_last_modified(s3_rig: Callable[..., FaultRig], proxy: FaultProxy) -> None:
    """As behind a gateway with a clock of its own: stores go on."""
    rig = s3_rig("Date 60 s ahead of Last-Modified")
    before = ResourceCount.take()
    proxy.inject(ProxyFault(FaultKind.DATE_AHEAD, ahead_s=60.0))
    with rig.under_load(warm=False, before=before):  # there is no usage record yet
        until(rig.is_up, "the tier to be up", TIMEOUT_S)
        rig.wait_for_answers(30)
        rig.wait_until_healed()
        assert proxy.injected[FaultKind.DATE_AHEAD]
        assert rig.stats()["problem"] == ""
