"""Mutation test of the journal's state machine: each of these bugs of csrc/records.h violates an invariant."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis.internal.conjecture.providers import HypothesisProvider
from hypothesis.stateful import run_state_machine_as_test

from tests.support.hooked_worker import build
from tests.tiers.slab.test_journal_model import JournalModel

pytestmark = pytest.mark.timeout(900)

SEEDS = 100
FEW = settings(
    max_examples=25,
    stateful_step_count=40,
    deadline=None,
    database=None,
    phases=[Phase.generate],
    report_multiple_bugs=False,
    suppress_health_check=list(HealthCheck),
)
BUGS = {
    "a store that begins is not spared": {
        "        if (what == NOTHING)\n            continue;": "        what = what ? what : change->tag ? ROW : EMPTY;"
    },
    "neighbours that are none": {"slots[i + run] == slots[i] + run": "slots[i + run] > slots[i]"},
    "the header does not say that records are missing": {
        "return write_header(records, records->headers.distrusted) ? -error : (records->error = error);":
            "return records->error = error;"
    },
    "the first header is not flushed": {"error || records->marked ? error : flush(records)": "error"},
}  # fmt: skip


@pytest.fixture(scope="module", params=BUGS)
def wrong(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    return build(tmp_path_factory.mktemp("wrong"), BUGS[request.param])


class Mutant(JournalModel):
    pass


def search() -> None:
    for number in range(SEEDS):
        run_state_machine_as_test(seed(number)(Mutant), settings=FEW)


def test_planted_bug_violates_an_invariant(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    Mutant.library = wrong
    # Constants of all modules that this process has imported: a seed would be other examples in each run.
    monkeypatch.setattr(HypothesisProvider, "_maybe_draw_constant", lambda *_, **__: None)
    with pytest.raises(AssertionError):
        search()
