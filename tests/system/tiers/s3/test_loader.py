"""A loader beside the mover that stores objects: it only reads, and a server that lies or hangs costs what it loads."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from nixl_tiers.base.chunk import Geometry, Outcome
from nixl_tiers.tiers.s3.lease_state import OWNER_TERMS
from nixl_tiers.tiers.s3.loader import S3Loader
from tests.support.proxy import FaultKind, FaultProxy, ProxyFault
from tests.support.servers import MotoServer, S3Server
from tests.system.tiers.s3.harness import NAMESPACE, OTHER_NAMESPACE, FaultyS3, TierDriver, faulty_s3

GEOMETRY = Geometry(1, 60_000)
ROWS = 8


class LoaderDriver(TierDriver):
    """The same of a loader."""

    kind = S3Loader


@pytest.fixture
def server(s3_credentials: Callable[[S3Server], None], moto: MotoServer) -> Iterator[FaultyS3]:
    s3_credentials(moto)
    with faulty_s3() as server:
        server.tests_conditions = True
        yield server


def given(server: FaultyS3) -> dict[str, object]:
    return {"bucket": "kv-loads", "endpoint": server.endpoint, "movers": 2}


def rows_of(server: FaultyS3) -> dict[str, bytes]:
    """Without the lease, which is renewed meanwhile."""
    return {name: body for name, body in server.objects.items() if not name.endswith(OWNER_TERMS.name)}


@pytest.mark.parametrize("shared", [False, True])
def test_it_only_reads_and_needs_no_other_mover(server: FaultyS3, shared: bool) -> None:
    """Neither a lease nor a listing, a janitor, a manifest or a test object."""
    with TierDriver(GEOMETRY, ROWS, **given(server)) as tier:
        tier.open()
        assert set(tier.store(range(ROWS))) == {Outcome.OK}
    held = dict(server.objects)
    with server.lock:
        server.requests.clear()
    with LoaderDriver(GEOMETRY, ROWS, **given(server), shared=shared, max_age=86400.0) as loader:
        assert loader.open() == []
        assert loader.load(range(ROWS)) == [Outcome.OK] * ROWS
        assert loader.load([ROWS]) == [Outcome.MISSING]
        assert list(loader.tier.maintain()) == []
        assert loader.tier.used_bytes == 0
    assert {request.method for request in server.requests} <= {"HEAD", "GET"}
    assert all(request.name for request in server.requests if request.method == "GET"), "it lists nothing"
    assert server.objects == held


@pytest.mark.parametrize(("namespace", "epoch"), [(OTHER_NAMESPACE, 0), (NAMESPACE, 1)])
def test_rows_of_another_namespace_or_epoch_are_none(server: FaultyS3, namespace: bytes, epoch: int) -> None:
    with TierDriver(GEOMETRY, ROWS, **given(server)) as tier:
        tier.open()
        assert set(tier.store(range(ROWS))) == {Outcome.OK}
        for number in range(ROWS):  # as if that namespace had them
            server.objects[tier.name(number, namespace)] = server.objects[tier.name(number)]
    with LoaderDriver(GEOMETRY, ROWS, **given(server)) as loader:
        loader.open(namespace, epoch)
        assert set(loader.load(range(ROWS))) == {Outcome.CORRUPT}


@pytest.mark.parametrize("kind", [FaultKind.BIT_FLIP, FaultKind.TRUNCATED, FaultKind.BLACK_HOLE])
def test_a_lying_or_silent_server_of_one_loader_costs_what_it_loads(
    server: FaultyS3, monkeypatch: pytest.MonkeyPatch, kind: FaultKind
) -> None:
    """No byte of it is wrong (`load` compares), none is deleted, and the other mover loads all."""
    with TierDriver(GEOMETRY, ROWS, **given(server)) as tier, FaultProxy(server.port) as proxy:
        tier.open()
        assert set(tier.store(range(ROWS))) == {Outcome.OK}
        held = rows_of(server)
        with LoaderDriver(GEOMETRY, ROWS, **{**given(server), "endpoint": proxy.endpoint}) as loader:
            loader.open()
            fault = ProxyFault(kind, methods=frozenset({"GET"}))
            proxy.inject(replace(fault, methods=None) if kind is FaultKind.BLACK_HOLE else fault)
            with monkeypatch.context() as patch:  # of these downloads only: those that are answered may take their time
                patch.setattr(loader.tier._transfers.data, "_download_s", 0.2)
                assert set(loader.load(range(ROWS))) <= {Outcome.CORRUPT, Outcome.FAILED}
            assert tier.load(range(ROWS)) == [Outcome.OK] * ROWS
            proxy.clear()
            assert loader.load(range(ROWS)) == [Outcome.OK] * ROWS
        assert rows_of(server) == held
