"""Whether a tier may store and delete below its prefix now.

A private prefix: with the lease, once a listing that began in this tenure, or after the lease was claimed for it, has
counted what others wrote before. A shared one: always, but with `write: off`.
"""

from __future__ import annotations

import secrets
from typing import Final

from nixl_tiers.config.schema import S3Config
from nixl_tiers.tiers.s3.control import S3Control
from nixl_tiers.tiers.s3.lease import LeaseTerms, PrefixLease

LEASE_TERMS: Final = LeaseTerms()
LEASE_START_S: Final = 3.0  # how long opening waits for it


class Ownership:
    """Of one tier. `may_write` and `may_delete` are for any thread."""

    def __init__(self, config: S3Config) -> None:
        self._config = config
        self.engine = secrets.token_hex(8)
        self.reads_only = config.write == "off"
        self.lease: PrefixLease | None = None
        self._tenures = (0, 0)  # the lease's when the last listing ended, and when the present one began

    def start(self, control: S3Control) -> None:
        """Ask for the lease, if there should be one."""
        if self._config.shared or self.reads_only or self.lease is not None:
            return
        self.lease = PrefixLease(
            lambda: control.connection.client,
            self._config.bucket,
            self._config.prefix,
            self.engine,
            control.denials,
            control.connection.server_time_s,
            LEASE_TERMS,
        )
        self.lease.start(LEASE_START_S)

    def close(self, *, release: bool) -> None:
        """`release`: nothing that was begun can still arrive, so that the lease may be handed over."""
        if self.lease is not None:
            self.lease.close(release=release)
            self.lease = None

    @property
    def tenure(self) -> int:
        return 0 if self.lease is None else self.lease.tenure()

    @property
    def coming_tenure(self) -> int:
        """For which a listing that begins now counts."""
        return 0 if self.lease is None else self.lease.coming_tenure()

    @property
    def may_write_soon(self) -> bool:
        """Whether `may_write` may become true within a second or two, without a listing."""
        return self.lease is not None and self.lease.is_claiming() and self.may_queue_deletes

    @property
    def has_new_tenure(self) -> bool:
        """Whether everything must be listed before rows are stored and deleted."""
        return not self._config.shared and self.tenure not in (0, self._tenures[0])

    @property
    def may_write(self) -> bool:
        """Whether uploads and deletes may begin now."""
        if self._config.shared:
            return not self.reads_only
        return (tenure := self.tenure) != 0 and tenure == self._tenures[0]

    @property
    def may_queue_deletes(self) -> bool:
        """As `may_write`, and while the tenure that the last listing counts for is claimed: they are sent when it has
        begun. If it does not, the listing of the next drops them."""
        if self._config.shared:
            return not self.reads_only
        return (tenure := self.coming_tenure) != 0 and tenure == self._tenures[0]

    @property
    def may_delete(self) -> bool:
        """Whether queued deletes may be sent now: as `may_write`, and while the listing of a new tenure runs, in which
        only expired objects that it has found are queued."""
        if self._config.shared:
            return not self.reads_only
        return (tenure := self.tenure) != 0 and tenure == self._tenures[1]

    def is_other(self, tenure: int) -> bool:
        """Whether this is not the tenure of the last listing: others may have written since."""
        return tenure != self._tenures[0]

    @property
    def has_counted(self) -> bool:
        """Whether the last full listing that has begun counts for an owner."""
        return self._tenures[1] != 0

    def listing_begins(self, tenure: int) -> None:
        """A full listing of this tenure (0: without the lease) sends its first request."""
        self._tenures = (self._tenures[0], tenure)

    def forgot_rows(self) -> None:
        """Rows that are there are not counted any more: what was listed counts for no tenure."""
        self._tenures = (0, 0)

    def listing_ended(self) -> None:
        self._tenures = (self._tenures[1], self._tenures[1])
