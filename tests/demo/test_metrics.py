"""Sums over the series of a /metrics page."""

from __future__ import annotations

from nixl_tiers.demo.metrics import MetricsPage

PAGE = """# HELP nixl_tiers:read_bytes_total Bytes read from this tier.
# TYPE nixl_tiers:read_bytes_total counter
nixl_tiers:read_bytes_total{engine="0",model_name="m",tier="file"} 1.5e+06
nixl_tiers:read_bytes_total{engine="1",model_name="m",tier="file"} 2
nixl_tiers:read_bytes_total{engine="0",model_name="m",tier="s3"} 7.0 1700000000
nixl_tiers:odd{path="C:\\\\a\\"b},c=\\"x",tier="cpu"} +Inf
plain_total 3
"""


def test_total_sums_all_series_with_these_labels() -> None:
    page = MetricsPage(PAGE)
    assert page.total("nixl_tiers:read_bytes_total", tier="file") == 1_500_002
    assert page.total("nixl_tiers:read_bytes_total", tier="file", engine="1") == 2
    assert page.total("nixl_tiers:read_bytes_total") == 1_500_009
    assert page.total("plain_total") == 3


def test_total_of_missing_series_is_zero() -> None:
    assert MetricsPage(PAGE).total("nixl_tiers:read_bytes_total", tier="cpu") == 0
    assert MetricsPage("").total("plain_total") == 0


def test_label_values_are_unescaped() -> None:
    odd = next(sample for sample in MetricsPage(PAGE).samples if sample.name == "nixl_tiers:odd")
    assert odd.labels == {"path": 'C:\\a"b},c="x', "tier": "cpu"}
