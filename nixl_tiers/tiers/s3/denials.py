"""What a medium denies: one sentence for each kind of request, from the first denial until that kind works again.

NIXL tells that a transfer failed and not why, so what is known here comes from answers that hold a code: those to
boto3, and error pages in place of rows.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

CALM_S: Final = 5.0  # without a denial, before success counts: some servers deny every other request

_OPERATIONS: Final = {"PutObject": "put", "GetObject": "get", "DeleteObjects": "delete", "ListObjectsV2": "list"}
_TEXTS: Final = {
    "put": ("uploads", "s3:PutObject", "nothing is stored there"),
    "get": ("downloads", "s3:GetObject", "what it holds is a miss"),
    "delete": ("deletes", "s3:DeleteObject", "what has to go stays and takes room"),
    "list": ("listings", "s3:ListBucket", "what was stored earlier, or by others, is not found"),
}
_PASSING: Final = {408, 409, 416, 429}
"""Statuses from 400 to 499 that say nothing about rights: too slow, too many, a condition that does not hold."""
_SERVED: Final = {404, 412}
"""Statuses that are given to those only who have the right to be told. A bucket that is not there is another 404."""
_CODE: Final = re.compile(rb"<Code>([A-Za-z0-9._-]{1,64})</Code>")
_NO_CODE: Final = re.compile(r"[^A-Za-z0-9._-]")
# Of a page in place of a row only the code is left, and most codes say nothing about rights.
_DENIED: Final = {
    *("AccessDenied", "AccountProblem", "AllAccessDisabled", "AuthorizationHeaderMalformed", "ExpiredToken"),
    *("Forbidden", "InvalidAccessKeyId", "InvalidObjectState", "InvalidToken", "NoSuchBucket", "RequestTimeTooSkewed"),
    *("SignatureDoesNotMatch", "TokenRefreshRequired"),
}


@dataclass
class _Denial:
    sentence: str
    denied_at_s: float
    worked_at_s: float = float("-inf")


class Denials:
    """The kinds of requests that one bucket denies. May be told, and asked, by any thread."""

    def __init__(self, place: str, clock: Callable[[], float] = time.monotonic) -> None:
        """`place`: how every sentence begins."""
        self._place = place
        self._clock = clock
        self._lock = threading.Lock()
        self._denials: dict[str, _Denial] = {}

    def watch(self, client: Any) -> None:
        """Learn from each answer that this boto3 client gets."""
        for operation, kind in _OPERATIONS.items():
            client.meta.events.register(f"after-call.s3.{operation}", partial(self._answered, kind))

    def page(self, kind: str, page: bytes) -> None:
        """An error page, or its beginning, is the answer to a request of this kind."""
        found = _CODE.search(page)
        if found is not None and (code := found[1].decode()) in _DENIED:
            self.denied(kind, code)

    def denied(self, kind: str, why: str) -> None:
        what, right, so = _TEXTS[kind]
        self.say(kind, f"{what} are denied ({_NO_CODE.sub('', why)[:64]}; the right is {right}): {so}")

    def say(self, kind: str, text: str) -> None:
        """Some other kind of request, or of denial. `text` follows the place."""
        sentence = f"{self._place}: {text}"
        with self._lock:
            self._denials[kind] = _Denial(sentence, self._clock())

    def failed(self, kind: str) -> None:
        """A request of this kind has failed, who knows why: a denial that is known goes on."""
        with self._lock:
            if (denial := self._denials.get(kind)) is not None:
                denial.denied_at_s = self._clock()

    def worked(self, kind: str) -> None:
        """A request of this kind was served."""
        if kind not in self._denials:  # without the lock: this is called for every row
            return
        with self._lock:
            if (denial := self._denials.get(kind)) is not None:
                denial.worked_at_s = self._clock()

    def current(self) -> Mapping[str, str]:
        """What is denied now: a sentence for each kind of request."""
        if not self._denials:
            return {}
        with self._lock:
            over = [
                kind
                for kind, denial in self._denials.items()
                if denial.worked_at_s >= denial.denied_at_s and self._clock() - denial.denied_at_s >= CALM_S
            ]
            for kind in over:
                del self._denials[kind]
            return {kind: denial.sentence for kind, denial in self._denials.items()}

    def _answered(self, kind: str, http_response: Any, parsed: Mapping[str, Any], **_: object) -> None:
        """Called by botocore with each answer, whatever it says."""
        status = int(http_response.status_code)
        if status < 300:
            # DeleteObjects answers for each object by itself.
            codes = [str(each.get("Code")) for each in parsed.get("Errors", ())]
            denied = next((code for code in codes if code in _DENIED), None)
            if denied is not None:
                self.denied(kind, denied)
            else:
                self.worked(kind)
            return
        code = str(parsed.get("Error", {}).get("Code", status))
        if status in _SERVED and code != "NoSuchBucket":
            self.worked(kind)
        elif 400 <= status < 500 and status not in _PASSING:
            self.denied(kind, code)
