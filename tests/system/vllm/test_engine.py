"""Real vLLM on the CPU: the same tokens with tiers as without, and every hit from the tier that it should come from."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from demo import vllm_cpu
from nixl_tiers.base.chunk import Geometry
from tests.support.file_tier import file_tier, files_tier
from tests.support.models import save_random
from tests.support.servers import MotoServer
from tests.support.times import PATIENT, patient_config

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1200)]

BLOCK = vllm_cpu.BLOCK_TOKENS
CPU = {"type": "cpu", "capacity": "256MiB"}
PROMPT = [(7 * i * i + 3 * i) % 500 + 1 for i in range(700)]
CHUNKS = len(PROMPT) // BLOCK
WHOLE = CHUNKS * BLOCK
RECOMPUTING = {"kv_connector": "NixlTiersConnector", "kv_load_failure_policy": "recompute"}
Engine = Callable[..., list[Any]]


def ask(number: int = 0, tokens: int = 700, answer: int = 16) -> list[Any]:
    return ["generate", [[(7 * i * i + 3 * i + number) % 500 + 1 for i in range(tokens)]], answer]


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    """Four prompts of real text: about 550 tokens, the last two with the same beginning."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(vllm_cpu.build_model(vllm_cpu.cache_directory() / "model"))
    sentences = [
        [
            f"On day {day} the ship {name} carried {day * number % 89} barrels of {cargo} to port {day % 7}."
            for day in range(28)
        ]
        for number, name, cargo in ((3, "Anna", "salt"), (5, "Borea", "oil"), (7, "Clio", "tea"))
    ]
    texts = [" ".join(lines) for lines in sentences]
    texts.append(" ".join(sentences[2][:14] + sentences[0][6:20]))
    return [tokenizer.encode(text + " On day") for text in texts]


def tokens(answers: list[dict[str, Any]]) -> list[list[int]]:
    found = [answer["tokens"] for answer in answers]
    assert all(len(set(each)) > 2 for each in found), "a model that always repeats one token shows nothing"
    return found


@pytest.mark.smoke
def test_one_prompt_through_every_tier(
    engine: Engine, prompts: list[list[int]], moto: MotoServer, tmp_path: Path
) -> None:
    """Cold, GPU, host memory, and after a reset computed again; file in a new engine; S3 in one without the files.
    bf16, one request at a time."""
    prompt = prompts[0]
    chunks = len(prompt) // BLOCK
    whole = chunks * BLOCK
    asked = ["generate", [prompt], 16]
    place = {"bucket": moto.make_bucket(f"engine-{os.getpid()}"), "endpoint": moto.endpoint}
    s3 = {"type": "s3", "capacity": "256MiB", **place}
    tiers = patient_config({"tiers": [CPU, file_tier(tmp_path / "kv", "256MiB"), s3]})

    without = engine(None, asked, asked)
    cold, gpu, _, cpu, stats, _, first, _, reset, kept = engine(
        *(tiers, asked, asked, ["forget"], asked, ["stats"], ["flush"], ["stats"], ["reset"], asked, ["stats"]),
        env=moto.env,
        times=PATIENT,
    )
    assert tokens(cold) == tokens(gpu) == tokens(cpu) == tokens(reset) == tokens(without[0])
    assert [answer[0]["cached"] for answer in (cold, gpu, cpu, reset)] == [0, whole, whole, 0]
    # With the same part of the prompt cached, the same sums are made: equal bytes give equal numbers, to the last bit.
    assert cpu[0]["logprobs"] == gpu[0]["logprobs"] == without[1][0]["logprobs"]
    assert stats["cpu"]["hits"] == chunks
    payload = stats["cpu"]["bytes_written"]
    assert first["file"]["bytes_written"] == first["s3"]["bytes_written"] == payload
    assert kept["file"]["hits"] == kept["s3"]["hits"] == 0

    # Another process than a fork of the one before it has another hash seed, on which no key may depend.
    settings: dict[str, Any] = {"transfer": RECOMPUTING, "new_process": True, "env": moto.env, "times": PATIENT}
    file, stats = engine(tiers, asked, ["stats"], **settings)
    assert file[0] == cpu[0]
    assert (stats["file"]["hits"], stats["file"]["bytes_read"]) == (chunks, payload)
    assert (stats["s3"]["hits"], stats["cpu"]["bytes_written"]) == (0, 0)

    shutil.rmtree(tmp_path / "kv")
    s3_hit, stats = engine(tiers, asked, ["stats"], env=moto.env, times=PATIENT)
    assert s3_hit[0] == cpu[0]
    assert (stats["s3"]["hits"], stats["s3"]["bytes_read"]) == (chunks, payload)
    assert stats["file"]["hits"] == 0
    assert all(tier["corrupt"] == tier["failed"] == 0 for tier in stats.values())


def test_several_requests_at_once_are_exact_in_fp32(engine: Engine, prompts: list[list[int]], tmp_path: Path) -> None:
    """Chunks of two blocks, requests that share a beginning, loads that begin inside a chunk, and a reset. Last, what
    examples/offline.py asks, again after a restart."""
    options = {"dtype": "float32", "max_num_seqs": 4}
    tiers = {
        "blocks_per_chunk": 2,
        # Room for what is stored before the reset and for what is stored after it.
        "tiers": [{**CPU, "capacity": "512MiB"}, file_tier(tmp_path / "kv", "1GiB")],
    }
    asked = ["generate", prompts, 12]
    # Leaves one block of the prompt in the engine's own cache, so that a load begins at the chunk's second block.
    begin = ["generate", [prompt[: BLOCK + 5] for prompt in prompts], 1]
    (without,) = engine(None, asked, **options)
    offline = ["offline"]
    before = [asked, ["forget"], asked, ["forget"], begin, asked, offline, ["flush"]]
    cold, _, cpu, _, _, part, example, _, _, after_reset, stats = engine(
        tiers, *before, ["reset"], asked, ["stats"], **options
    )
    assert tokens(cold) == tokens(cpu) == tokens(part) == tokens(after_reset) == tokens(without)
    assert len({tuple(answer["tokens"]) for answer in cold}) == len(prompts), "equal answers to all would show nothing"
    chunk = 2 * BLOCK
    whole = [len(prompt) // chunk * chunk for prompt in prompts[:3]]
    for hit in (cpu, part):
        assert [answer["cached"] for answer in hit[:3]] == whole
        # What it shares with the third is the engine's own hit, and vLLM does not load less than a chunk behind it.
        assert hit[3]["cached"] >= chunk
    assert all(answer["cached"] < chunk for answer in after_reset[:2]), "a reset must forget every tier"
    assert stats["cpu"]["failed"] == stats["file"]["failed"] == stats["file"]["corrupt"] == 0

    # Then from files again, when their mover was killed, and when it is back.
    file, stats, _, _, all_lost, _, back, after, example_again = engine(
        tiers, asked, ["stats"], ["evict"], ["kill"], asked, ["evict"], asked, ["stats"], offline, **options
    )
    assert tokens(file) == tokens(all_lost) == tokens(back) == tokens(without)
    assert stats["file"]["hits"] > 0
    for hit in (file, back):
        assert [answer["cached"] for answer in hit[:3]] == whole
    assert after["file"]["deaths"] == 1
    assert after["file"]["hits"] >= 2 * stats["file"]["hits"]
    assert after["file"]["corrupt"] == after["file"]["missing"] == 0
    asked, cached, texts = zip(*example, strict=True)
    asked_again, cached_again, texts_again = zip(*example_again, strict=True)
    assert (asked_again, texts_again) == (asked, texts)
    assert 0 == cached[0] < chunk <= cached_again[0]


@pytest.mark.parametrize("heads", [4, pytest.param(1, marks=pytest.mark.slow)])
def test_ranks_share_rows(engine: Engine, two_ranks: dict[str, Any], tmp_path: Path, heads: int) -> None:
    """Of one head each rank holds a copy: it is stored once, and found by an engine with one rank, and the other way
    round. Only our connector sees that."""
    model = save_random("LlamaForCausalLM", tmp_path / "m", num_key_value_heads=heads, initializer_range=0.2)
    one: dict[str, Any] = {"path": model, "transfer": RECOMPUTING if heads == 1 else {}}
    two = one | two_ranks
    row = Geometry(1, 2 * 2 * BLOCK * 64 * 4)  # keys and values of a head in two layers in float32
    for place, (writer, reader) in (("kv-1", (two, one)), ("kv-2", (one, two))) if heads == 1 else [("kv", (two, two))]:
        tiers = {"tiers": [CPU, file_tier(tmp_path / place, "64MiB")]}
        cold, gpu, _, cpu, stored, _ = engine(tiers, ask(), ask(), ["forget"], ask(), ["stats"], ["flush"], **writer)
        file, found = engine(tiers, ask(), ["stats"], **reader)
        assert [answer[0]["cached"] for answer in (cold, gpu, cpu, file)] == [0, WHOLE, WHOLE, WHOLE]
        assert tokens(cold) == tokens(cpu) == tokens(file)
        assert gpu[0]["logprobs"] == cpu[0]["logprobs"]
        assert (stored["cpu"]["hits"], found["file"]["hits"]) == (CHUNKS, CHUNKS)
        assert heads > 1 or found["file"]["bytes_read"] == CHUNKS * row.row_bytes


LFM2 = {
    "num_hidden_layers": 4,
    "layer_types": ["conv", "full_attention", "conv", "full_attention"],
    "block_auto_adjust_ff_dim": False,
    "conv_dim": 256,
    "conv_dim_out": 256,
    "block_dim": 256,
    "block_ff_dim": 512,
}
GEMMA = {
    "num_hidden_layers": 6,
    "head_dim": 64,
    "sliding_window": 200,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
    "tie_word_embeddings": False,  # or it repeats the prompt's last token
}


@pytest.mark.parametrize(
    ("architecture", "fields", "least", "most"),
    [
        # Of six layers two attend to everything, four to the last 200 tokens: four whole chunks of the former, and of
        # each group of the others no more than its window needs.
        ("Gemma3ForCausalLM", GEMMA, 4 + 2, 3 * 4 - 1),
        # Of four layers two keep a state, of which vLLM keeps that at the end of a chunk, and no other block of the
        # chunk: one at the prompt's last boundary.
        ("Lfm2ForCausalLM", LFM2, 4 + 1, 4 + 1),
    ],
)
def test_layers_of_other_kinds_are_groups_of_their_own(
    engine: Engine, architecture: str, fields: dict[str, Any], least: int, most: int, *, tmp_path: Path
) -> None:
    model = save_random(architecture, tmp_path / "model", **fields)
    tiers = {"blocks_per_chunk": 2, "tiers": [CPU, file_tier(tmp_path / "kv", "64MiB")]}
    long = ask(0, 1100, 8)
    cold, gpu, _, cpu, _ = engine(tiers, long, long, ["forget"], long, ["flush"], path=model)
    file, stats = engine(tiers, long, ["stats"], path=model)
    assert [answer[0]["cached"] for answer in (cold, gpu, cpu, file)] == [0, 1024, 1024, 1024]
    assert tokens(cold) == tokens(gpu) == tokens(cpu) == tokens(file)
    assert gpu[0]["logprobs"] == cpu[0]["logprobs"] == file[0]["logprobs"]
    assert min(gpu[0]["logprobs"]) < -0.01, "a model that is sure of itself shows nothing"
    assert least <= stats["file"]["hits"] <= most
    assert stats["file"]["corrupt"] == stats["file"]["failed"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("connector", ["NixlTiersConnector", "OffloadingConnector"])
def test_a_hit_may_end_within_a_chunk(engine: Engine, tmp_path: Path, connector: str) -> None:
    """With `prefix_match_unit`, the first look-up of a prompt that is shorter than a chunk is of a chunk's tail. The
    engine's own hits of that kind are no oracle: on a CPU, vLLM 0.32 does not copy the state for them."""
    unit = 16
    settings: dict[str, Any] = {"prefix_match_unit": unit, "transfer": {"kv_connector": connector}}
    settings["path"] = save_random("Lfm2ForCausalLM", tmp_path / "model", **LFM2)
    long = ask(0, 700, 8)
    _, cold, _, cpu, stats = engine({"tiers": [CPU]}, ask(1, 100, 8), long, ["forget"], long, ["stats"], **settings)
    assert (cold[0]["cached"], cpu[0]["cached"]) == (0, 700 // unit * unit)
    assert tokens(cold) == tokens(cpu)
    assert cold[0]["logprobs"] == cpu[0]["logprobs"]
    assert min(cold[0]["logprobs"]) < -0.01, "a model that is sure of itself shows nothing"
    assert stats["cpu"]["failed"] == 0


@pytest.fixture(scope="module")
def other_model(small_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With other embeddings."""
    import torch
    from safetensors.torch import load_file, save_file

    other = shutil.copytree(small_model, tmp_path_factory.mktemp("models") / "other")
    file, name = other / "model.safetensors", "model.embed_tokens.weight"
    weights = load_file(file)
    order = torch.randperm(len(weights[name]), generator=torch.Generator().manual_seed(1))
    weights[name] = weights[name][order].clone()
    save_file(weights, file, metadata={"format": "pt"})
    return other


@pytest.mark.slow
@pytest.mark.parametrize(("how", "ranks"), [("load", 1), ("reload", 2)])
def test_no_answer_is_of_other_weights(
    engine: Engine,
    small_model: Path,
    other_model: Path,
    tmp_path: Path,
    request: pytest.FixtureRequest,
    *,
    how: str,
    ranks: int,
) -> None:
    """They are changed in place, and vLLM's own prefix cache is reset as callers do it: without the connector. What is
    stored is found by a later engine with the same weights, and by no other."""
    settings = {"max_num_seqs": 1, **(request.getfixturevalue("two_ranks") if ranks == 2 else {})}
    tiers = {"tiers": [CPU, files_tier(tmp_path / "kv", "64MiB")], "on_reset": "keep"}
    truth = engine(None, ask(0), ask(1), path=other_model, **settings)
    before, _, _, _, after, new, _, _, hit, fresh = engine(
        tiers,
        *(ask(0), ["flush"], ["change", how, str(other_model)], ["forget"]),
        *(ask(0), ask(1), ["flush"], ["forget"]),
        *(ask(0), ask(1)),
        path=small_model,
        transfer=RECOMPUTING,
        **settings,
    )
    assert before[0]["tokens"] != truth[0][0]["tokens"], "other weights must show"
    assert [tokens(after), tokens(new)] == [tokens(hit), tokens(fresh)] == [tokens(answer) for answer in truth]
    assert [after[0]["cached"], new[0]["cached"]] == [0, 0]
    assert [hit[0]["cached"], fresh[0]["cached"]] == [WHOLE, WHOLE], "what is of the new weights is stored and found"
    again, never = engine(tiers, ask(0), ask(1), path=small_model, transfer=RECOMPUTING, **settings)
    assert (again[0]["tokens"], again[0]["cached"]) == (before[0]["tokens"], WHOLE), "with the weights of before"
    assert never[0]["cached"] == 0


@pytest.mark.slow
@pytest.mark.parametrize(("transfer", "found"), [(RECOMPUTING, 1400 // BLOCK * BLOCK), ({}, 0)], ids=["ours", "vllms"])
def test_stale_blocks_of_vllms_own_cache_are_not_stored(
    engine: Engine, small_model: Path, other_model: Path, transfer: dict[str, Any], found: int
) -> None:
    """The caller has reset nothing: vLLM itself answers from KV of before, and computes upon it."""
    longer = ["generate", [ask(0)[1][0] + ask(1)[1][0]], 8]
    (truth,) = engine(None, longer, path=other_model)
    *_, stale, _, first, _, second, _, _, third, _, fourth = engine(
        {"tiers": [CPU]},
        *(ask(0), ["change", "reload", str(other_model)], longer, ["forget"], longer, ["forget"], longer),
        *(["reset"], ["forget"], longer, ["forget"], longer),
        path=small_model,
        transfer=transfer,
    )
    assert stale[0]["cached"] == WHOLE
    assert [first[0]["cached"], second[0]["cached"]] == [0, found]
    assert [third[0]["cached"], fourth[0]["cached"]] == [0, 1400 // BLOCK * BLOCK], "in doubt until a reset"
    assert [tokens(answer) for answer in (first, second, third, fourth)] == [tokens(truth)] * 4


def test_a_bad_configuration_ends_the_engine_with_its_sentence(engine: Engine, small_model: Path) -> None:
    s3 = {"type": "s3", "bucket": "bucket", "endpoint": "http://127.0.0.1:9", "capacity": "1GiB"}
    with pytest.raises(AssertionError) as raised:
        engine({"tiers": [CPU, s3]}, ["stats"], path=small_model, load_format="dummy")
    sentence = "storage tiers are refused unless model_id is set, because the weights are random (load_format dummy)"
    assert f"Error: {sentence}" in str(raised.value)


def test_router_of_a_real_engine_knows_what_locate_says(engine: Engine, small_model: Path, tmp_path: Path) -> None:
    """Chunks of two blocks, in a host that holds fewer than are stored, and files that do too; then a reset."""
    asked = [ask(31 * number, 650, 2) for number in range(4)]
    tiers = {
        "blocks_per_chunk": 2,
        "self_describing_kv_events": True,
        "tiers": [{"type": "cpu", "capacity": "4MiB"}, file_tier(tmp_path / "kv", "7MiB")],
    }
    _, _, first, *_, churned, _, _, reset, _, _, last = engine(
        tiers,
        *([asked[0], ["flush"], ["follow"]]),
        *([asked[1], ["flush"], asked[2], ["flush"], ["forget"], asked[1], asked[3], ["flush"], ["follow"]]),
        *([["reset"], ["flush"], ["follow"]]),
        *([asked[0], ["flush"], ["follow"]]),
        path=small_model,
        transfer=RECOMPUTING,
        block_size=32,
        max_num_seqs=1,
        kv_events_config={"endpoint": f"ipc://{tmp_path}/events"},
    )
    assert first == {"cpu, file": 10}
    assert churned.keys() >= {"cpu, file", "file", ""}, "host memory and files have evicted"
    assert reset == {"": 40}
    assert last == {"cpu, file": 10, "": 30}
