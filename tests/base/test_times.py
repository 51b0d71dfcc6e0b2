"""Times of an engine and its movers."""

from __future__ import annotations

import msgspec

from tests.support.times import PATIENCE_S, PATIENT

INTERVALS = {
    *("heartbeat_s", "restart_backoff_s", "stores_held_s", "disk_check_s", "growth_retry_s", "file_known_s"),
    *("s3_upload_check_retry_s", "s3_absent_s", "s3_denial_s"),
    *("s3_credentials_s", "s3_credentials_again_s", "set_aside_s"),
}


def test_patient_times_have_no_short_deadline() -> None:
    """Whoever adds a time to the object says which of both it is."""
    times = msgspec.structs.asdict(PATIENT)
    short = {name for name, value in times.items() if value not in (PATIENCE_S, (PATIENCE_S, PATIENCE_S))}
    assert short == INTERVALS
