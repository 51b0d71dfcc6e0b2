"""Real vLLM on the CPU: the same tokens with tiers as without, and every hit from the tier that it should come from."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from tests.support import vllm_cpu
from tests.support.file_tier import file_tier
from tests.support.models import save_random
from tests.support.servers import MotoServer
from tests.support.times import PATIENT, patient_config

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

BLOCK = vllm_cpu.BLOCK_TOKENS
CPU = {"type": "cpu", "capacity": "256MiB"}
Engine = Callable[..., list[Any]]


@pytest.fixture(scope="module")
def model() -> Path:
    return vllm_cpu.build_model(vllm_cpu.cache_directory() / "model")


@pytest.fixture(scope="module")
def prompts(model: Path) -> list[list[int]]:
    """Four prompts of real text: about 550 tokens, the last two with the same beginning."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
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
    return [answer["tokens"] for answer in answers]


@pytest.mark.smoke
def test_one_prompt_through_every_tier(
    engine: Engine, prompts: list[list[int]], moto: MotoServer, tmp_path: Path
) -> None:
    """Cold, GPU, host memory; file in a new engine, while it waits for its turn; S3 in one without the files. bf16, one
    request at a time."""
    prompt = prompts[0]
    whole = len(prompt) // BLOCK * BLOCK
    ask = ["generate", [prompt], 16]
    s3 = {
        "type": "s3",
        "bucket": moto.make_bucket(f"engine-{os.getpid()}"),
        "endpoint": moto.endpoint,
        "capacity": "256MiB",
    }
    tiers = patient_config({"tiers": [CPU, file_tier(tmp_path / "kv", "256MiB"), s3]})

    without = engine(None, ask, ask)
    cold, gpu, _, cpu, stats, _, first = engine(
        tiers, ask, ask, ["forget"], ask, ["stats"], ["flush"], ["stats"], env=moto.env, times=PATIENT
    )
    assert tokens(cold) == tokens(gpu) == tokens(cpu) == tokens(without[0])
    assert (cold[0]["cached"], gpu[0]["cached"], cpu[0]["cached"]) == (0, whole, whole)
    # With the same part of the prompt cached, the same sums are made: equal bytes give equal numbers, to the last bit.
    assert cpu[0]["logprobs"] == gpu[0]["logprobs"] == without[1][0]["logprobs"]
    chunks = whole // BLOCK
    assert stats["cpu"]["hits"] == chunks
    payload = stats["cpu"]["bytes_written"]
    assert first["file"]["bytes_written"] == first["s3"]["bytes_written"] == payload

    # A prompt before it, of less than a block: while that computes, the other waits for its turn.
    queue = [["queue"], ["generate", [prompts[1][: BLOCK // 2], prompt], 16], ["turns"], ["stats"]]
    transfer = {"kv_connector": "NixlTiersConnector", "kv_load_failure_policy": "recompute"}
    # Another process than a fork of the one before it has another hash seed, on which no key may depend.
    settings: dict[str, Any] = {"transfer": transfer, "max_num_seqs": 1, "new_process": True, "times": PATIENT}
    _, file, (turn,), stats = engine(tiers, *queue, env=moto.env, **settings)
    assert turn.pop("computed") >= BLOCK // 2
    assert turn == {"arrival": ["file"] * chunks, "turn": ["cpu"] * chunks, "waits": False}
    assert file[1] == cpu[0]
    assert (stats["file"]["hits"], stats["file"]["bytes_read"]) == (chunks, payload)
    assert (stats["s3"]["hits"], stats["cpu"]["bytes_written"]) == (0, 0)

    shutil.rmtree(tmp_path / "kv")
    s3_hit, stats = engine(tiers, ask, ["stats"], env=moto.env, times=PATIENT)
    assert s3_hit[0] == cpu[0]
    assert (stats["s3"]["hits"], stats["s3"]["bytes_read"]) == (chunks, payload)
    assert stats["file"]["hits"] == 0
    assert all(tier["corrupt"] == tier["failed"] == 0 for tier in stats.values())


@pytest.mark.smoke
def test_after_a_reset_everything_is_computed_again(engine: Engine, small_model: Path, tmp_path: Path) -> None:
    prompt = [(7 * i * i + 3 * i) % 500 + 1 for i in range(700)]
    ask = ["generate", [prompt], 16]
    tiers = patient_config({"tiers": [CPU, file_tier(tmp_path / "kv", "64MiB")]})
    options: dict[str, Any] = {"path": small_model, "skip_tokenizer_init": True, "dtype": "float32", "times": PATIENT}
    cold, _, _, cpu, _, after, stats = engine(
        tiers, ask, ["flush"], ["forget"], ask, ["reset"], ask, ["stats"], **options
    )
    assert [answer[0]["cached"] for answer in (cold, cpu, after)] == [0, len(prompt) // BLOCK * BLOCK, 0]
    assert len(set(cold[0]["tokens"])) > 2, "a model that always repeats one token shows nothing"
    assert tokens(cold) == tokens(cpu) == tokens(after)
    assert stats["file"]["hits"] == stats["file"]["corrupt"] == 0


def test_several_requests_at_once_are_exact_in_fp32(engine: Engine, prompts: list[list[int]], tmp_path: Path) -> None:
    """Chunks of two blocks, requests that share a beginning, loads that begin inside a chunk, and a reset. Last, what
    examples/offline.py asks, again after a restart."""
    options = {"dtype": "float32", "max_num_seqs": 4}
    tiers = {
        "blocks_per_chunk": 2,
        # Room for what is stored before the reset and for what is stored after it.
        "tiers": [{**CPU, "capacity": "512MiB"}, file_tier(tmp_path / "kv", "1GiB")],
    }
    ask = ["generate", prompts, 12]
    # Leaves one block of the prompt in the engine's own cache, so that a load begins at the chunk's second block.
    begin = ["generate", [prompt[: BLOCK + 5] for prompt in prompts], 1]
    (without,) = engine(None, ask, **options)
    offline = ["offline"]
    before = [ask, ["forget"], ask, ["forget"], begin, ask, offline, ["flush"]]
    cold, _, cpu, _, _, part, example, _, _, after_reset, stats = engine(
        tiers, *before, ["reset"], ask, ["stats"], **options
    )
    assert tokens(cold) == tokens(cpu) == tokens(part) == tokens(after_reset) == tokens(without)
    assert len({tuple(answer["tokens"]) for answer in cold}) == len(prompts), "equal answers to all would show nothing"
    chunk = 2 * BLOCK
    for hit in (cpu, part):
        assert [answer["cached"] for answer in hit[:3]] == [len(prompt) // chunk * chunk for prompt in prompts[:3]]
        # What it shares with the third is the engine's own hit, and vLLM does not load less than a chunk behind it.
        assert hit[3]["cached"] >= chunk
    assert all(answer["cached"] < chunk for answer in after_reset[:2]), "a reset must forget every tier"
    assert stats["cpu"]["failed"] == stats["file"]["failed"] == stats["file"]["corrupt"] == 0

    # Then from files again, when their mover was killed, and when it is back.
    file, stats, _, _, all_lost, _, back, after, example_again = engine(
        tiers, ask, ["stats"], ["evict"], ["kill", 0], ask, ["evict"], ask, ["stats"], offline, **options
    )
    assert tokens(file) == tokens(all_lost) == tokens(back) == tokens(without)
    assert stats["file"]["hits"] > 0
    for hit in (file, back):
        assert [answer["cached"] for answer in hit[:3]] == [len(prompt) // chunk * chunk for prompt in prompts[:3]]
    assert after["file"]["deaths"] == 1
    assert after["file"]["hits"] >= 2 * stats["file"]["hits"]
    assert after["file"]["corrupt"] == after["file"]["missing"] == 0
    asked, cached, texts = zip(*example, strict=True)
    asked_again, cached_again, texts_again = zip(*example_again, strict=True)
    assert (asked_again, texts_again) == (asked, texts)
    assert 0 == cached[0] < chunk <= cached_again[0]


@pytest.mark.skipif(len(vllm_cpu.all_cores()) < 2, reason="two ranks need two cores")
def test_two_ranks_share_rows(engine: Engine, small_model: Path, tmp_path: Path) -> None:
    prompt = [(7 * i * i + 3 * i) % 500 + 1 for i in range(700)]
    ask = ["generate", [prompt], 16]
    tiers = {"tiers": [CPU, file_tier(tmp_path / "kv", "64MiB")]}
    cores = vllm_cpu.all_cores()
    options: dict[str, Any] = {
        "path": small_model,
        "skip_tokenizer_init": True,
        "dtype": "float32",
        "tensor_parallel_size": 2,
        "distributed_executor_backend": "mp",
        "env": {"VLLM_CPU_OMP_THREADS_BIND": f"{cores[0]}|{cores[1]}", "VLLM_CPU_KVCACHE_SPACE": "1"},
    }
    cold, gpu, _, cpu, _, _, file, stats = engine(
        tiers, ask, ask, ["forget"], ask, ["flush"], ["evict"], ask, ["stats"], **options
    )
    whole = len(prompt) // BLOCK * BLOCK
    assert len(set(cold[0]["tokens"])) > 2, "a model that always repeats one token shows nothing"
    assert tokens(cold) == tokens(cpu) == tokens(file)
    assert [answer[0]["cached"] for answer in (gpu, cpu, file)] == [whole] * 3
    assert gpu[0]["logprobs"] == cpu[0]["logprobs"] == file[0]["logprobs"]
    assert stats["file"]["hits"] == whole // BLOCK


@pytest.fixture
def windowed_model(tmp_path: Path) -> Path:
    """A Gemma with random weights: of its six layers two attend to everything, four to the last 200 tokens."""
    return save_random(
        "Gemma3ForCausalLM",
        tmp_path / "windowed",
        num_hidden_layers=6,
        head_dim=64,
        sliding_window=200,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"] * 2,
    )


def test_windowed_layers_are_groups_of_their_own(engine: Engine, windowed_model: Path, tmp_path: Path) -> None:
    prompt = [(7 * i * i + 3 * i) % 500 + 1 for i in range(1100)]
    ask = ["generate", [prompt], 8]
    tiers = {"blocks_per_chunk": 2, "tiers": [CPU, file_tier(tmp_path / "kv", "64MiB")]}
    options: dict[str, Any] = {"path": windowed_model, "skip_tokenizer_init": True, "dtype": "float32"}
    cold, gpu, _, cpu, _ = engine(tiers, ask, ask, ["forget"], ask, ["flush"], **options)
    file, stats = engine(tiers, ask, ["stats"], **options)
    assert [answer[0]["cached"] for answer in (cold, gpu, cpu, file)] == [0, 1024, 1024, 1024]
    assert tokens(cold) == tokens(gpu) == tokens(cpu) == tokens(file)
    assert gpu[0]["logprobs"] == cpu[0]["logprobs"] == file[0]["logprobs"]
    assert min(gpu[0]["logprobs"]) < -0.01, "a model that is sure of itself shows nothing"
    # Four whole chunks of the full-attention group; of each windowed group, no more than its window needs.
    assert 4 + 2 <= stats["file"]["hits"] < 3 * 4


@pytest.fixture
def recurrent_model(tmp_path: Path) -> Path:
    """An LFM2 with random weights: of its four layers two attend to everything, two keep a state."""
    return save_random(
        "Lfm2ForCausalLM",
        tmp_path / "recurrent",
        num_hidden_layers=4,
        layer_types=["conv", "full_attention", "conv", "full_attention"],
        block_auto_adjust_ff_dim=False,
        conv_dim=256,
        conv_dim_out=256,
        block_dim=256,
        block_ff_dim=512,
    )


def test_the_last_block_of_a_recurrent_layers_chunk_is_stored_and_loaded(engine: Engine, recurrent_model: Path) -> None:
    """vLLM keeps such a layer's state at the end of a chunk, and no other block of the chunk."""
    prompt = [(7 * i * i + 3 * i) % 500 + 1 for i in range(1100)]
    ask = ["generate", [prompt], 8]
    options: dict[str, Any] = {"path": recurrent_model, "skip_tokenizer_init": True, "dtype": "float32"}
    tiers = {"blocks_per_chunk": 2, "tiers": [CPU]}
    cold, gpu, _, cpu, stats = engine(tiers, ask, ask, ["forget"], ask, ["stats"], **options)
    assert [answer[0]["cached"] for answer in (cold, gpu, cpu)] == [0, 1024, 1024]
    assert tokens(cold) == tokens(gpu) == tokens(cpu)
    assert gpu[0]["logprobs"] == cpu[0]["logprobs"]
    assert min(gpu[0]["logprobs"]) < -0.01, "a model that is sure of itself shows nothing"
    # Four chunks of the attending layers; of the recurrent ones the state at the prompt's last boundary.
    assert stats["cpu"]["hits"] == 4 + 1
    assert stats["cpu"]["failed"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("connector", ["NixlTiersConnector", "OffloadingConnector"])
def test_a_hit_may_end_within_a_chunk(engine: Engine, recurrent_model: Path, connector: str) -> None:
    """With `prefix_match_unit`, the first look-up of a prompt that is shorter than a chunk is of a chunk's tail. The
    engine's own hits of that kind are no oracle: on a CPU, vLLM 0.32 does not copy the state for them."""
    unit = 16
    prompts = [[(7 * i * i + 3 * i + n) % 500 + 1 for i in range(tokens)] for n, tokens in ((1, 100), (0, 700))]
    short, ask = (["generate", [prompt], 8] for prompt in prompts)
    options: dict[str, Any] = {
        "path": recurrent_model,
        "skip_tokenizer_init": True,
        "dtype": "float32",
        "prefix_match_unit": unit,
        "transfer": {"kv_connector": connector},
    }
    _, cold, _, cpu, stats = engine({"tiers": [CPU]}, short, ask, ["forget"], ask, ["stats"], **options)
    assert (cold[0]["cached"], cpu[0]["cached"]) == (0, 700 // unit * unit)
    assert tokens(cold) == tokens(cpu)
    assert cold[0]["logprobs"] == cpu[0]["logprobs"]
    assert min(cold[0]["logprobs"]) < -0.01, "a model that is sure of itself shows nothing"
    assert stats["cpu"]["failed"] == 0


@pytest.mark.parametrize(
    ("tiers", "settings", "sentence"),
    [
        ([{**CPU, "capacity": "64KiB"}], {}, "tiers[0].capacity: 64 KiB does not hold one chunk, which takes "),
        (
            [CPU, {"type": "s3", "bucket": "bucket", "endpoint": "http://127.0.0.1:9", "capacity": "1GiB"}],
            {"load_format": "dummy"},
            "storage tiers are refused unless model_id is set, because the weights are random (load_format dummy)",
        ),
    ],
    ids=["capacity", "weights"],
)
def test_a_bad_configuration_ends_the_engine_with_its_sentence(
    engine: Engine, small_model: Path, tiers: list[Any], settings: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(AssertionError) as raised:
        engine({"tiers": tiers}, ["stats"], path=small_model, skip_tokenizer_init=True, **settings)
    assert f"Error: {sentence}" in str(raised.value)


def test_router_of_a_real_engine_knows_what_locate_says(engine: Engine, small_model: Path, tmp_path: Path) -> None:
    """Chunks of two blocks, in a host that holds fewer than are stored, and files that do too; then a reset."""
    ask = [["generate", [[(7 * i * i + 3 * i + 31 * number) % 500 + 1 for i in range(650)]], 2] for number in range(4)]
    cpu = {"type": "cpu", "capacity": "4MiB"}
    tiers = {
        "blocks_per_chunk": 2,
        "self_describing_kv_events": True,
        "tiers": [cpu, file_tier(tmp_path / "kv", "7MiB")],
    }
    settings = {
        "path": small_model,
        "transfer": {"kv_connector": "NixlTiersConnector", "kv_load_failure_policy": "recompute"},
        "skip_tokenizer_init": True,
        "dtype": "float32",
        "block_size": 32,
        "max_num_seqs": 1,
        "kv_events_config": {name: f"ipc://{tmp_path}/{name}" for name in ("endpoint", "replay_endpoint")},
    }
    _, _, first, *_, churned, _, _, reset, _, _, last = engine(
        tiers,
        *([ask[0], ["flush"], ["follow"]]),
        *([ask[1], ["flush"], ask[2], ["flush"], ["forget"], ask[1], ask[3], ["flush"], ["follow"]]),
        *([["reset"], ["flush"], ["follow"]]),
        *([ask[0], ["flush"], ["follow"]]),
        **settings,
    )
    assert first == {"cpu, file": 10}
    assert churned.keys() >= {"cpu, file", "file", ""}, "host memory and files have evicted"
    assert reset == {"": 40}
    assert last == {"cpu, file": 10, "": 30}
