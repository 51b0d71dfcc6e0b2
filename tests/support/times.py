"""Times of tests: with `PATIENT` no slowness of a machine becomes a miss, a refusal or a kill, in an engine or a mover.

Expiry is tested with `changed` times, by a virtual clock where that is possible.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, Final

import msgspec

from nixl_tiers.base.times import PRODUCTION, Times
from nixl_tiers.store import open_with

PATIENCE_S: Final = 300.0  # below pytest's own limit
WAITS_LONG: Final = (
    *("open_s", "look_s", "ready_s", "close_s", "finalizer_s", "shutdown_s", "copies_end_s"),
    *("rendezvous_s", "rendezvous_answer_s", "nodes_s", "late_job_s", "clean_wait_s"),
    *("heartbeat_timeout_s", "start_timeout_s", "send_timeout_s", "watchdog_s", "orphan_exit_s", "stop_exit_s"),
    *("lock_wait_s", "growth_overdue_s", "file_check_s", "file_stuck_s"),
    *("s3_open_s", "s3_quick_s", "s3_check_s", "s3_upload_check_s", "s3_download_s"),
    *("s3_late_download_s", "open_look_s"),
    *("s3_ready_s", "s3_close_s"),
)
PAIRS: Final = ("overdue_job_s", "s3_open_request_s", "s3_request_s")

changed = partial(msgspec.structs.replace, PRODUCTION)
"""Production's times but for these."""
PATIENT: Final[Times] = changed(
    **dict.fromkeys(WAITS_LONG, PATIENCE_S), **dict.fromkeys(PAIRS, (PATIENCE_S, PATIENCE_S))
)
patient = partial(msgspec.structs.replace, PATIENT)
"""`PATIENT` but for these."""
KEEPS_ITS_RECORD: Final = changed(s3_ready_s=120.0, s3_close_s=120.0)
"""The first stores of an S3 tier wait for a usage record that counts them, and a tier that closes releases it, however
late the server answers: what is stored without it is refused, and one that was not released must become stale."""


open_patient = partial(open_with, PATIENT)
"""`nixl_tiers.open` with `PATIENT`."""


def patient_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration with the longest times, where it says nothing else."""
    return {"wait_s": PATIENCE_S, "probe_s": 60.0, **config}
