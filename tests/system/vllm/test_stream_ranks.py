"""Streams of four ranks in processes of their own, of which one is late, one runs out of time and one is cancelled:
they find different gaps, and vLLM keeps what all of them have copied."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import pytest

pytest.importorskip("vllm")

from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.v1.kv_offload.base import GPULoadStoreSpec
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

from nixl_tiers.base.chunk import Geometry
from nixl_tiers.base.row_words import WAITING
from nixl_tiers.memory.region import HostRegion
from nixl_tiers.vllm.copy_jobs import RowsSpec, StreamSpec
from tests.support.stream_copies import Disturbed, How, copy_at_once
from tests.support.waiting import until
from tests.vllm.test_worker import Rank

RANKS = 4
SUB_BLOCKS, PAGE = 2, 512
ROWS = [5, 3, 0, 4, 1, 2]  # of the load
THERE = 3  # of these, at its beginning
FEW = 2  # in each copy of a rank whose stream is cancelled
BLOCKS = list(range(2 * len(ROWS)))


class RankProcess:
    """One rank's worker, in a fork of this process."""

    def __init__(self, region: HostRegion, number: int, how: How, file: Path, others: list[RankProcess]) -> None:
        asked, self._ask = os.pipe()
        self._answer, answers = os.pipe()
        fd = os.dup(region.fd)
        self.pid = os.fork()
        if not self.pid:
            status = 1
            try:
                os.close(self._ask)
                for other in others:  # which end when only this process has closed them
                    other._asks.close()
                rank = Rank([[PAGE]], SUB_BLOCKS, RANKS, number, region=HostRegion.attach(fd))
                _serve(rank, how, file, os.fdopen(asked), os.fdopen(answers, "w"))
                status = 0
            finally:
                os._exit(status)
        for descriptor in (asked, answers, fd):
            os.close(descriptor)
        self._answers, self._asks = os.fdopen(self._answer), os.fdopen(self._ask, "w")

    def ask(self, what: str) -> Any:
        print(what, file=self._asks, flush=True)
        return json.loads(self._answers.readline())

    def end(self) -> int:
        self._asks.close()
        status = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        self._answers.close()
        return status


def _serve(rank: Rank, how: How, file: Path, asked: TextIO, answers: TextIO) -> None:
    """Commands: "load", as a step submits it; "go on", once it copies, as `how` says; "report", as the connector does
    at a step's end: whether the load has ended, and what of it is invalid; "blocks": what the engine's hold."""
    rank.clear()
    rank.worker.keep_failed_loads()
    if how == "cancelled":
        copy_at_once(rank.worker, FEW)
    disturbed = Disturbed(rank.worker, how, file)
    for line in asked:
        answer: Any = None
        match line.strip():
            case "load":
                stream = StreamSpec(1, 1, tuple(range(THERE, len(ROWS))), time.monotonic() + 1000.0)
                rows = RowsSpec(np.array(ROWS, np.int64), (len(ROWS),), stream=stream)
                rank.worker.submit_load(1, rows, GPULoadStoreSpec(BLOCKS, [len(BLOCKS)], [0]))
            case "go on" if how == "cancelled":
                disturbed.cancel()
            case "go on":
                disturbed.until_it_copies()
            case "report":
                ended = [result.job_id for result in rank.worker.get_finished() if result.success]
                answer = ended == [1], sorted(rank.worker.take_invalid_blocks())
            case "blocks":
                answer = [[*set(rank.bytes_of(0, block))] for block in BLOCKS]
        print(json.dumps(answer), file=answers, flush=True)
    rank.worker.shutdown()


@pytest.fixture
def region() -> Iterator[HostRegion]:
    """Each rank's cell of a row holds a byte of its own."""
    with HostRegion.create(Geometry(RANKS, SUB_BLOCKS * PAGE, SUB_BLOCKS), len(ROWS)) as region:
        cells = region.rows_view[:, : RANKS * region.geometry.cell_bytes].reshape(len(ROWS), RANKS, -1)
        for row in range(len(ROWS)):
            for rank in range(RANKS):
                cells[row, rank] = held_byte(row, rank)
        region.words[ROWS[THERE:]] = WAITING
        region.limits[1] = 1 << 32 | len(ROWS)
        yield region


def held_byte(row: int, rank: int) -> int:
    return 1 + 10 * row + rank


@pytest.mark.parametrize(
    ("hows", "gap"),
    [
        (("", "", "", ""), len(ROWS)),
        (("", "", "", "late"), len(ROWS)),
        (("", "overdue", "", "late"), THERE),
        (("", "overdue", "cancelled", "late"), FEW),
    ],
)
def test_vllm_keeps_what_all_ranks_have_copied(
    region: HostRegion, tmp_path: Path, hows: tuple[How, ...], gap: int
) -> None:
    released = tmp_path / "released"
    ranks: list[RankProcess] = []
    for number, how in enumerate(hows):
        ranks.append(RankProcess(region, number, how, released, ranks))
    united = KVOutputAggregator(RANKS)
    ended, invalid = False, set[int]()

    def step() -> bool:
        nonlocal ended
        outputs = []
        for rank in ranks:
            done, blocks = rank.ask("report")
            found = KVConnectorOutput(finished_recving={"r"} if done else None, invalid_block_ids=set(blocks))
            outputs.append(ModelRunnerOutput(req_ids=[], req_id_to_index={}, kv_connector_output=found))
        output = united.aggregate(outputs)
        assert output is not None
        assert output.kv_connector_output is not None
        assert not ended, "no rank reports blocks behind the end: another request may have them"
        invalid.update(output.kv_connector_output.invalid_block_ids)
        ended = bool(output.kv_connector_output.finished_recving)
        return ended

    try:
        for rank in ranks:
            rank.ask("load")
        for rank in ranks:
            rank.ask("go on")
        region.arrive(ROWS[THERE:])
        if "late" in hows:
            for _ in range(20):
                assert not step(), "one rank has copied nothing yet"
            released.touch()
        until(step, "all ranks report the end")
        kept = [block for block in BLOCKS if block not in invalid]
        assert kept == BLOCKS[: gap * SUB_BLOCKS]
        for number, rank in enumerate(ranks):
            held = rank.ask("blocks")
            assert [held[block] for block in kept] == [[held_byte(row, number)] for row in ROWS[:gap] for _ in "ab"]
    finally:
        released.touch()
        statuses = [rank.end() for rank in ranks]
    assert statuses == [0] * RANKS
