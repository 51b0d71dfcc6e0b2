"""KeySet and listings against plain sets, with pages that arrive while rows are stored and deleted."""

from __future__ import annotations

import threading

from tests.tiers.s3.test_listing import NAMES, OURS, ROW, FakeBucket, again, full, new_quota, run


def test_a_listing_runs_while_rows_are_stored_on_another_thread() -> None:
    bucket, quota = FakeBucket(page_rows=50), new_quota()
    for number in range(5000):
        bucket.put(b"%d" % number)
    run(full(quota), bucket)
    stop = threading.Event()
    stored = 0

    def store() -> None:
        nonlocal stored
        while not stop.is_set():
            key = b"new %d" % stored
            quota.reserve(key, upload=True)
            bucket.objects = {**bucket.objects, NAMES.name(OURS, key): (ROW, 0.0)}
            quota.upload_ended(key)
            stored += 1

    thread = threading.Thread(target=store)
    thread.start()
    try:
        entries = [entry for batch in run(again(quota), bucket) for entry in batch]
    finally:
        stop.set()
        thread.join()
    assert entries == [], "all rows that this mover has stored, and nothing of them is lost"
    assert len(quota) == 5000 + stored
