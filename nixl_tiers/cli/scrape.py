"""Reads the metrics page of a running server, for `report`."""

from __future__ import annotations

import http.client
import urllib.error
import urllib.request
from typing import Final
from urllib.parse import urlsplit

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from nixl_tiers.base.metrics import PREFIX
from nixl_tiers.cli.output import InputError

TIMEOUT_S: Final = 10.0
MAX_PAGE_BYTES: Final = 64 << 20
STARTED: Final = "process_start_time_seconds"  # of one API server; several show none


class NoAnswer(Exception):
    """This server has no metrics, or not those that are asked for. One sentence."""


def address_of(url: str) -> str:
    """The whole URL of what may be given as HOST:PORT only. Raises InputError for what is no address."""
    whole = url if "://" in url else f"http://{url}"
    try:
        parts = urlsplit(whole)
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        usable = False
    if not usable:
        raise InputError(f"{url} is no address of a server: give it as http://HOST:PORT")
    return whole.rstrip("/")


def scrape(url: str) -> list[Sample]:
    """vLLM's series, ours, and STARTED, on the page at `url`, or at its /metrics. Raises InputError, NoAnswer."""
    try:
        families = list(text_string_to_metric_families(_fetch(url)))
    except ValueError as error:
        raise NoAnswer(f"{url} is no vLLM server: what it shows are no metrics") from error
    samples: list[Sample] = [s for family in families for s in family.samples]
    known = [sample for sample in samples if sample.name.startswith(("vllm:", PREFIX))]
    if not known:
        raise NoAnswer(f"{url} is no vLLM server: none of its metrics is vLLM's")
    return [*known, *(sample for sample in samples if sample.name == STARTED)]


def _fetch(url: str) -> str:
    whole = address_of(url)
    page = whole if urlsplit(whole).path else f"{whole}/metrics"
    try:
        with urllib.request.urlopen(page, timeout=TIMEOUT_S) as answer:  # noqa: S310 - only http and https
            return str(answer.read(MAX_PAGE_BYTES).decode("utf-8", "replace"))
    except urllib.error.HTTPError as error:
        raise NoAnswer(f"{url} has no metrics: it answers {page} with {error.code} {error.reason}") from error
    except (OSError, http.client.HTTPException) as error:
        raise NoAnswer(f"{url} does not answer: {getattr(error, 'reason', None) or error}") from error
