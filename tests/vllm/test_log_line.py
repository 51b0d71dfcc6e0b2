"""What vLLM logs of NixlTiersConnector."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorLogging
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from nixl_tiers.base.tier_traits import TierTraits
from nixl_tiers.vllm.connector import NixlTiersConnector
from nixl_tiers.vllm.log_line import LoggedStats
from nixl_tiers.vllm.metrics import Reporter

TIERS = [TierTraits("cpu"), TierTraits("file", written=True)]


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Returns what vLLM logs after it has got these reports from another process."""

    def logged(*reports: dict[str, Any]) -> list[str]:
        reporter = Reporter(TIERS)
        made = KVConnectorLogging(None)
        made.connector_cls = NixlTiersConnector
        for totals, samples in ((report, report.pop("samples", None)) for report in reports):
            stats = reporter.report(totals, samples)
            if stats is not None:
                sent = MsgpackEncoder().encode(stats.to_dict())
                made.observe(MsgpackDecoder().decode(sent))
        said: list[str] = []
        made.log(lambda text, *values: said.append(text % values))
        return said

    return logged


def test_ten_seconds_are_one_sentence(lines: Any) -> None:
    before = {"cpu": {"hit_tokens": 0, "stored": 0, "missed_never_stored": 0}, "file": {"hit_tokens": 640}}
    after = {
        "cpu": {"hit_tokens": 64, "stored": 13, "missed_never_stored": 25, "used_bytes": 1 << 30},
        "file": {"hit_tokens": 1664 + 640, "missed_slower": 1, "failed_loads": 2, "corrupt": 1, "dropped_slow": 1},
        "samples": {("file", "wait_loaded"): [0.04, 0.06]},
    }
    (line,) = lines(before, after)
    assert line == (
        "KV Transfer metrics: loaded=64 tokens from cpu, 2,304 tokens from file, stored=13 chunks, missed=26 chunks, "
        "not written=1 chunk, failed=2 chunks, corrupt=1 chunk, waited=0.1 s"
    )


def test_seconds_in_which_nothing_happened_are_not_logged(lines: Any) -> None:
    assert lines({"cpu": {"hit_tokens": 0, "stored": 0, "used_bytes": 5}}) == []
    assert lines() == []


def test_statistics_are_still_vllms_own() -> None:
    reporter = Reporter(TIERS)
    stats = reporter.report({"cpu": {"stored": 1}})
    assert stats is not None
    total = NixlTiersConnector.build_kv_connector_stats(stats.data).aggregate(
        NixlTiersConnector.build_kv_connector_stats({**stats.data})
    )
    assert isinstance(total, LoggedStats)
    assert total.data["data"]["nixl_tiers:added_chunks"] == {("cpu", "stored"): 2}
