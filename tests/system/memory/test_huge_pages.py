"""Huge pages under the region: what is asked for, what the kernel gave, and that too few of them never break it."""

from __future__ import annotations

import logging
import os

import pytest

from nixl_tiers.base.policies import HugePages
from nixl_tiers.memory.pages import HUGE_PAGE_BYTES
from nixl_tiers.memory.region import HostRegion
from tests.memory.test_huge_pages import GEOMETRY, PAGES, ROWS, GiB, free_pages
from tests.support.machine import NR_HUGEPAGES, SHMEM_ENABLED, setting

# --- a pool -----------------------------------------------------------------------------------------------------------


def test_a_region_in_a_pool_is_all_taken_shared_and_given_back() -> None:
    with setting(NR_HUGEPAGES, str(PAGES)):
        with HostRegion.create(GEOMETRY, ROWS, huge_pages=HugePages.HUGETLB) as made:
            assert free_pages() == 0
            assert os.fstat(made.fd).st_size == PAGES * HUGE_PAGE_BYTES
            assert made.huge_bytes is None
            made.prefault().wait()
            assert made.huge_bytes == PAGES * HUGE_PAGE_BYTES
            with HostRegion.attach(os.dup(made.fd)) as other:
                assert other.huge_bytes == PAGES * HUGE_PAGE_BYTES
                other.rows_view[ROWS - 1, -1] = 77
                assert made.rows_view[ROWS - 1, -1] == 77
                other.mark([3], 0, 1, True)
            assert made.written([3], 1).all()
        assert made.huge_bytes is None
        assert free_pages() == PAGES


def test_a_fork_keeps_no_page_of_the_pool() -> None:
    with setting(NR_HUGEPAGES, str(PAGES)):
        made = HostRegion.create(GEOMETRY, ROWS, huge_pages=HugePages.HUGETLB)
        ready, wake = os.pipe()
        gone, go = os.pipe()
        child = os.fork()
        if not child:
            os.close(go)  # or a test that fails would leave this process behind
            os.write(wake, b"1")
            os.read(gone, 1)
            os._exit(0)
        os.read(ready, 1)
        made.close()
        assert free_pages() == PAGES
        os.write(go, b"1")
        assert os.waitpid(child, 0)[1] == 0
        for end in (ready, wake, gone, go):
            os.close(end)


# --- transparent ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("mode", "huge"), [(HugePages.AUTO, True), (HugePages.OFF, False)])
def test_transparent_pages_come_where_the_kernel_gives_them(
    mode: HugePages, huge: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    with (
        setting(SHMEM_ENABLED, "advise"),
        HostRegion.create(GEOMETRY, 64, huge_pages=mode) as made,
        HostRegion.attach(os.dup(made.fd)) as other,
    ):
        other.prefault().wait()  # a rank does it, and the others know of it
        assert made.huge_bytes is not None
        assert (made.huge_bytes > 0) == huge
        assert f"the host region: {made.huge_bytes / GiB:.2f} GiB of 0.06 GiB lie in pages of 2 MiB" in caplog.text
        assert ("`huge_pages` is off" in caplog.text) == (mode is HugePages.OFF)
