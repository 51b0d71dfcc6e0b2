"""S3 servers that are gone, unresponsive, slow, faulty, or deny access."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.support.proxy import FaultKind, FaultProxy, ProxyFault
from tests.support.waiting import until
from tests.system.faults.rig import TIMEOUT_S, FaultRig

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
def test_server_fault(make_rig: Callable[..., FaultRig], proxy: FaultProxy, fault: str) -> None:
    rig, proxy_fault = make_rig(fault, "s3"), S3_FAULTS[fault]

    def begin() -> None:
        proxy.inject(proxy_fault)
        until(lambda: proxy.injected[proxy_fault.kind] or rig.load.stats.errors, "a request to fail", TIMEOUT_S)

    rig.ride_out(begin, proxy.clear, answers=30)


@pytest.mark.faults
@pytest.mark.parametrize("fault", ["connection refused", "black hole", "503 storm", "wrong credentials (403)"])
def test_server_fault_from_the_start(make_rig: Callable[..., FaultRig], proxy: FaultProxy, fault: str) -> None:
    rig = make_rig(f"{fault}, from the start", "s3")
    rig.ride_out(lambda: proxy.inject(S3_FAULTS[fault]), proxy.clear, warm=False)


@pytest.mark.parametrize("kind", [FaultKind.THROTTLE, pytest.param(FaultKind.BLACK_HOLE, marks=pytest.mark.faults)])
def test_fault_of_one_object(make_rig: Callable[..., FaultRig], proxy: FaultProxy, kind: FaultKind) -> None:
    """All other objects are unaffected."""
    rig = make_rig(f"{kind}, one object", "s3")
    with rig.under_load() as load:
        slow_object = load.keys[0].hex()
        proxy.inject(ProxyFault(kind, target=slow_object))
        until(lambda: proxy.injected[kind] or load.stats.errors, "the object to be requested", TIMEOUT_S)
        rig.wait_for_answers(30)
        rig.wait_until_healed()
        proxy.clear()
