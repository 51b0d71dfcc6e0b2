"""One cell of the stress test: a real engine under random load, and every finished answer checked.

    python stress.py PLAN RESULT        both JSON files

Plan: {"model": path, "transfer": fields of KVTransferConfig, "settings": arguments of LLM, "seed": n, "requests": n,
"conversations": that are gone on with, "aborts", "resets": how likely before a step, "storm": resets in the end,
"faults": how likely each of Faults is, in the tier in "folder"; without these there are none,
"speed": the file that says how fast the tier loads (tests/support/slowed_file.py), and "speeds" to choose from; without
these the tier is as it is}. Result: counts, how many host rows are lost, and what is wrong of which request.

Requests are short, extend prefixes of others, and have far too little KV space, so that they preempt one another. The
answer of each is checked by an engine without tiers, which gets prompt and answer at once, alone: each token must be
the likeliest one after those before it, or within 1e-4 of it (a tie: with another batch, sums are made in another
order). Its log-probability must be the same, too, which shows wrong KV that changes no token.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nixl_tiers.store import TieredStore
from tests.support import inside, vllm_cpu
from tests.support.waiting import until_up

TIE = 1e-4
SAME = 1e-4  # without tiers it is some 1e-6
ALIVE = 12  # requests at a time
ANSWER = 24  # tokens at most
OTHER_SPEED = 0.02  # how likely before a step
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
            if time.monotonic() >= self._stopped[1]:
                self.end()
            return
        mover = self._coordinator.mover_pids[0]
        for kind, likely in self._kinds.items():
            if mover is not None and self._rng.random() < likely:
                self.counts[kind] += 1
                self._strike(kind, mover)
                return

    def end(self) -> None:
        """A mover that is stopped goes on."""
        if self._stopped is not None:
            with contextlib.suppress(ProcessLookupError):  # the supervisor has killed it
                os.kill(self._stopped[0], signal.SIGCONT)
            self._stopped = None

    def _strike(self, kind: str, mover: int) -> None:
        if kind == "flip":
            self._flip()
        elif kind == "kill":
            os.kill(mover, signal.SIGKILL)
        else:
            os.kill(mover, signal.SIGSTOP)
            self._stopped = mover, time.monotonic() + self._rng.uniform(0, STOPPED_S)

    def _flip(self) -> None:
        """A bit in one of FLIPPED rows, or in what has room for one."""
        row_bytes = self._coordinator.region.geometry.row_bytes
        for file in self._folder.rglob("slab-*.kv"):
            with file.open("r+b") as rows:
                for row in range(self._rng.randrange(FLIPPED), file.stat().st_size // row_bytes, FLIPPED):
                    at = row * row_bytes + self._rng.randrange(row_bytes)
                    (byte,) = os.pread(rows.fileno(), 1, at)
                    os.pwrite(rows.fileno(), bytes([byte ^ 1]), at)


def main(plan: dict[str, Any]) -> dict[str, Any]:
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
        counts["slower"] = int(stats["file"]["missed_slower"])
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
        if "speed" in plan and rng.random() < OTHER_SPEED:
            write_speed(plan["speed"], rng.choice(plan["speeds"]))
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


def write_speed(path: str, mb_per_s: float) -> None:
    """Atomically: the mover reads it at every load."""
    draft = Path(f"{path}.new")
    draft.write_text(str(mb_per_s))
    draft.replace(path)


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


if __name__ == "__main__":
    result = main(json.loads(Path(sys.argv[1]).read_text()))
    Path(sys.argv[2]).write_text(json.dumps(result))
