"""Random load, aborts, resets and preemptions on real engines: no answer may differ from that of the model alone.

`make test-all` runs a few cells that a seed chooses, `make stress` runs all of them for long. STRESS_SEED=n has the
cells and the load of a run again, though not the times at which copies end.

Requests are short, extend prefixes of others, and have far too little KV space, so that they preempt one another. The
answer of each is checked by an engine without tiers, which gets prompt and answer at once, alone: each token must be
the likeliest one after those before it, or within 1e-4 of it (a tie: with another batch, sums are made in another
order). Its log-probability must be the same, too, which shows wrong KV that changes no token.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Mapping
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from demo import vllm_cpu
from nixl_tiers.store import TieredStore
from tests.support import inside
from tests.support.file_tier import file_tier
from tests.support.models import save_random
from tests.support.waiting import until_up

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
PREFILL = 4000  # tokens a second, as a priced cell is told
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
def run_cell(models: dict[str, Path], run_apart: Callable[..., Any], tmp_path: Path) -> Callable[..., None]:
    def run(cell: Cell, requests: int, seed: int, *, storm: int = 50) -> None:
        model, blocks, priced, faults = cell[1:]
        rng = random.Random(seed)
        # What is loaded in priced cells, and with faults, has been evicted from host memory before.
        host = "1MiB" if priced or faults else rng.choice(["2MiB", "8MiB"])
        tiers = [{"type": "cpu", "capacity": host}, file_tier(tmp_path / "kv", "64MiB")]
        options: dict[str, Any] = {
            "offload_prompt_only": rng.random() < 0.5,
            "on_reset": rng.choice(["new_epoch", "new_epoch", "keep"]),
        }
        shows = ["finished", "hits", "aborts", "resets", "preempted"]
        if priced:
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
        if priced or faults:
            plan |= {"conversations": 16, "resets": 0.003}
        if faults:
            plan |= {"faults": FAULTS, "folder": str(tmp_path / "kv")}
            shows += [*FAULTS]
        print(f"STRESS_SEED={SEED}: {cell}, {options}, host of {host}")
        # One core: this model's sums are so small that threads would only wait for each other.
        env = {"VLLM_CPU_OMP_THREADS_BIND": str(vllm_cpu.cores()[-1])}
        result = run_apart(stress, plan, env, 12 * requests, new_process=True)
        print(result)
        assert result["wrong"] == []
        assert result["lost"] == 0
        missing = [name for name in shows if not result.get(name)]
        assert not missing, "a load without these shows nothing"

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


# --- in the process of the engine ---

TIE = 1e-4
SAME = 1e-4  # without tiers it is some 1e-6
ALIVE = 12  # requests at a time
ANSWER = 24  # tokens at most
STOPPED_S = 2.0  # at most
FLIPPED = 8  # of so many rows one
RESET_AGAIN = 0.1  # how likely before a step, after a reset in vain: until one succeeds, longer chunks are not stored


class Load:
    """Conversations that several requests go on with at once, each in its own way."""

    def __init__(self, rng: random.Random, longest: int, conversations: int) -> None:
        self._rng = rng
        self._longest = longest
        self._conversations: list[list[int]] = [[] for _ in range(conversations)]

    def prompt(self) -> list[int]:
        place = self._rng.randrange(len(self._conversations))
        prompt = self._conversations[place] + self._tokens(self._rng.randint(4, 120))
        if len(prompt) > self._longest:
            prompt = self._tokens(self._rng.randint(4, 200))
        if self._rng.random() < 0.3:
            self._conversations[place] = prompt
        return prompt

    def _tokens(self, count: int) -> list[int]:
        return [self._rng.randint(1, 500) for _ in range(count)]


class Faults:
    """What is done to the tier of an engine: its mover is killed, or stopped for a while, and bits of stored rows
    are flipped. `kinds`: how likely "kill", "stop" and "flip" are before a step. `folder`: of the tier."""

    def __init__(self, coordinator: Any, rng: random.Random, kinds: Mapping[str, float], folder: Path) -> None:
        self._coordinator, self._rng, self._kinds, self._folder = coordinator, rng, kinds, folder
        self._stopped: tuple[int, float] | None = None  # the mover, and when it goes on
        for backoff in coordinator._link.supervisor._backoff:
            backoff._backoff_s = (0.05,)  # or there is no mover for most of the time
        self.counts: Counter[str] = Counter()

    def before_step(self) -> None:
        if self._stopped is not None:
            return self.end() if time.monotonic() >= self._stopped[1] else None
        mover = self._coordinator.mover_pids[0]
        for kind, likely in self._kinds.items():
            if mover is not None and self._rng.random() < likely:
                self.counts[kind] += 1
                if kind == "flip":
                    return self._flip()
                os.kill(mover, signal.SIGKILL if kind == "kill" else signal.SIGSTOP)
                if kind == "stop":
                    self._stopped = mover, time.monotonic() + self._rng.uniform(0, STOPPED_S)
                return None
        return None

    def end(self) -> None:
        """A mover that is stopped goes on."""
        if self._stopped is not None:
            with contextlib.suppress(ProcessLookupError):  # the supervisor has killed it
                os.kill(self._stopped[0], signal.SIGCONT)
            self._stopped = None

    def _flip(self) -> None:
        """A bit in one of FLIPPED rows, or in what has room for one."""
        row_bytes = self._coordinator.region.geometry.row_bytes
        for file in self._folder.rglob("slab-*.kv"):
            with file.open("r+b") as rows:
                for row in range(self._rng.randrange(FLIPPED), file.stat().st_size // row_bytes, FLIPPED):
                    at = row * row_bytes + self._rng.randrange(row_bytes)
                    (byte,) = os.pread(rows.fileno(), 1, at)
                    os.pwrite(rows.fileno(), bytes([byte ^ 1]), at)


def stress(plan: dict[str, Any]) -> dict[str, Any]:
    """One cell: a real engine under random load, and every finished answer checked. Counts, how many host rows are
    lost, and what is wrong of which request."""
    settings = {"dtype": "float32", "skip_tokenizer_init": True, **plan["settings"]}
    llm = vllm_cpu.in_process_llm(Path(plan["model"]), plan["transfer"], **settings)
    try:
        manager = llm.llm_engine.engine_core.engine_core.scheduler.connector.connector_scheduler.manager
        store = TieredStore(manager._coordinator)
        until_up(store)
        promoted = count_promotions_at_arrival(store)
        faults = None
        if "faults" in plan:
            rng = random.Random(plan["seed"] + 1)
            faults = Faults(manager._coordinator, rng, plan["faults"], Path(plan["folder"]))
        answers, counted = drive(llm.llm_engine, plan, faults)
        counts: dict[str, Any] = dict(counted)
        counts["at_arrival"] = promoted["rows"]
        storm(llm.llm_engine, plan["storm"])
        counts["lost"] = lost_rows(store)
        stats = store.stats()
        counts["hits"] = int(sum(tier["hits"] for tier in stats.values()))
        counts["promoted"], counts["unused"] = int(stats["cpu"]["promoted"]), int(stats["cpu"]["unused"])
    finally:
        llm.llm_engine.engine_core.shutdown()
    alone = {**settings, "max_num_seqs": 1, "enable_prefix_caching": False, "num_gpu_blocks_override": None}
    judge = vllm_cpu.in_process_llm(Path(plan["model"]), None, **alone)
    try:
        return {**counts, **check(judge, answers)}
    finally:
        judge.llm_engine.engine_core.shutdown()


def count_promotions_at_arrival(store: TieredStore) -> Counter[str]:
    """Rows that are queued from now on for requests whose turn has not come."""
    line, counts = inside.promotion(store.coordinator._core).prefetch_queue, Counter[str]()
    advance = line._advance

    def counted(place: Any, now: float) -> bool:
        queued = sum(tier.rows_to_load for tier in line._state.tiers)
        advanced: bool = advance(place, now)
        counts["rows"] += sum(tier.rows_to_load for tier in line._state.tiers) - queued
        return advanced

    line._advance = counted  # type: ignore[method-assign]
    return counts


def lost_rows(store: TieredStore, patience_s: float = 30.0) -> int:
    """Host rows in use that hold nothing, once no mover has any in its hands (a busy machine may take a while)."""
    host, end_s = store.coordinator._core.host, time.monotonic() + patience_s
    while (lost := host.used - len(host.index)) and time.monotonic() < end_s:
        time.sleep(0.05)
    return lost


def drive(engine: Any, plan: dict[str, Any], faults: Faults | None) -> tuple[dict[str, Any], Counter[str]]:
    """Run the load to its end: prompt and output of each request that finished, and what happened."""
    from vllm import SamplingParams

    rng = random.Random(plan["seed"])
    # The judge takes prompt and answer as a prompt, and must be asked for one more token.
    load = Load(rng, plan["settings"]["max_model_len"] - ANSWER - 1, plan["conversations"])
    counts = Counter(dict.fromkeys(("requests", "finished", "aborts", "resets", "uncleared", "steps"), 0))
    scheduler = engine.engine_core.engine_core.scheduler
    requests: dict[str, Any] = {}
    prompts: dict[str, list[int]] = {}
    answers: dict[str, Any] = {}
    alive: list[str] = []
    cleared = True
    while counts["requests"] < plan["requests"] or alive:
        while len(alive) < ALIVE and counts["requests"] < plan["requests"] and rng.random() < 0.5:
            name = f"r{counts['requests']}"
            counts["requests"] += 1
            prompts[name] = load.prompt()
            answer = rng.randint(1, ANSWER)
            sampling = SamplingParams(temperature=0, max_tokens=answer, ignore_eos=True, logprobs=0, detokenize=False)
            engine.add_request(name, {"prompt_token_ids": prompts[name]}, sampling)
            alive.append(name)
        requests.update(scheduler.requests)
        if alive and rng.random() < plan["aborts"]:
            counts["aborts"] += 1
            alive.remove(aborted := rng.choice(alive))
            engine.abort_request([aborted])
        if rng.random() < (plan["resets"] if cleared else RESET_AGAIN):
            cleared = reset(engine, scheduler, rng)
            counts["resets"] += 1
            counts["uncleared"] += not cleared
        if faults is not None:
            faults.before_step()
        counts["steps"] += 1
        for output in engine.step():
            if output.finished and output.request_id in alive:
                counts["finished"] += 1
                alive.remove(output.request_id)
                answers[output.request_id] = (prompts[output.request_id], output.outputs[0])
    if faults is not None:
        faults.end()
        counts.update(faults.counts)
    counts["preempted"] = sum(request.num_preemptions > 0 for request in requests.values())
    return answers, counts


def reset(engine: Any, scheduler: Any, rng: random.Random) -> bool:
    """As vLLM does it to sleep, where all requests are preempted, or as its users may at any time.

    vLLM cannot preempt requests that load, and raises, having preempted the others without a reset; when these come
    back and hit in the very next step, an assertion of its own ends the engine. Returns whether vLLM's cache was reset.
    """
    preempt = not loading(scheduler) and rng.random() < 0.75
    return bool(engine.reset_prefix_cache(reset_running_requests=preempt, reset_connector=True))


def loading(scheduler: Any) -> bool:
    """Whether a request holds blocks that it does not run in."""
    running = {request.request_id for request in scheduler.running}
    managers = scheduler.kv_cache_manager.coordinator.single_type_managers
    return any(not running.issuperset(manager.req_to_blocks) for manager in managers)


def storm(engine: Any, resets: int) -> None:
    """Resets while a request's copies are in flight; vLLM up to 0.32 never reports their end."""
    from vllm import SamplingParams

    scheduler = engine.engine_core.engine_core.scheduler
    sampling = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True, detokenize=False)
    for number in range(resets + 2):  # the last two, without a reset, end what the others left
        tokens = [1 + (number + place) % 500 for place in range(70)]
        engine.add_request(f"storm{number}", {"prompt_token_ids": tokens}, sampling)
        for step in range(100):
            engine.step()
            if step == number % 3 and number < resets:
                engine.reset_prefix_cache(reset_running_requests=not loading(scheduler), reset_connector=True)
            if not engine.has_unfinished_requests():
                break
    engine.step()


def check(judge: Any, answers: dict[str, Any]) -> dict[str, Any]:
    """`off`: by how much the log-probabilities of right answers differ at most."""
    from vllm import SamplingParams

    wrong, ties, off = [], 0, 0.0
    sampling = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1, detokenize=False)
    for name, (prompt, output) in answers.items():
        tokens = list(output.token_ids)
        (judged,) = judge.generate([{"prompt_token_ids": prompt + tokens}], sampling, use_tqdm=False)
        known = judged.prompt_logprobs[len(prompt) :]
        right = [step[token].logprob for step, token in zip(known, tokens, strict=True)]
        behind = [max(entry.logprob for entry in step.values()) - p for step, p in zip(known, right, strict=True)]
        logprobs = [step[token].logprob for step, token in zip(output.logprobs, tokens, strict=True)]
        differs = max(abs(p - q) for p, q in zip(right, logprobs, strict=True))
        if max(behind) > TIE or differs > SAME:
            wrong.append({"request": name, "prompt": len(prompt), "behind": max(behind), "differs": differs})
        else:
            ties += any(gap > 0 for gap in behind)
            off = max(off, differs)
    return {"wrong": wrong, "ties": ties, "off": off}
