"""Requests that the server denies: one sentence for each kind, from the first denial until that kind succeeds again.

NIXL reports that a transfer failed but not why, so denials are learned from answers with an error code: those to boto3,
and error pages in place of rows. An answer that is not S3's at all counts as a denial too: boto3 takes a proxy's page
for an empty listing, and every row would be forgotten.
"""

from __future__ import annotations

import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from botocore.exceptions import HTTPClientError

from nixl_tiers.base.chunk import UNREACHABLE
from nixl_tiers.base.times import PRODUCTION
from nixl_tiers.tiers.s3.answers import code_of
from nixl_tiers.tiers.s3.deletes import REFUSED

_OPERATIONS: Final = {
    "PutObject": "put",
    "GetObject": "get",
    "DeleteObjects": "delete",
    "DeleteObject": "delete",
    "ListObjectsV2": "list",
    "HeadObject": "head",
}
_EFFECTS: Final = {
    "put": ("uploads", "s3:PutObject", "nothing is stored there"),
    "get": ("downloads", "s3:GetObject", "rows stored there are misses"),
    "delete": ("deletes", "s3:DeleteObject", "evicted rows stay and use space"),
    "list": ("listings", "s3:ListBucket", "rows are not deleted, and so before long none is written"),
    "head": ("existence checks", "s3:GetObject, or s3:ListBucket", "rows stored by others are not found"),
}
_ROOTS: Final = {"list": b"ListBucketResult", "delete": b"DeleteResult"}
"""The root elements of answers that boto3 takes for empty, and so for good, whatever XML they are."""
_ELEMENT: Final = re.compile(rb"<(?:[\w.-]+:)?([A-Za-z][\w.-]*)")
_NOT_ABOUT_RIGHTS: Final = {408, 409, 416, 429}
"""Statuses from 400 to 499 that are not denials: too slow, too many requests, a condition that does not hold."""
_SERVED: Final = {404, 412}
"""Statuses that imply the right to make the request. A missing bucket is another 404."""
LISTING_TRIES: Final = 3  # a listing that fails so often in a row is a problem, whatever the error
_CODE: Final = re.compile(rb"<Code>([A-Za-z0-9._-]{1,64})</Code>")
_NO_CODE: Final = re.compile(r"[^A-Za-z0-9._-]")
# An error page in place of a row has no status, and most codes are not denials.
_DENIED: Final = {
    *("AccessDenied", "AccountProblem", "AllAccessDisabled", "AuthorizationHeaderMalformed", "ExpiredToken"),
    *("Forbidden", "InvalidAccessKeyId", "InvalidObjectState", "InvalidToken", "NoSuchBucket", "RequestTimeTooSkewed"),
    *("SignatureDoesNotMatch", "TokenRefreshRequired"),
}


@dataclass
class _Denial:
    sentence: str
    denied_at_s: float
    unreachable: bool
    succeeded_at_s: float = float("-inf")


class Denials:
    """The kinds of requests that one bucket denies. For any thread."""

    def __init__(
        self, place: str, clock: Callable[[], float] = time.monotonic, *, clear_s: float = PRODUCTION.s3_denial_s
    ) -> None:
        """`place`: the beginning of every sentence. `clear_s`: how long after a denial a success clears it."""
        self._clear_s = clear_s
        self._place = place
        self._clock = clock
        self._lock = threading.Lock()
        self._denials: dict[str, _Denial] = {}
        self._failed_pages = Counter[str]()  # in a row, by the prefix of the listing

    def watch(self, client: Any) -> None:
        """Learn from every answer to this boto3 client. An answer that is not S3's raises HTTPClientError."""
        for operation, kind in _OPERATIONS.items():
            client.meta.events.register(f"after-call.s3.{operation}", partial(self._on_response, kind))

    def error_page(self, kind: str, page: bytes) -> None:
        """A request of this kind was answered with an error page, or one that begins so."""
        found = _CODE.search(page)
        if found is not None and (code := found[1].decode()) in _DENIED:
            self.denied(kind, code)

    def denied(self, kind: str, why: str) -> None:
        self._report(kind, f"are denied ({_code(why)}; the right is {_EFFECTS[kind][1]})")

    def report(self, kind: str, text: str, *, unreachable: bool = False) -> None:
        """Report a denial of any kind; `text` follows the place. `unreachable`: nobody denies it, answers are
        missing."""
        sentence = f"{self._place}: {text}"
        with self._lock:
            self._denials[kind] = _Denial(sentence, self._clock(), unreachable)

    def failed(self, kind: str) -> None:
        """A request of this kind has failed for an unknown reason, which prolongs a denial that is known."""
        with self._lock:
            if (denial := self._denials.get(kind)) is not None:
                denial.denied_at_s = self._clock()

    def page_failed(self, prefix: str, error: Exception) -> None:
        """A page of a listing, which is asked for again."""
        self._failed_pages[prefix] += 1
        if "list" in self._denials:
            self.failed("list")  # its sentence says more
        elif self._failed_pages[prefix] >= LISTING_TRIES:
            self._report("list", f"fail again and again ({_code(code_of(error))})")

    def page_listed(self, prefix: str) -> None:
        """One has come."""
        self._failed_pages[prefix] = 0
        if not any(self._failed_pages.values()):
            self.succeeded("list")

    def lists_nothing(self) -> None:
        """It is another one's to list."""
        self._failed_pages.clear()
        self.succeeded("list")

    def succeeded(self, kind: str) -> None:
        """A request of this kind has succeeded."""
        if kind not in self._denials:  # without the lock: this is called for every row
            return
        with self._lock:
            if (denial := self._denials.get(kind)) is not None:
                denial.succeeded_at_s = self._clock()

    def current(self) -> Mapping[str, str]:
        """The present denials: a sentence for each kind of request."""
        if not self._denials:
            return {}
        with self._lock:
            until_s = self._clock() - self._clear_s
            self._denials = {
                kind: each
                for kind, each in self._denials.items()
                if each.succeeded_at_s < each.denied_at_s or each.denied_at_s > until_s
            }
            return {UNREACHABLE if each.unreachable else kind: each.sentence for kind, each in self._denials.items()}

    def _report(self, kind: str, what: str) -> None:
        requests, _, so = _EFFECTS[kind]
        self.report(kind, f"{requests} {what}: {so}")

    def _on_response(self, kind: str, http_response: Any, parsed: Mapping[str, Any], model: Any, **_: object) -> None:
        """Called by botocore with each answer."""
        status = int(http_response.status_code)
        if status < 300:
            if kind in _ROOTS and not _is_from_s3(kind, http_response.content, parsed):
                self._report(kind, "get answers that are not S3's, perhaps a proxy's page")
                raise HTTPClientError(error="the answer is not S3's")
            denied = _DENIED.intersection(str(each.get("Code")) for each in parsed.get("Errors", ()))  # of objects
            if denied:
                self.denied(kind, min(denied))
            else:
                self.succeeded(kind)
            return
        code = str(parsed.get("Error", {}).get("Code", status))
        if status in _SERVED and code != "NoSuchBucket":
            self.succeeded(kind)
        elif status in REFUSED and model.name == "DeleteObjects":
            pass  # another form is tried
        elif 400 <= status < 500 and status not in _NOT_ABOUT_RIGHTS:
            self.denied(kind, code)


def _code(text: str) -> str:
    """Nothing else of a server's text is shown."""
    return _NO_CODE.sub("", text)[:64]


def _is_from_s3(kind: str, body: bytes, parsed: Mapping[str, Any]) -> bool:
    if kind == "delete" and not body:  # in quiet mode some servers say nothing at all when there was no error
        return True
    root = _ELEMENT.search(body, 0, 1024)
    return root is not None and root[1] == _ROOTS[kind] and (kind != "list" or "IsTruncated" in parsed)
