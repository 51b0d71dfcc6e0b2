"""`nixl-tiers report URL`: what came from tiers and what that saved and lost, read from the /metrics of servers."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from time import gmtime, sleep, strftime, time
from typing import Annotated, Any, Final

import typer

from nixl_tiers.base.tier_traits import NO_TIER
from nixl_tiers.cli import FAILED, OK
from nixl_tiers.cli.output import InputError, Json, print_json, print_table
from nixl_tiers.cli.scrape import NoAnswer, address_of, scrape
from nixl_tiers.cli.tally import DROPS, NEW, OWN_HITS, PROMPT_TOKENS, Tally, TierState, meaning
from nixl_tiers.config.fields import format_size

OTHER_NAMESPACES: Final = (
    "Nothing was loaded: chunks of another namespace (another model, other options) count as new prompts. Each tier "
    "logs at startup what it holds of others, and `nixl-tiers inspect` lists it."
)
_AT_ONCE: Final = 16
_NAMED: Final = 3  # servers in a cell of a table


@dataclass
class Scrapes:
    """Of all servers that answered, by address, with sentences about the others."""

    time: float
    servers: dict[str, Tally]
    failed: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, urls: list[str]) -> Scrapes:
        """Raises InputError for what is no address."""
        places = list(dict.fromkeys(map(address_of, urls)))
        found = cls(time(), {})
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            for place, answer in zip(places, pool.map(_answer, places), strict=True):
                if isinstance(answer, NoAnswer):
                    found.failed.append(str(answer))
                else:
                    found.servers[place] = answer
        return found

    @classmethod
    def read(cls, file: Path) -> Scrapes:
        """What `as_json` has written. Raises InputError."""
        try:
            raw = json.loads(file.read_text())
            servers = {
                url: Tally({(name, tier, reason): float(count) for name, tier, reason, count in counts})
                for url, counts in raw["servers"].items()
            }
            return cls(float(raw["time"]), servers)
        except OSError as error:
            raise InputError(f"--since: {file} cannot be read ({error.strerror})") from None
        except (ValueError, LookupError, TypeError, AttributeError):
            raise InputError(f"--since: {file} was not written by `nixl-tiers report --json`") from None

    def as_json(self) -> dict[str, Any]:
        servers = {url: [[*each, count] for each, count in tally.counts.items()] for url, tally in self.servers.items()}
        return {"time": self.time, "servers": servers, "failed": self.failed}

    def gained(self, before: Scrapes | None) -> tuple[Tally, list[str]]:
        """What was counted after `before`, of all servers together, and what is to be said of single ones."""
        total, notes = Tally(), []
        for url, tally in self.servers.items():
            old = None if before is None else before.servers.get(url)
            gained = tally if old is None else tally.since(old)
            if gained is None or (before is not None and old is None):
                notes.append(
                    f"{url} {'was not there then' if old is None else 'has restarted'}: counted from its start"
                )
            total = total.plus(gained or tally)
        return total, notes

    def after(self, before: Scrapes | None) -> Scrapes:
        """The same, with what was known of servers that do not answer now."""
        return self if before is None else replace(self, servers={**before.servers, **self.servers})


def report(
    urls: Annotated[
        list[str], typer.Argument(metavar="URL...", help="Servers, as http://HOST:PORT; /metrics is added.")
    ],
    watch: Annotated[
        float | None,
        typer.Option(metavar="SECONDS", min=0.1, help="Repeat every so many seconds: what was counted in between."),
    ] = None,
    since: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="What an earlier `report --json` printed: what was counted since then."),
    ] = None,
    as_json: Json = False,
) -> int:
    """Say which share of all prompt tokens came from tiers since the servers started, what that saved, how full the
    tiers are and whether they are up, and why chunks missed. Several servers are added up.

    Exit code: 0 reported; 1 a server does not answer, is not vLLM, or runs without nixl_tiers, and the others are
    reported; 2 wrong input.
    """
    before = None if since is None else Scrapes.read(since)
    title = "since start" if before is None else strftime("since %Y-%m-%d %H:%M:%S UTC", gmtime(before.time))
    code = OK
    try:
        while True:
            now = Scrapes.of(urls)
            if now.servers:
                _print(now, before, title, as_json)
            for sentence in now.failed:
                typer.echo(f"nixl-tiers: {sentence}", err=True)
            code = FAILED if now.failed else OK
            if watch is None:
                return code
            before, title = now.after(before), f"in the last {watch:g} s"
            sleep(watch)
    except KeyboardInterrupt:
        return code


def _answer(url: str) -> Tally | NoAnswer:
    try:
        found = Tally.of(url, scrape(url))
    except NoAnswer as error:
        return error
    if not found.states and not found.tiers and not found.misses:
        what = "is a vLLM server without nixl_tiers, or one that has not computed anything since its start"
        return NoAnswer(f"{url} {what}")
    return found


def _print(now: Scrapes, before: Scrapes | None, title: str, as_json: bool) -> None:
    found, notes = now.gained(before)
    if as_json:
        since = None if before is None else before.time
        print_json({**now.as_json(), "since": since, "notes": notes, **found.as_json()})
        return
    print("\n".join([*_sentences(found, title), *notes]))
    rows = [_use(found, tier) for tier in found.tiers]
    print_table(["tier", "state", "used", "tokens loaded", "of prompt tokens", "movers that exited"], rows)
    problems: dict[tuple[str, str], list[str]] = {}
    for state in found.states:
        if state.problem:
            problems.setdefault((state.tier, state.problem), []).append(state.server)
    for (tier, problem), servers in problems.items():
        print(f"{tier} at {_places(list(dict.fromkeys(servers)))}: {problem}")
    columns = ["tier", "prefill saved", "first token earlier", "lost to slow loads", "waited in vain"]
    print_table(columns, [[tier or "all", *_times(found, tier)] for tier in (*found.tiers, None)])
    if found.misses:
        missed = [(f"{count:,}", tier, meaning(why, tier)) for (why, tier), count in found.misses.most_common()]
        print_table(["missed chunks", "tier", "because"], missed)
    if found.drops:
        dropped = [(f"{count:,}", tier, meaning(why, tier, DROPS)) for (why, tier), count in found.drops.most_common()]
        print_table(["chunks not written", "tier", "because"], dropped)
    if found.misses[NEW] and not found.numbers()["tokens"]:
        print(OTHER_NAMESPACES)


def _sentences(found: Tally, title: str) -> Iterator[str]:
    asked, own = found.total(PROMPT_TOKENS), found.total(OWN_HITS)
    rate = found.hit_rate()
    if rate is None:
        yield "hit rate: no prompts"
    else:
        own_rate = f"{own / asked:.1%} from vLLM's own cache"
        yield f"hit rate: {rate:.1%} of {asked:,.0f} prompt tokens came from tiers, {own_rate}"
    total = found.numbers()
    lost_s = total["lost_slower_s"] + total["lost_vain_s"]
    if total["tokens"] and not total["saved_prefill_s"]:
        yield (
            f"{title}: {total['tokens']:,.0f} tokens saved (seconds count from when a few prompts were computed: "
            f"only then it is known how fast that is), {_seconds(lost_s)} lost"
        )
    else:
        yield (
            f"{title}: {total['tokens']:,.0f} tokens and {_seconds(total['saved_prefill_s'])} of prefill saved, "
            f"first tokens {_seconds(total['saved_first_token_s'])} earlier, {_seconds(lost_s)} lost"
        )
    others = found.misses
    new = others.pop(NEW, 0)
    said = f"missed: {new:,} chunks of new prompts, {others.total():,} others" if new or others else "no misses"
    if others:
        ((reason, tier), count) = others.most_common(1)[0]
        where = "" if tier == NO_TIER else f" ({tier})"
        said += (
            f", {'all' if count == others.total() else f'{count:,} of them'} because: {meaning(reason, tier)}{where}"
        )
    yield said


def _use(found: Tally, tier: str) -> list[str]:
    rate, room, own = found.hit_rate(tier), found.room(tier), found.numbers(tier)
    return [
        tier,
        _state([state for state in found.states if state.tier == tier]),
        " of ".join(format_size(int(each)) for each in room) if room else "-",
        f"{own['tokens']:,.0f}",
        "-" if rate is None else f"{rate:.1%}",
        f"{own['mover_exits']:.0f}" + (f", {own['mover_kills']:.0f} killed" if own["mover_kills"] else ""),
    ]


def _state(states: list[TierState]) -> str:
    """In one word, if it is the same everywhere; else with those where it is not up."""
    by_word: dict[str, list[str]] = {}
    for state in states:
        by_word.setdefault(state.word, []).append(state.server)
    if len(by_word) <= 1:
        return next(iter(by_word), "-")
    up = by_word.pop("up", [])
    said = [f"{word} at {_places(list(dict.fromkeys(at)))}" for word, at in by_word.items()]
    return "; ".join([*([f"up on {len(up)}"] if up else []), *said])


def _places(servers: list[str]) -> str:
    more = len(servers) - _NAMED
    return ", ".join(servers[:_NAMED]) + (f" and {more} more" if more > 0 else "")


def _times(found: Tally, tier: str | None) -> list[str]:
    own: Mapping[str, float] = found.numbers(tier)
    return [_seconds(own[name]) for name in ("saved_prefill_s", "saved_first_token_s", "lost_slower_s", "lost_vain_s")]


def _seconds(seconds: float) -> str:
    return f"{seconds:,.1f} s" if abs(seconds) < 3600 else f"{seconds / 3600:,.1f} h"
