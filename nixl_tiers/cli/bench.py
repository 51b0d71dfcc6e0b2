"""`nixl-tiers bench URL`: prompts that share prefixes, asked of a running server, by where their KV cache came from."""

from __future__ import annotations

import http.client
import json
import random
import secrets
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field
from math import ceil
from pathlib import Path
from time import perf_counter
from typing import Annotated, Any, Final
from urllib.parse import urlsplit

import typer

from nixl_tiers.cli import FAILED, OK
from nixl_tiers.cli.completions import Answer, Client, Refused
from nixl_tiers.cli.output import InputError, Json, print_json, print_table, progress
from nixl_tiers.cli.scrape import NoAnswer, Sample, address_of, scrape
from nixl_tiers.cli.sources import CACHED, COMPUTED, Counters
from nixl_tiers.cli.ttft_plot import plot

ANSWER_S: Final = 600.0
USUAL_TOKENS: Final = 4096
SUFFIX_TOKENS: Final = 32
OUTPUT_TOKENS: Final = 8
WORDS: Final = range(100, 10_000)  # token ids that any vocabulary has
UNKNOWN: Final = "unknown"
"""The server does not say how many tokens were cached."""


@dataclass(frozen=True)
class Request:
    """One answer. `tokens`: of its prompt, by source, where the server's counters told it."""

    source: str
    ttft_s: float
    total_s: float
    prompt_tokens: int
    tokens: Mapping[str, float]

    @classmethod
    def of(cls, answer: Answer, tokens: Mapping[str, float]) -> Request:
        """`source`: of most of its tokens."""
        cached = answer.cached_tokens
        if tokens:
            source = max(tokens, key=lambda each: tokens[each])
        else:
            source = UNKNOWN if cached is None else CACHED if 2 * cached >= answer.prompt_tokens else COMPUTED
        return cls(source, answer.ttft_s, answer.total_s, answer.prompt_tokens, tokens)


@dataclass
class Round:
    requests: list[Request] = field(default_factory=list)
    seconds: float = 0.0


@dataclass(frozen=True)
class Load:
    """What is asked for. The same seed means the same prefixes."""

    model: str
    prefixes: int
    rounds: int
    tokens: int
    at_once: int
    seed: int

    def prompts(self) -> Iterator[list[int]]:
        """Of one round: each prefix, in the same order, with an end of its own."""
        for prefix in range(self.prefixes):
            start = random.Random(f"{self.seed} {prefix}").choices(WORDS, k=self.tokens)
            yield start + random.choices(WORDS, k=SUFFIX_TOKENS)


def bench(
    url: Annotated[str, typer.Argument(metavar="URL", help="A vLLM server, as http://HOST:PORT.")],
    *,
    model: Annotated[str | None, typer.Option(metavar="NAME", help="By default the first that it serves.")] = None,
    prefixes: Annotated[int, typer.Option(min=1, help="How many prefixes prompts share.")] = 8,
    rounds: Annotated[int, typer.Option(min=1, help="How often each of them is asked for.")] = 3,
    tokens: Annotated[
        int | None,
        typer.Option(min=1, help=f"Of each prefix. By default {USUAL_TOKENS}, or as many as the model takes."),
    ] = None,
    at_once: Annotated[
        int, typer.Option(min=1, help="Requests at a time. With several, only computed and cached are told apart.")
    ] = 1,
    seed: Annotated[
        int | None,
        typer.Option(help="Of the prefixes. The same again hits, also after a restart. By default new ones."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Write bench.json and, with matplotlib, ttft.png there.")
    ] = None,
    as_json: Json = False,
) -> int:
    """Ask a running vLLM server for prompts that share prefixes, and say how long first tokens took, by where most of
    the KV cache came from: computed, vLLM's own cache (gpu), or a tier. Also requests a second.

    Each round asks for every prefix once, in the same order, with a new end. What comes from a tier is what vLLM's own
    cache has no room for: ask for more prefixes than it holds. The server should have nothing else to do meanwhile. A
    key for it is taken from OPENAI_API_KEY.

    Exit code: 0; 1 if the server does not answer, is not vLLM, or fails, and what was measured until then is printed; 2
    wrong input.
    """
    parts = urlsplit(address_of(url))
    base = f"{parts.scheme}://{parts.netloc}"
    if out is not None:
        try:
            out.mkdir(parents=True, exist_ok=True)
        except OSError as problem:
            raise InputError(f"--out: {out} cannot be made ({problem.strerror})") from None
    done: list[Round] = []
    error = ""
    try:
        page = scrape(base)
        client = Client(base, ANSWER_S)
        name, most = _model(client, base, model)
        wanted = min(USUAL_TOKENS, most) if tokens is None else tokens
        if not 0 < wanted <= most:
            raise InputError(f"--tokens: {name} takes prefixes of at most {most} tokens")
        load = Load(name, prefixes, rounds, wanted, at_once, secrets.randbits(32) if seed is None else seed)
        counters = Counters(base)
        counters.added_by(client.complete(name, random.choices(WORDS, k=SUFFIX_TOKENS), 2))  # first uses are slow
        with progress("asking", rounds * prefixes) as bar:
            for _ in range(rounds):
                done.append(Round())
                for _ in _ask(client, counters, load, done[-1]):
                    bar.advance(bar.tasks[0].id)
    except KeyboardInterrupt:
        error = "stopped before all was asked for"
    except (NoAnswer, Refused) as problem:
        error = str(problem)
    except (OSError, http.client.HTTPException, ValueError) as problem:
        if isinstance(problem, InputError):
            raise
        error = f"{base} does not answer any more: {problem}"
    if any(each.requests for each in done):
        found = _summary(load, done, _own_room(page)) | {"error": error or None}
        if as_json:
            print_json(found)
        else:
            _print(found)
        if out is not None:
            _write(found, out)
    if error:
        typer.echo(f"nixl-tiers: {error}", err=True)
    return FAILED if error else OK


def _model(client: Client, base: str, wanted: str | None) -> tuple[str, int]:
    """Its name, and how many tokens a prefix may have. Raises InputError."""
    served: list[dict[str, Any]] = client.call("GET", "/v1/models").get("data") or []
    names = [str(each["id"]) for each in served]
    if not names or (wanted is not None and wanted not in names):
        raise InputError(
            f"--model: {base} serves {', '.join(names) or 'no model'}" + (f", not {wanted}" if wanted else "")
        )
    chosen = served[0 if wanted is None else names.index(wanted)]
    return str(chosen["id"]), int(chosen.get("max_model_len") or 1 << 20) - SUFFIX_TOKENS - OUTPUT_TOKENS


def _ask(client: Client, counters: Counters, load: Load, into: Round) -> Iterator[None]:
    """One round, an item an answer. With one request at a time the counters tell where its tokens came from."""
    if load.at_once == 1:
        for prompt in load.prompts():
            answer = client.complete(load.model, prompt, OUTPUT_TOKENS)
            into.seconds += answer.total_s
            into.requests.append(Request.of(answer, {}))
            into.requests[-1] = Request.of(answer, counters.added_by(answer))
            yield
        return
    begun = perf_counter()
    pool = ThreadPoolExecutor(load.at_once)
    try:
        asked = [pool.submit(client.complete, load.model, prompt, OUTPUT_TOKENS) for prompt in load.prompts()]
        for done in as_completed(asked):
            into.requests.append(Request.of(done.result(), {}))
            into.seconds = perf_counter() - begun
            yield
    finally:
        pool.shutdown(cancel_futures=True)


def _summary(load: Load, done: Sequence[Round], own_room: int) -> dict[str, Any]:
    by_source: dict[str, list[float]] = {}
    for request in (request for each in done for request in each.requests):
        by_source.setdefault(request.source, []).append(request.ttft_s)
    return {
        "load": asdict(load) | {"prompt_tokens": load.tokens + SUFFIX_TOKENS},
        "own_cache_tokens": own_room,
        "sources": {
            source: {
                "requests": len(times),
                "ttft_p50_s": percentile(times, 0.5),
                "ttft_p99_s": percentile(times, 0.99),
            }
            for source, times in sorted(by_source.items(), key=lambda item: item[0] != COMPUTED)
        },
        "requests_per_s": [len(each.requests) / each.seconds for each in done if each.requests],
        "rounds": [[asdict(request) for request in each.requests] for each in done],
    }


def _title(found: Mapping[str, Any]) -> str:
    load = found["load"]
    prompts = f"prompts of {load['prompt_tokens']:,} tokens, {load['prefixes']} prefixes"
    return f"{load['model']}, {prompts}, {load['at_once']} at a time, seed {load['seed']}"


def _print(found: Mapping[str, Any]) -> None:
    print(_title(found))
    rows = [
        (source, numbers["requests"], f"{numbers['ttft_p50_s']:.3f} s", f"{numbers['ttft_p99_s']:.3f} s")
        for source, numbers in found["sources"].items()
    ]
    print_table(["from", "requests", "first token, p50", "p99"], rows)
    print(f"requests a second, round by round: {', '.join(f'{rate:.2f}' for rate in found['requests_per_s'])}")
    load, room = found["load"], found["own_cache_tokens"]
    if found["sources"].keys() <= {COMPUTED, CACHED, "gpu"} and room >= load["prefixes"] * load["prompt_tokens"]:
        print(f"vLLM's own cache has room for all of it ({room:,} tokens): more --prefixes ask the tiers")


def _write(found: Mapping[str, Any], out: Path) -> None:
    (out / "bench.json").write_text(json.dumps(found, indent=1) + "\n")
    sources = found["sources"]
    try:
        plot(
            out / "ttft.png",
            title="Time to the first token, median",
            names=list(sources),
            seconds=[numbers["ttft_p50_s"] for numbers in sources.values()],
            texts=[f"{each['ttft_p50_s']:.3f} s   p99 {each['ttft_p99_s']:.3f} s" for each in sources.values()],
            caption=_title(found),
        )
    except ModuleNotFoundError:
        typer.echo(f"nixl-tiers: without matplotlib there is no picture, only {out / 'bench.json'}", err=True)


def _own_room(page: Sequence[Sample]) -> int:
    """Tokens that fit into vLLM's own cache, as it says of its engines."""
    infos = [sample.labels for sample in page if sample.name == "vllm:cache_config_info"]
    sizes = [(labels.get("num_gpu_blocks", ""), labels.get("block_size", "")) for labels in infos]
    return sum(int(blocks) * int(block) for blocks, block in sizes if blocks.isdigit() and block.isdigit())


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that as many are not above."""
    return sorted(values)[ceil(share * len(values)) - 1]
