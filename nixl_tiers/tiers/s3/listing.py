"""A listing of an object tier's prefix: what stands there, sorted as it comes in. Runs on the control thread."""

from __future__ import annotations

import threading
from email.utils import parsedate_to_datetime
from typing import Any, Final

from nixl_tiers.chunk import Key, key_of_object

PROBE_NAME: Final = ".probe"
"""Below the prefix: what is written to find out whether, and under which conditions, something can be written. It is
always overwritten and never deleted, because engines that share the prefix may be in the middle of finding out."""


class Listing:
    """A listing under way. When `done` is set, its other attributes are complete, and the tier's to change.

    Ages are the server's: its Last-Modified against its Date. An object is no younger than the seal in it tells, or
    nearly so; where the seal is older, whoever loads the row finds out.
    """

    def __init__(
        self,
        prefix: str,
        namespace: str,
        row_bytes: int,
        *,
        whole: bool,
        max_age_s: float | None = None,
        expired_only: bool = False,
    ) -> None:
        """`prefix`: the tier's, `namespace`: that of the rows which are looked for, below it. `whole`: list all
        namespaces, and tell of the others' rows too. `expired_only`: tell of nothing but what is too old."""
        self.expired_only = expired_only
        self.done = threading.Event()
        self.rows: list[tuple[float, Key]] = []  # by Last-Modified, oldest first
        self.expired: list[Key] = []
        self.strangers: list[tuple[float, str, int]] = []  # rows of others or of another size: when, name, bytes
        self.expired_strangers: list[str] = []  # those of the strangers that are too old
        self._root = f"{prefix}/"
        self._own = f"{prefix}/{namespace}/"
        self._from = self._root if whole else self._own
        self._whole = whole
        self._row_bytes = row_bytes
        self._max_age_s = max_age_s
        self._after = ""

    def page(self, client: Any, bucket: str) -> None:
        """Fetch the next page (at most 1000 objects)."""
        position = {"StartAfter": self._after} if self._after else {}
        answer = client.list_objects_v2(Bucket=bucket, Prefix=self._from, **position)
        oldest_s = float("-inf")
        date = answer["ResponseMetadata"]["HTTPHeaders"].get("date")
        if self._max_age_s is not None and date is not None:
            oldest_s = parsedate_to_datetime(date).timestamp() - self._max_age_s
        found = answer.get("Contents", ())
        for each in found:
            self._sort_in(each["Key"], each["Size"], each["LastModified"].timestamp(), oldest_s)
        if found:
            self._after = found[-1]["Key"]
        if not answer.get("IsTruncated") or not found:
            self.rows.sort()
            self.strangers.sort()
            self.done.set()

    def _sort_in(self, name: str, nbytes: int, modified_s: float, oldest_s: float) -> None:
        key = key_of_object(name[len(self._own) :]) if name.startswith(self._own) else None
        if key is not None and nbytes == self._row_bytes:
            if modified_s < oldest_s:
                self.expired.append(key)
            elif not self.expired_only:
                self.rows.append((modified_s, key))
        elif self._whole and is_row(name[len(self._root) :]):
            if modified_s < oldest_s:
                self.expired_strangers.append(name)
            if not self.expired_only:
                self.strangers.append((modified_s, name, nbytes))


def is_row(name: str) -> bool:
    """Whether `name`, below the prefix, can be a row of some namespace. What cannot is not ours to count or delete."""
    namespace, _, rest = name.partition("/")
    return len(namespace) == 32 and set(namespace) <= set("0123456789abcdef") and key_of_object(rest) is not None
