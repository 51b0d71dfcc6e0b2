"""Times: how long this program waits before it gives something up, and how often it looks. One object for an engine and
its movers, so that tests choose it for both; users choose the times of the configuration (`wait_s`, `probe_s`, ...)."""

from __future__ import annotations

from typing import Final

import msgspec


class Times(msgspec.Struct, frozen=True):
    """In seconds. The defaults are those of production."""

    # --- an engine: from open to close
    open_s: float = 3.0  # for tiers to judge their configuration
    look_s: float = 30.0  # for the child that looks at the machine, with its imports
    open_look_s: float = 8.0  # the same, in nixl_tiers.open, which has promised to return soon
    ready_s: float = 10.0  # for tiers to list what they hold, in nixl_tiers.open
    close_s: float = 10.0  # for movers to exit, which are killed then
    finalizer_s: float = 1.0  # of a coordinator that was not closed: its process may be about to end
    shutdown_s: float = 0.3  # of vLLM, which kills processes that have not exited a few seconds after it asked
    copies_end_s: float = 2.0  # for a worker's copies, at its end
    rendezvous_s: float = 60.0  # for scheduler and workers to meet
    rendezvous_answer_s: float = 2.0  # for one of them to answer: a stopped one must not block the rest
    nodes_s: float = 2.0  # for the other ranks to allocate their cells of the first piece of host memory

    # --- the core (core/types.py)
    late_job_s: float = 5.0  # at least, from a job's start to its soft deadline
    overdue_job_s: tuple[float, float] = (30.0, 120.0)  # at least and at most, to its hard one: its mover is killed
    set_aside_s: tuple[float, float] = (5.0, 600.0)  # at least, a place whose load failed; one at which a mover hung
    clean_wait_s: float = 0.5  # a promotion waits for write-back to free a row, and then evicts unwritten ones

    # --- a mover's life
    heartbeat_s: float = 1.0
    heartbeat_timeout_s: float = 20.0
    start_timeout_s: float = 60.0  # to the first message: imports and mapping the region
    send_timeout_s: float = 120.0  # without the socket taking anything, though heartbeats come
    watchdog_s: float = 120.0  # longer than a living coordinator waits for a heartbeat
    orphan_exit_s: float = 5.0  # to exit once the coordinator is gone and the results have no reader
    stop_exit_s: float = 60.0  # the same after Stop: there is a journal to write, and the coordinator waits `close_s`
    restart_backoff_s: tuple[float, ...] = (0.05, 1.0, 5.0, 15.0, 60.0)  # by the number of recent deaths

    # --- tiers
    stores_held_s: float = 0.25  # by loads, before stores have their turn
    disk_check_s: float = 1.0  # between two looks whether what is open is still what its path leads to
    lock_wait_s: float = 10.0  # for a path's lock, before opening says that it waits for it
    growth_overdue_s: float = 5.0  # stores wait for a growth, which waits for the disk
    growth_retry_s: float = 2.0  # between two tries to grow, when there was no room
    file_check_s: float = 5.0  # of an existence check in a shared directory, as s3_check_s
    file_stuck_s: float = 30.0  # all threads of such checks hang: their mover is killed
    file_known_s: float = 60.0  # so long after it was stored, found or loaded a row is known to be there
    s3_open_s: float = 3.0  # for credentials, and for the bucket's answer
    s3_open_request_s: tuple[float, float] = (1.2, 1.4)  # for its connection, and to read the answer
    s3_request_s: tuple[float, float] = (2.0, 10.0)  # the same of other requests
    s3_quick_s: float = 1.0  # for an existence check's connection, and for its answer
    s3_check_s: float = 5.0  # of an existence check; keys that are not known by then stay unknown
    s3_upload_check_s: float = 1.0  # an upload waits no longer for the answer whether its row is there
    s3_upload_check_retry_s: float = 5.0  # nor is that asked for so long, if it is late
    s3_absent_s: float = 30.0  # so long a row that was not there is uploaded without asking again
    s3_download_s: float = 15.0  # and the time that its bytes take at the slowest;
    s3_late_download_s: float = 5.0  # where others take far less, only so long: its host row holds up others
    s3_credentials_s: float = 60.0  # between two looks for new credentials
    s3_credentials_again_s: float = 5.0  # the same while transfers fail
    s3_denial_s: float = 5.0  # a success clears a denial so long after it: some servers deny every other request
    s3_ready_s: float = 3.0  # so long uploads wait for a usage record that counts their mover, or those before them
    s3_close_s: float = 2.0  # for requests that are still to be sent, and once more to release the usage record


PRODUCTION: Final = Times()
