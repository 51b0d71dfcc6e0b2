"""The times of an engine reach its movers, which are processes of their own."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path

import pytest

from nixl_tiers.store import open_with
from tests.support.checked_rows import SIZE, TIMEOUT_S, hits, put
from tests.support.file_tier import file_tier
from tests.support.leaks import reclaim_all_host_rows
from tests.support.times import patient, patient_config
from tests.support.waiting import until

KEYS = [b"key-%d" % number for number in range(4)]


@pytest.mark.smoke
def test_a_hung_mover_is_replaced_by_the_one_deadline_that_is_short(tmp_path: Path) -> None:
    times = patient(heartbeat_s=0.1, heartbeat_timeout_s=1.0)
    config = patient_config({"tiers": [{"type": "cpu", "capacity": "1MiB"}, file_tier(tmp_path, "16MiB")]})
    with open_with(times, config, SIZE, "times") as store:
        put(store, KEYS)
        pid = store.coordinator.mover_pids[0]
        with contextlib.suppress(ProcessLookupError, TypeError):  # a busy machine: it has been replaced before
            os.kill(pid, signal.SIGSTOP)  # type: ignore[arg-type]
        until(lambda: store.coordinator.mover_pids[0] not in {pid, None}, "another mover", timeout_s=TIMEOUT_S)
        until(lambda: reclaim_all_host_rows(store), "every host row to be free", timeout_s=TIMEOUT_S)
        until(lambda: hits(store, KEYS) == len(KEYS), "rows of the tier", timeout_s=TIMEOUT_S)
