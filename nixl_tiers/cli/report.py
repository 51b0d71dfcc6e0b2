"""`nixl-tiers report URL`: what the tiers saved and lost, read from the /metrics of running servers."""

from __future__ import annotations

import http.client
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Annotated, Any, Final, Protocol
from urllib.parse import urlsplit

import typer

from nixl_tiers.base.metrics import CPU, METRICS, NO_TIER, PREFIX
from nixl_tiers.cli import FAILED, INSTALL_EXTRA, OK
from nixl_tiers.cli.output import InputError, Json, print_json, print_table

TIMEOUT_S: Final = 10.0
MAX_PAGE_BYTES: Final = 64 << 20
OTHER_NAMESPACES: Final = (
    "Chunks of another namespace (another model, other options) count as held by no tier: each tier logs at startup "
    "what it holds of others, and `nixl-tiers inspect` lists it."
)


class NoReport(Exception):
    """This server has nothing to report. One sentence."""


class Sample(Protocol):
    """Of prometheus_client: one line of a page."""

    @property
    def name(self) -> str: ...

    @property
    def labels(self) -> Mapping[str, str]: ...

    @property
    def value(self) -> float: ...


@dataclass
class Tier:
    """Since the start of the servers."""

    tokens: float = 0.0
    saved_first_token_s: float = 0.0
    saved_prefill_s: float = 0.0
    lost_slower_s: float = 0.0
    lost_vain_s: float = 0.0

    def plus(self, other: Tier) -> Tier:
        mine, theirs = asdict(self), asdict(other)
        return Tier(**{name: mine[name] + theirs[name] for name in mine})


@dataclass
class Report:
    """Of one or more servers. `misses`: chunks by (reason, tier). `not_stored`: with `store: adaptive`."""

    tiers: dict[str, Tier] = field(default_factory=dict)
    misses: Counter[tuple[str, str]] = field(default_factory=Counter)
    not_stored: int = 0
    computed_again: int = 0  # of these

    @property
    def total(self) -> Tier:
        total = Tier()
        for tier in self.tiers.values():
            total = total.plus(tier)
        return total

    def sentence(self) -> str:
        total = self.total
        lost_s = total.lost_slower_s + total.lost_vain_s
        if total.tokens and not total.saved_prefill_s:
            said = (
                f"since start: {total.tokens:,.0f} tokens saved (seconds count from when a few prompts were computed: "
                f"only then it is known how fast that is), {_seconds(lost_s)} lost"
            )
        else:
            said = (
                f"since start: {total.tokens:,.0f} tokens and {_seconds(total.saved_prefill_s)} of prefill saved, "
                f"first tokens {_seconds(total.saved_first_token_s)} earlier, {_seconds(lost_s)} lost"
            )
        if not self.misses:
            return said + ", no misses"
        ((reason, tier), count), missed = self.misses.most_common(1)[0], self.misses.total()
        share = f"all {missed:,} misses" if count == missed else f"most misses ({count:,} of {missed:,})"
        return f"{said}, {share} because: {_why(reason)}{'' if tier == NO_TIER else f' ({tier})'}"

    def as_json(self) -> dict[str, Any]:
        misses = [{"reason": r, "tier": t, "chunks": count} for (r, t), count in self.misses.most_common()]
        tiers = {name: asdict(tier) for name, tier in self.tiers.items()}
        not_stored = {"not_stored": self.not_stored, "computed_again": self.computed_again}
        return {"total": asdict(self.total), "tiers": tiers, "misses": misses, **not_stored}


_FIELDS: Final = {
    ("hit_tokens_total", None): "tokens",
    ("saved_first_token_seconds_total", None): "saved_first_token_s",
    ("saved_prefill_seconds_total", None): "saved_prefill_s",
    ("lost_seconds_total", "slower"): "lost_slower_s",
    ("lost_seconds_total", "vain"): "lost_vain_s",
}
_SUMS: Final = {"not_stored_chunks_total": "not_stored", "computed_again_chunks_total": "computed_again"}


def report(
    urls: Annotated[
        list[str], typer.Argument(metavar="URL...", help="Servers, as http://HOST:PORT; /metrics is added.")
    ],
    as_json: Json = False,
) -> int:
    """Say what the tiers have saved since the servers started: tokens and seconds, by tier. Also seconds lost, and why
    chunks missed. Several servers are added up.

    Exit code: 0 reported; 1 a server does not answer, is not vLLM, or runs without nixl_tiers; 2 wrong input.
    """
    try:
        found = read(parse(fetch(url), url) for url in urls)
    except NoReport as error:
        typer.echo(f"nixl-tiers: {error}", err=True)
        return FAILED
    if as_json:
        print_json(found.as_json())
        return OK
    print(found.sentence())
    print_table(
        ["tier", "tokens loaded", "prefill saved", "first token earlier", "lost to slow loads", "waited in vain"],
        [_cells(name, tier) for name, tier in [*found.tiers.items(), ("all", found.total)]],
    )
    if found.misses:
        print_table(
            ["missed chunks", "tier", "because"],
            [(f"{count:,}", tier, _why(reason)) for (reason, tier), count in found.misses.most_common()],
        )
    if found.not_stored:
        print(
            f"not stored, as too few come back: {found.not_stored:,} chunks, of which {found.computed_again:,} had to "
            "be computed again"
        )
    if found.misses["never_stored", NO_TIER]:
        print(OTHER_NAMESPACES)
    return OK


def fetch(url: str) -> str:
    """The page at `url`, or at its /metrics. Raises InputError for what is no address, NoReport if it does not
    answer."""
    whole = url if "://" in url else f"http://{url}"
    parts = urlsplit(whole)
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise InputError(f"{url} is no address of a server: give it as http://HOST:PORT")
    address = whole if parts.path.strip("/") else f"{parts.scheme}://{parts.netloc}/metrics"
    try:
        with urllib.request.urlopen(address, timeout=TIMEOUT_S) as answer:  # noqa: S310 - only http and https
            return str(answer.read(MAX_PAGE_BYTES).decode("utf-8", "replace"))
    except urllib.error.HTTPError as error:
        raise NoReport(f"{url} has no metrics: it answers {address} with {error.code} {error.reason}") from error
    except (OSError, http.client.HTTPException, ValueError) as error:
        reason = getattr(error, "reason", None) or error
        raise NoReport(f"{url} does not answer: {reason}") from error


def parse(page: str, url: str) -> list[Sample]:
    """The series of nixl_tiers in a page of metrics. Raises NoReport if it has none."""
    try:
        from prometheus_client.parser import text_string_to_metric_families
    except ModuleNotFoundError as error:
        raise InputError(f"the report needs prometheus-client: {INSTALL_EXTRA}") from error
    try:
        samples: list[Sample] = [s for family in text_string_to_metric_families(page) for s in family.samples]
    except ValueError as error:
        raise NoReport(f"{url} is no vLLM server: what it shows are no metrics") from error
    ours = [sample for sample in samples if sample.name.startswith(PREFIX)]
    if not ours:
        if any(sample.name.startswith("vllm:") for sample in samples):
            raise NoReport(
                f"{url} is a vLLM server without nixl_tiers, or one that has not computed anything since its start"
            )
        raise NoReport(f"{url} is no vLLM server: none of its metrics is vLLM's")
    return ours


def read(pages: Iterable[Sequence[Sample]]) -> Report:
    """Sums over engines, API servers and pages."""
    found = Report()
    for sample in (sample for page in pages for sample in page):
        name, tier = sample.name.removeprefix(PREFIX), sample.labels.get("tier", CPU)
        if name == "misses_total" and sample.value:
            found.misses[sample.labels.get("reason", ""), tier] += int(sample.value)
        elif sum_of := _SUMS.get(name):
            setattr(found, sum_of, getattr(found, sum_of) + int(sample.value))
        elif into := _FIELDS.get((name, sample.labels.get("reason"))):
            book = found.tiers.setdefault(tier, Tier())
            setattr(book, into, getattr(book, into) + sample.value)
    return found


def _cells(name: str, tier: Tier) -> list[str]:
    seconds = (tier.saved_prefill_s, tier.saved_first_token_s, tier.lost_slower_s, tier.lost_vain_s)
    return [name, f"{tier.tokens:,.0f}", *map(_seconds, seconds)]


def _why(reason: str) -> str:
    series = METRICS["misses"].series.values()
    return next((one.meaning for one in series if one.values == (reason,)), reason)


def _seconds(seconds: float) -> str:
    return f"{seconds:,.1f} s" if abs(seconds) < 3600 else f"{seconds / 3600:,.1f} h"
