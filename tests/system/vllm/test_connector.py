"""NixlTiersConnector: a load that could not be copied is computed, on a real engine; and what it refuses."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")


from nixl_tiers.vllm import compat
from nixl_tiers.vllm.chunk_size import CHUNK_TOKENS
from tests.support import vllm_cpu
from tests.support.file_tier import files_tier

BLOCK = vllm_cpu.BLOCK_TOKENS
Engine = Callable[..., list[Any]]


@pytest.mark.vllm
@pytest.mark.timeout(900)
def test_failed_loads_are_recomputed_and_the_engine_keeps_running(
    engine: Engine, small_model: Path, tmp_path: Path
) -> None:
    """Wrong bytes lie in the engine's blocks when the copy fails; none of them may show in a token."""
    (tmp_path / "kv").mkdir()
    prompts = [[(7 * i * i + 3 * i + n) % 500 + 1 for i in range(700)] for n in (0, 11)]
    ask, other = (["generate", [prompt], 16] for prompt in prompts)
    tiers = {
        "tiers": [
            {"type": "cpu", "capacity": "256MiB"},
            files_tier(tmp_path / "kv", "64MiB", write="off"),
        ]
    }
    options = {"path": small_model, "skip_tokenizer_init": True, "dtype": "float32", "block_size": 32}
    # Without kv_connector_module_path: the plugin makes the name known.
    transfer = {"kv_connector": "NixlTiersConnector", "kv_load_failure_policy": "recompute"}
    forget = ["forget"]
    cold, other_cold, _, good, _, _, failed, stats, _, missed, _, after, _, _, other_after = engine(
        tiers,
        *(ask, other, forget, ask),
        *(forget, ["break", 1], ask, ["stats"]),  # the load fails: computed
        *(forget, ask),  # what failed was forgotten: computed, and stored again, or a hit of what has been since
        *(forget, ask),  # a hit
        *(forget, ["break", 1], other),
        transfer=transfer,
        **options,
    )
    chunks = len(prompts[0]) // CHUNK_TOKENS  # of two blocks
    whole = chunks * CHUNK_TOKENS
    answers = [answer[0] for answer in (cold, good, failed, missed, after)]
    assert [answer["tokens"] for answer in answers] == [cold[0]["tokens"]] * 5
    # From 0.33 on vLLM offers a request's chunks for storing again when it computes them again: sound, as they are new.
    again = whole if (compat.version() or (0,)) >= (0, 33) else 0
    assert [answer["cached"] for answer in answers] == [0, whole, 0, again, whole]
    assert (other_after[0]["tokens"], other_after[0]["cached"]) == (other_cold[0]["tokens"], 0)
    assert len(set(cold[0]["tokens"])) > 2, "a model that always repeats one token shows nothing"
    assert stats["cpu"]["failed"] == chunks


@pytest.mark.vllm
@pytest.mark.timeout(900)
@pytest.mark.skipif((compat.version() or (0,)) < (0, 33), reason="vLLM has it from 0.33 on")
def test_vllms_own_connector_loads_within_a_step_and_ends_with_a_load_that_fails(
    engine: Engine, small_model: Path
) -> None:
    """What NixlTiersConnector refuses: no token comes out of a step whose load has failed."""
    tiers = {"tiers": [{"type": "cpu", "capacity": "64MiB"}], "sync_load_budget_bytes": 1 << 30}
    prompt = [(7 * i * i + 3 * i) % 500 + 1 for i in range(700)]
    ask, forget = ["generate", [prompt], 16], ["forget"]
    options = {"path": small_model, "skip_tokenizer_init": True, "dtype": "float32"}
    cold, _, _, warm, steps = engine(tiers, ask, forget, ["hold", 0], ask, ["steps"], **options)
    assert (warm[0]["tokens"], warm[0]["cached"]) == (cold[0]["tokens"], len(prompt) // BLOCK * BLOCK)
    assert not steps.get("empty"), "it waited for its load"
    with pytest.raises(AssertionError, match=r"assert transfer_result\.success"):
        engine(tiers, ask, forget, ["break", 1], ask, **options)
