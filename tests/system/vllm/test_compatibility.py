"""Features of vLLM beside tiers, on real engines: the same tokens as without tiers, and hits that come from them."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")

from demo import vllm_cpu
from nixl_tiers.base.chunk import Geometry
from nixl_tiers.vllm import compat
from nixl_tiers.vllm.chunk_size import CHUNK_TOKENS
from tests.support.file_tier import file_tier, files_tier
from tests.support.models import save_adapter, save_random
from tests.system.vllm.test_engine import BLOCK, CHUNKS, PROMPT, RECOMPUTING, WHOLE, Engine, ask, tokens

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

CPU = {"type": "cpu", "capacity": "64MiB"}
ASK = ask()


@pytest.fixture
def options(small_model: Path) -> dict[str, Any]:
    return {"path": small_model, "max_num_seqs": 1}


def test_hints_and_quotas_without_the_engines_own_prefix_cache(
    engine: Engine, options: dict[str, Any], tmp_path: Path
) -> None:
    """And what requests may ask for: hints, and quotas by their salts. In this engine each hit is of a tier."""
    options |= {"enable_prefix_caching": False, "transfer": RECOMPUTING}
    row = Geometry(1, 4 * BLOCK * 4 * 32 * 2 * 4).row_bytes  # four layers of four heads in float32
    room = 24
    tiers = {
        "tiers": [{**CPU, "capacity": room * row}, file_tier(tmp_path / "kv", "64MiB")],
        "quotas": {"a": {"share": "25%", "salt_sha256": hashlib.sha256(b"pepper").hexdigest()}},
    }

    def one(number: int, **wish: Any) -> list[Any]:
        return ["ask", [number, *PROMPT[1:]], 16, wish]

    prefetch = {"hints": [["kv.prefetch", {"after_s": 0}]], "options": {"store": "none", "load": "none"}}
    steps = (
        {"cold": ASK, "cpu": ASK, "first": ["stats"]}
        | {"retain": one(11, hints=[["kv.retain", {"ttl_s": 3000}]]), "normal": one(12)}
        | {"low": one(13, hints=[["kv.priority", {"priority": "low"}]]), "written": ["flush"]}
        | {"a row too many": one(14), "older": ASK, "normal again": one(12), "after low": ["stats"]}
        | {f"churn {number}": one(number) for number in range(15, 20)}
        | {"retained": one(11), "after churn": ["stats"]}
        | {"not loaded": one(13, **prefetch), "promotions": ["promoted", CHUNKS], "prefetched": one(13)}
        | {"after prefetch": ["stats"]}
        | {"salted 11": one(11, salt="pepper"), "salted, written": ["flush"]}  # else others may evict it
        | {f"salted {number}": one(number, salt="pepper") for number in (12, 13)}
        | {"all written": ["flush"], "salted again": one(11, salt="pepper"), "last": ["stats"]}
    )
    (without,) = engine(None, ASK, **options | {"transfer": None})
    seen = dict(zip(steps, engine(tiers, *steps.values(), **options), strict=True))
    assert tokens(seen["cold"]) == tokens(seen["cpu"]) == tokens(without)
    assert (seen["cold"][0]["cached"], seen["cpu"][0]["cached"]) == (0, WHOLE)
    assert (seen["first"]["cpu"]["hits"], seen["first"]["cpu"]["failed"]) == (CHUNKS, 0)

    def rows_read(label: str) -> float:
        return float(seen[label]["file"]["bytes_read"]) / row

    assert seen["older"][0]["cached"] == seen["normal again"]["cached"] == seen["retained"]["cached"] == WHOLE
    assert rows_read("after low") == 0, "what is evicted first is what was stored with low priority"
    assert rows_read("after churn") == 0, "what was retained stays, in a host that others fill"
    assert (seen["not loaded"]["cached"], seen["prefetched"]["cached"]) == (0, WHOLE)
    assert rows_read("after prefetch") == CHUNKS
    assert (seen["salted 11"]["cached"], seen["salted again"]["cached"]) == (0, WHOLE)
    spare = room // 4 - CHUNKS  # of its share, beside its last prompt: whatever was not yet written when it was full
    again = rows_read("last") - CHUNKS
    assert CHUNKS - spare <= again <= CHUNKS, "a tenant evicts its own rows, though the host has room for all"
    assert seen["salted again"]["tokens"] == seen["salted 11"]["tokens"] == seen["retained"]["tokens"]
    assert seen["prefetched"]["tokens"] == seen["low"]["tokens"]


@pytest.mark.slow
def test_beside_another_connector_of_a_multi_connector(engine: Engine, options: dict[str, Any], tmp_path: Path) -> None:
    """The other one stores whole prompts in files, and loads what is not found here, or could not be copied."""

    def transfer() -> dict[str, Any]:
        other = {
            "kv_connector": "ExampleConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"shared_storage_path": str(tmp_path)},
        }
        connectors = [vllm_cpu.recomputing_transfer([CPU], wait_s=120.0), other]
        return {
            "kv_connector": "MultiConnector",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {"connectors": connectors},
        }

    again = [["forget"], ASK]
    (without,) = engine(None, ASK, **options)
    cold, _, cpu, stats, _, _, failed, later = engine(
        {"tiers": []}, ASK, *again, ["stats"], ["break", 1], *again, ["stats"], transfer=transfer(), **options
    )
    assert tokens(cold) == tokens(cpu) == tokens(failed) == tokens(without)
    assert (cold[0]["cached"], cpu[0]["cached"]) == (0, WHOLE)
    assert (stats["cpu"]["hits"], stats["cpu"]["failed"], later["cpu"]["failed"]) == (CHUNKS, 0, CHUNKS)

    others, first, _, cpu, stats = engine(
        {"tiers": []}, ASK, ["stats"], *again, ["stats"], transfer=transfer(), **options
    )
    assert tokens(others) == tokens(cpu) == tokens(without)
    assert (others[0]["cached"], first["cpu"]["hits"]) == (WHOLE, 0), "a hit of the other connector"
    assert (cpu[0]["cached"], stats["cpu"]["hits"]) == (WHOLE, CHUNKS), "what the other one loaded was stored here"


@pytest.mark.slow
def test_with_ngram_speculation(engine: Engine, options: dict[str, Any], tmp_path: Path) -> None:
    """What is generated is stored, too: the slots of rejected drafts may not show."""
    # A model that repeats itself now and then, so that some drafts are right.
    options["path"] = save_random(
        "LlamaForCausalLM",
        tmp_path / "model",
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=32,
        initializer_range=0.08,
    )
    prompt = [(7 * i * i + 3 * i) % 50 + 1 for i in range(200)]
    asked = ["generate", [prompt], 120]
    speculation = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
    (without,) = engine(None, asked, **options)
    (answer,) = tokens(without)
    longer = ["generate", [prompt + answer], 40]
    plain, _, plain_longer = engine(None, asked, ["forget"], longer, **options)
    assert tokens(plain) == [answer]
    cold, _, _, cpu, steps, _, generated, stats = engine(
        {"tiers": [CPU], "offload_prompt_only": False},
        *(asked, ["forget"], ["steps"], asked, ["steps"], ["forget"], longer, ["stats"]),
        speculative_config=speculation,
        **options,
    )
    assert tokens(cold) == tokens(cpu) == [answer]
    assert tokens(generated) == tokens(plain_longer)
    generated_whole = (len(prompt) + len(answer) - 1) // BLOCK * BLOCK
    assert (cpu[0]["cached"], generated[0]["cached"]) == (BLOCK, generated_whole)
    assert stats["cpu"]["hits"] == (BLOCK + generated_whole) // BLOCK
    accepted = len(answer) - steps["computing"]
    assert 0 < accepted < steps["drafted"], "some drafts must be right, and some wrong"


@pytest.mark.slow
def test_lora_adapters_share_nothing(engine: Engine, options: dict[str, Any], tmp_path: Path) -> None:
    adapters = [
        [name, number, str(save_adapter(options["path"], tmp_path / name, number))]
        for number, name in enumerate(("first", "second"), start=1)
    ]
    asks = [ASK, *([*ASK, adapter] for adapter in adapters)]
    tiers = {"tiers": [CPU, file_tier(tmp_path / "kv", "64MiB")], "lora_storage": True}
    options |= {"enable_lora": True, "max_lora_rank": 8}
    without = [tokens(answers) for answers in engine(None, *asks, **options)]
    assert len({tuple(answer) for (answer,) in without}) == 3, "adapters that change nothing show nothing"

    *cold, _ = engine(tiers, *asks, ["flush"], **options)
    assert [tokens(answers) for answers in cold] == without
    assert [answers[0]["cached"] for answers in cold] == [0, 0, 0]

    *file, stats, _, cpu = engine(tiers, *reversed(asks), ["stats"], ["forget"], asks[1], **options)
    assert [tokens(answers) for answers in reversed(file)] == without
    assert [answers[0]["cached"] for answers in file] == [WHOLE] * 3
    assert stats["file"]["hits"] == 3 * CHUNKS
    assert (tokens(cpu), cpu[0]["cached"]) == (without[1], WHOLE)


@pytest.mark.slow
def test_latent_attention_with_two_ranks(engine: Engine, two_ranks: dict[str, Any], tmp_path: Path) -> None:
    """In chunks of several blocks. The oracle is what the blocks hold: on a CPU, vLLM 0.32 decodes such a model with
    other sums than it prefills. It also switches its own prefix cache off."""
    model = save_random(
        "DeepseekV2ForCausalLM",
        tmp_path / "latent",
        num_key_value_heads=4,
        q_lora_rank=None,
        kv_lora_rank=512,
        qk_nope_head_dim=32,
        qk_rope_head_dim=64,
        v_head_dim=32,
        first_k_dense_replace=2,
        initializer_range=0.2,
    )
    amx = bool(getattr(torch.cpu, "_is_amx_tile_supported", bool)())
    block = 32 if amx else 16  # of vLLM's kernel for these processors
    prompt = PROMPT[:300]
    chunks = len(prompt) // CHUNK_TOKENS
    blocks = chunks * CHUNK_TOKENS // block
    asked = ["generate", [prompt], 4]
    tiers = {"tiers": [CPU, file_tier(tmp_path / "kv", "64MiB")]}
    one = {"path": model, "dtype": "bfloat16", "block_size": block, "enable_prefix_caching": False}
    one["transfer"] = RECOMPUTING
    cold, computed, _, cpu, loaded, stats, _ = engine(
        tiers, asked, ["pages"], ["wipe"], asked, ["pages"], ["stats"], ["flush"], **one, **two_ranks
    )
    file, read, others = engine(tiers, asked, ["pages"], ["stats"], **one, **two_ranks)
    assert [answers[0]["cached"] for answers in (cold, cpu, file)] == [0, chunks * CHUNK_TOKENS, chunks * CHUNK_TOKENS]
    assert (stats["cpu"]["hits"], others["file"]["hits"]) == (chunks, chunks)
    for rank in range(2):
        whole = computed[rank][:blocks]
        assert len({digest for layers in whole for digest in layers}) == 2 * blocks, "equal bytes show nothing"
        # The last ones hold the rest of the prompt, which is computed in other steps behind a hit.
        assert len(computed[rank]) == len(loaded[rank]) == len(read[rank]) == -(-len(prompt) // block)
        assert read[rank][:blocks] == whole
        # Here the engine uses its blocks again, in another order.
        assert all(block in loaded[rank] for block in whole)
    assert cpu == file, "the same sums upon the same bytes"
    # Every rank has the same bytes: they are stored once, and are those of an engine with one rank.
    assert read[0] == read[1]
    row = Geometry(1, CHUNK_TOKENS * (512 + 64) * 2 * 2)  # of two layers
    assert others["file"]["bytes_read"] == chunks * row.row_bytes
    alone, pages, found = engine(tiers, asked, ["pages"], ["stats"], **one)
    assert (alone[0]["cached"], found["file"]["hits"]) == (chunks * CHUNK_TOKENS, chunks)
    assert pages[0][:blocks] == computed[0][:blocks]


def test_failed_loads_are_recomputed_and_the_engine_keeps_running(
    engine: Engine, small_model: Path, tmp_path: Path
) -> None:
    """Wrong bytes lie in the engine's blocks when the copy fails; none of them may show in a token."""
    (tmp_path / "kv").mkdir()
    other, forget = ask(11), ["forget"]
    tiers = {"tiers": [{"type": "cpu", "capacity": "256MiB"}, files_tier(tmp_path / "kv", "64MiB", write="off")]}
    cold, other_cold, _, good, _, _, failed, stats, _, missed, _, after, _, _, other_after = engine(
        tiers,
        *(ASK, other, forget, ASK),
        *(forget, ["break", 1], ASK, ["stats"]),  # the load fails: computed
        *(forget, ASK),  # what failed was forgotten: computed, and stored again, or a hit of what has been since
        *(forget, ASK),  # a hit
        *(forget, ["break", 1], other),
        path=small_model,
        block_size=32,
        transfer=RECOMPUTING,  # without kv_connector_module_path: the plugin makes the name known
    )
    chunks = len(PROMPT) // CHUNK_TOKENS  # of two blocks
    whole = chunks * CHUNK_TOKENS
    answers = (cold, good, failed, missed, after)
    assert [tokens(answer) for answer in answers] == [tokens(cold)] * 5
    # From 0.33 on vLLM offers a request's chunks for storing again when it computes them again: sound, as they are new.
    again = whole if (compat.version() or (0,)) >= (0, 33) else 0
    assert [answer[0]["cached"] for answer in answers] == [0, whole, 0, again, whole]
    assert (other_after[0]["tokens"], other_after[0]["cached"]) == (other_cold[0]["tokens"], 0)
    assert stats["cpu"]["failed"] == chunks


@pytest.mark.skipif((compat.version() or (0,)) < (0, 33), reason="vLLM has it from 0.33 on")
def test_vllms_own_connector_loads_within_a_step_and_ends_with_a_load_that_fails(
    engine: Engine, small_model: Path
) -> None:
    """What NixlTiersConnector refuses: no token comes out of a step whose load has failed."""
    tiers = {"tiers": [{"type": "cpu", "capacity": "64MiB"}], "sync_load_budget_bytes": 1 << 30}
    cold, _, _, warm, steps = engine(tiers, ASK, ["forget"], ["steps"], ASK, ["steps"], path=small_model)
    assert (tokens(warm), warm[0]["cached"]) == (tokens(cold), WHOLE)
    assert not steps.get("empty"), "it waited for its load"
    with pytest.raises(AssertionError, match=r"assert transfer_result\.success"):
        engine(tiers, ASK, ["forget"], ["break", 1], ASK, path=small_model)
