"""Random load, aborts, resets and preemptions on real engines: no answer may differ from that of the model alone.

`make test` runs a few cells that a seed chooses, `make stress` runs all of them for long. STRESS_SEED=n has the cells
and the load of a run again, though not the times at which copies end.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import pytest

pytest.importorskip("vllm")

from tests.support import vllm_cpu
from tests.support.file_tier import file_tier
from tests.support.models import save_random

pytestmark = [pytest.mark.vllm]

SEED = int(os.environ.get("STRESS_SEED", random.SystemRandom().randrange(1 << 32)))
CONNECTORS = {"OffloadingConnector": vllm_cpu.kv_transfer, "NixlTiersConnector": vllm_cpu.recomputing_transfer}


class Cell(NamedTuple):
    connector: str
    model: str
    blocks: int
    """Of a chunk."""
    priced: bool = False
    """Whether loads are: then NixlTiersConnector promotes at arrival, too."""
    faults: bool = False
    """Whether the tier's mover is killed and stopped, and its rows rot."""

    def __str__(self) -> str:
        return f"{self.connector}-{self.model}-{self.blocks}{'-priced' * self.priced}{'-faults' * self.faults}"


PLAIN = list(product(("full", "windowed"), (1, 2)))
THEIRS = [Cell("OffloadingConnector", *cell) for cell in PLAIN]
OURS = [Cell("NixlTiersConnector", *cell) for cell in PLAIN]
PRICED = [Cell("NixlTiersConnector", *cell, priced=True) for cell in (PLAIN[0], PLAIN[3])]
FAULTY = [Cell("NixlTiersConnector", *cell, faults=True) for cell in (PLAIN[0], PLAIN[3])]
FAULTS = {"kill": 0.002, "stop": 0.002, "flip": 0.01}  # before a step
PREFILL = 4000  # tokens a second, as a priced cell is told: a block of 32 takes 8 ms, its row 28 ms at 1 MB/s
SPEEDS = (0, 1, 1)  # of the slowed tier, in MB/s; 0: as fast as the disk
SLOWER_EVERY = 10  # requests for a declined row, at least
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "full": ("LlamaForCausalLM", {}),
    # Windows that a request soon leaves behind, so that its first blocks are others' while it still runs.
    "windowed": (
        "Gemma3ForCausalLM",
        {
            "sliding_window": 16,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
            "initializer_range": 0.2,  # with 0.3 it is sure of one token, and other KV hardly shows
        },
    ),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    place = tmp_path_factory.mktemp("stress-models")
    tiny = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "initializer_range": 0.3,
    }
    return {name: save_random(kind, place / name, **tiny | fields) for name, (kind, fields) in MODELS.items()}


@pytest.fixture
def run_cell(models: dict[str, Path], run_script: Callable[..., Any], tmp_path: Path) -> Callable[..., None]:
    def run(cell: Cell, requests: int, seed: int, *, storm: int = 50) -> None:
        model, blocks, priced, faults = cell[1:]
        rng = random.Random(seed)
        tiers = [
            {"type": "cpu", "capacity": rng.choice(["2MiB", "8MiB"])},
            file_tier(tmp_path / "kv", "64MiB"),
        ]
        options: dict[str, Any] = {
            "offload_prompt_only": rng.random() < 0.5,
            "on_reset": rng.choice(["new_epoch", "new_epoch", "keep"]),
        }
        shows = ["finished", "hits", "aborts", "resets", "preempted"]
        speed = tmp_path / "speed"
        if priced:
            speed.write_text("1")
            tiers[0]["capacity"] = "1MiB"
            tiers[1] |= {"type": "tests.support.slowed_file:SlowedFileConfig", "speed": str(speed)}
            options |= {"prefill_tokens_per_s": PREFILL, "on_reset": "keep"}
            shows += ["at_arrival", "promoted"]
        plan = {
            "model": str(models[model]),
            "transfer": CONNECTORS[cell.connector](tiers, blocks_per_chunk=blocks, **options),
            "settings": {
                "max_model_len": 512,
                "block_size": 32,
                "num_gpu_blocks_override": {"full": 28, "windowed": 48}[model],
                "max_num_batched_tokens": 128,
                "max_num_seqs": 8,
            },
            "seed": seed,
            "requests": requests,
            "storm": storm,
            "conversations": 3,
            "aborts": 0.02,
            # In doubt, vLLM's own connector has no chunks of several blocks stored.
            "resets": 0.02 if blocks == 1 else 0.015,
        }
        if priced:  # what is loaded has been evicted from host memory before
            plan |= {"speed": str(speed), "speeds": SPEEDS, "conversations": 16, "resets": 0.003}
        if faults:  # what is loaded has been evicted from host memory before
            tiers[0]["capacity"] = "1MiB"
            plan |= {"faults": FAULTS, "folder": str(tmp_path / "kv"), "conversations": 16, "resets": 0.003}
            shows += [*FAULTS]
        print(f"STRESS_SEED={SEED}: {cell}, {options}, host of {tiers[0]['capacity']}")
        # One core: this model's sums are so small that threads would only wait for each other.
        env = {"VLLM_CPU_OMP_THREADS_BIND": str(vllm_cpu.cores()[-1])}
        result = run_script("stress.py", plan, env, 12 * requests, new_process=True)
        print(result)
        assert result["wrong"] == []
        assert result["lost"] == 0
        missing = [name for name in shows if not result.get(name)]
        assert not missing, "a load without these shows nothing"
        assert not priced or result["slower"] >= requests // SLOWER_EVERY, "the tier was hardly ever declined"

    return run


@pytest.mark.timeout(2000)
@pytest.mark.parametrize("number", range(2))
def test_answers_equal_those_without_tiers(number: int, run_cell: Callable[..., None]) -> None:
    run_cell(random.Random(SEED).sample([*THEIRS, *OURS], 2)[number], 150, SEED + number)


@pytest.mark.stress
@pytest.mark.timeout(7200)
@pytest.mark.parametrize(("number", "cell"), list(enumerate([*OURS, *PRICED, *FAULTY, *THEIRS])), ids=str)
def test_all_answers_equal_those_without_tiers(number: int, cell: Cell, run_cell: Callable[..., None]) -> None:
    run_cell(cell, 500, SEED + number, storm=1000)
