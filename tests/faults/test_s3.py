"""S3 servers that are gone, silent, slow, wrong, or of another mind about who may ask."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from botocore.exceptions import ClientError

from nixl_tiers.testing.servers import SECRET_KEY, MotoServer
from tests.faults.arena import CAPACITY, PATIENCE_S, Arena
from tests.support.leaks import ResourceCount
from tests.support.load import put
from tests.support.proxy import FaultProxy, Kind, Trouble
from tests.support.waiting import until

pytestmark = pytest.mark.timeout(900)

GET, PUT = frozenset({"GET"}), frozenset({"PUT"})
TROUBLES: dict[str, Trouble] = {
    "refused": Trouble(Kind.REFUSE),
    "black hole": Trouble(Kind.BLACK_HOLE),
    "black hole, uploads only": Trouble(Kind.BLACK_HOLE, methods=PUT),
    "one byte a second": Trouble(Kind.TRICKLE),
    "one byte a second, downloads only": Trouble(Kind.TRICKLE, methods=GET),
    "500 storm": Trouble(Kind.STATUS, status=500, code="InternalError"),
    "503 storm": Trouble(Kind.STATUS, status=503, code="SlowDown"),
    "503, every second request": Trouble(Kind.STATUS, status=503, code="SlowDown", chance=0.5),
    "resets in the middle of bodies": Trouble(Kind.RESET),
    "bodies that end early": Trouble(Kind.CUT, methods=GET),
    "bodies that are too short": Trouble(Kind.SHORT, methods=GET),
    "wrong bodies, on the way up": Trouble(Kind.WRONG, methods=GET),
    "wrong bodies, on the way down": Trouble(Kind.WRONG, methods=PUT),
    "wrong credentials (403)": Trouble(Kind.STATUS, status=403, code="InvalidAccessKeyId"),
    "expired credentials (400)": Trouble(Kind.STATUS, status=400, code="ExpiredToken"),
    "bucket missing (404)": Trouble(Kind.STATUS, status=404, code="NoSuchBucket"),
}
ORDINARY = {"black hole", "503 storm"}


@pytest.mark.parametrize(
    "fault", [pytest.param(name, marks=[] if name in ORDINARY else pytest.mark.faults) for name in TROUBLES]
)
def test_a_server_that_fails(on_s3: Callable[..., Arena], proxy: FaultProxy, fault: str) -> None:
    arena = on_s3(fault)
    trouble = TROUBLES[fault]
    with arena.under_load() as load:
        arena.go_on()
        proxy.disturb(trouble)
        until(lambda: proxy.struck[trouble.kind] or load.seen.errors, "the server to be asked", PATIENCE_S)
        arena.go_on(30)
        proxy.clear()
        arena.over()
        arena.heals()


@pytest.mark.faults
@pytest.mark.parametrize("fault", ["refused", "black hole", "503 storm", "wrong credentials (403)"])
def test_a_server_that_fails_from_the_start(on_s3: Callable[..., Arena], proxy: FaultProxy, fault: str) -> None:
    arena = on_s3(f"{fault}, from the start")
    before = ResourceCount.take()  # with a proxy that listens
    proxy.disturb(TROUBLES[fault])
    with arena.under_load(warm=False, before=before):
        arena.go_on(20)
        proxy.clear()
        arena.over()
        arena.heals()


DENIED = {
    "put": "uploads are denied (AccessDenied; the right is s3:PutObject)",
    "get": "downloads are denied (AccessDenied; the right is s3:GetObject)",
    "delete": "deletes are denied (AccessDenied; the right is s3:DeleteObject)",
    "list": "listings are denied (AccessDenied; the right is s3:ListBucket)",
}


@pytest.mark.parametrize("kind", ["put", *(pytest.param(each, marks=pytest.mark.faults) for each in list(DENIED)[1:])])
def test_a_right_that_is_missing(
    on_s3: Callable[..., Arena], proxy: FaultProxy, s3_prefix: str, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    """It is told once, stands in the numbers while it lasts, and heals."""
    no = partial(Trouble, Kind.STATUS, status=403, code="AccessDenied")
    trouble = {
        "put": no(methods=PUT),
        "get": no(methods=GET, within=f"/{s3_prefix}/"),
        "delete": no(methods=frozenset({"POST"})),
        "list": no(methods=GET, within="list-type"),
    }[kind]
    arena = on_s3(f"{kind} denied (403)", fields={"capacity": 4 << 20})  # less than the load stores
    before = ResourceCount.take()
    if kind == "list":  # there is one at the start, and no more
        proxy.disturb(trouble)
    with arena.under_load(warm=kind != "list", before=before):
        arena.go_on()
        proxy.disturb(trouble)
        until(lambda: DENIED[kind] in arena.stats()["problem"], "the reason", PATIENCE_S)
        arena.go_on(30)
        assert arena.stats()["denials"] == 1
        proxy.clear()
        arena.over()
        arena.heals()
        until(lambda: arena.stats()["problem"] == "", "the reason to go", PATIENCE_S)
    assert caplog.text.count(DENIED[kind]) == 1
    assert caplog.text.count("denied (") == 1
    assert f"the s3 tier: {kind} is no longer denied" in caplog.text


@pytest.mark.parametrize("kind", [Kind.TRICKLE, pytest.param(Kind.BLACK_HOLE, marks=pytest.mark.faults)])
def test_one_poisonous_object(on_s3: Callable[..., Arena], proxy: FaultProxy, kind: Kind) -> None:
    """Everything but this object is as good as ever, while it lasts."""
    arena = on_s3("one byte a second, one object" if kind is Kind.TRICKLE else "black hole, one object")
    with arena.under_load() as load:
        poisonous = load.keys[0].hex()
        proxy.disturb(Trouble(kind, within=poisonous))
        until(lambda: proxy.struck[kind] or load.seen.errors, "the object to be asked for", PATIENCE_S)
        arena.go_on(30)
        arena.heals()
        proxy.clear()


@pytest.mark.parametrize("fault", ["one byte a second", pytest.param("black hole", marks=pytest.mark.faults)])
def test_a_server_that_gets_what_a_file_tier_evicts(
    on_file: Callable[..., Arena], proxy: FaultProxy, bucket: str, s3_prefix: str, fault: str
) -> None:
    """The host and the file tier are as good as ever: nothing that cannot go down stands in anybody's way."""
    evicted = {"type": "s3", "bucket": bucket, "prefix": s3_prefix, "endpoint": proxy.endpoint, "capacity": CAPACITY}
    arena = on_file(f"s3 below, written on eviction: {fault}", "slabs", below=evicted | {"write": "on_evict"})
    trouble, before = TROUBLES[fault], ResourceCount.take()
    with arena.under_load(before=before) as load:
        core = arena.store.coordinator._core
        upper, lower = core.tiers
        prompts = [[b"prompt-%d-%d" % (prompt, chunk) for chunk in range(8)] for prompt in range(140)]
        until(lambda: arena.store.stats()["s3"]["up"] == 1.0, "the server to be up", PATIENCE_S)
        written = iter(prompts[:100])
        until(lambda: put(arena.store, next(written, [])) >= 0 and len(lower.index), "rows to leave the file tier", 600)
        proxy.disturb(trouble)
        for prompt in prompts[100:]:
            assert put(arena.store, prompt) == len(prompt)
            assert len(upper.staged) <= core.host.rows // 4
        arena.go_on(20)
        assert load.seen.hits
        proxy.clear()
        arena.over()
        arena.heals()


@pytest.mark.faults
def test_a_bucket_that_is_deleted(on_s3: Callable[..., Arena], moto: MotoServer, bucket: str) -> None:
    fresh = moto.make_bucket("to-be-deleted")
    arena = on_s3("bucket deleted, made anew", fields={"bucket": fresh})
    client = moto.client()
    with arena.under_load():
        arena.go_on()
        until(lambda: _delete(client, fresh), "the bucket to be empty", PATIENCE_S)
        arena.go_on(30)
        moto.make_bucket(fresh)
        arena.over()
        arena.heals()


def _delete(client: Any, name: str) -> bool:
    """Uploads go on meanwhile, so the bucket may not be empty the first time."""
    while found := client.list_objects_v2(Bucket=name).get("Contents"):
        client.delete_objects(Bucket=name, Delete={"Objects": [{"Key": each["Key"]} for each in found]})
    try:
        client.delete_bucket(Bucket=name)
    except ClientError:
        return False
    return True


@pytest.mark.faults
def test_credentials_that_expire_and_are_renewed(
    on_s3: Callable[..., Arena], proxy: FaultProxy, tmp_path: Path
) -> None:
    """The old ones are never accepted again; the new ones stand in their file some time later."""
    path = tmp_path / "credentials"

    def write(access_key: str) -> None:
        fresh = path.with_suffix(".new")
        fresh.write_text(f"[default]\naws_access_key_id = {access_key}\naws_secret_access_key = {SECRET_KEY}\n")
        fresh.rename(path)

    write("first-key")
    arena = on_s3("credentials expire, renewed in their file", fields={"credentials_file": str(path)})
    with arena.under_load():
        arena.go_on()
        proxy.disturb(Trouble(Kind.STATUS, status=403, code="ExpiredToken", holder="first-key/"))
        arena.go_on(20)
        write("second-key")
        arena.over()
        arena.heals()
