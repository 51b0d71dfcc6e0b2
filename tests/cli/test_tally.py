"""`report --since`: what was counted in between, of servers that restarted too."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from nixl_tiers.cli.report import Scrapes
from nixl_tiers.cli.tally import Tally


def server(tokens: int, started_s: float) -> Tally:
    lines = [
        "# TYPE process_start_time_seconds gauge",
        f"process_start_time_seconds {started_s}",
        'nixl_tiers:hit_tokens_total{engine="0",tier="cpu"} ' + str(tokens),
    ]
    page = text_string_to_metric_families("\n".join(lines) + "\n")
    return Tally.of("http://s", [sample for family in page for sample in family.samples])


def gained(before: Tally, now: Tally) -> tuple[float, list[str]]:
    total, notes = Scrapes(2.0, {"http://s": now}).gained(Scrapes(1.0, {"http://s": before}))
    return total.numbers()["tokens"], notes


def test_a_restart_is_known_by_when_the_server_started() -> None:
    """One that had counted more since than before looked like one that went on: 500 tokens were missing."""
    assert gained(server(500, 1000.0), server(800, 1000.0)) == (300, [])
    restarted = ["http://s has restarted: counted from its start"]
    assert gained(server(500, 1000.0), server(800, 2000.0)) == (800, restarted)
    assert gained(server(500, 1000.0), server(100, 2000.0)) == (100, restarted)


def test_a_file_keeps_when_the_servers_started() -> None:
    scrapes = Scrapes(1.0, {"http://s": server(500, 1000.0)})
    assert ["process_start_time_seconds", "cpu", "", 1000.0] in scrapes.as_json()["servers"]["http://s"]
