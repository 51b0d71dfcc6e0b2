"""`nixl-tiers plan MODEL [CONFIG]`: how large a model's KV cache is, what tiers hold, and which are fast enough."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Annotated, Final

import typer

from nixl_tiers.base.chunk import Geometry
from nixl_tiers.base.kv_bytes import DTYPES, Kv, UnknownKv, kv_of
from nixl_tiers.cli import OK
from nixl_tiers.cli.checks import tiers
from nixl_tiers.cli.checks.finding import Status
from nixl_tiers.cli.checks.trial import NAME
from nixl_tiers.cli.model_config import read_config
from nixl_tiers.cli.output import InputError, Json, print_json, print_table, progress
from nixl_tiers.config import schema
from nixl_tiers.config.schema import FileConfig, S3Config, StorageConfig, TiersConfig, format_size, parse_size
from nixl_tiers.core.rows import CPU

CHUNK_TOKENS: Final = 64  # of NixlTiersConnector
BLOCK: Final = 16  # of vLLM; a chunk where layers have windows
PROMPT: Final = 7000  # tokens of the prompt that is judged by
STEP_S: Final = 0.04  # that a hit still takes, for its last token: measured on one H100, 7.2B parameters (docs: sizing)
EXAMPLES: Final = tuple(parse_size(size) for size in ("64GiB", "256GiB", "1TiB", "4TiB", "16TiB"))
FROM_THE_LOG: Final = (
    'take it from the log of an engine that runs it ("nixl_tiers: cpu tier, 64 GiB: 363 rows of 2.816 MiB")'
)


@dataclass(frozen=True)
class Plan:
    """A model's KV cache on `ranks` tensor-parallel ranks, in chunks of `chunk` tokens, each a row of every KV group of
    vLLM's. `prefill`: tokens/s, 0: not known."""

    kv: Kv
    ranks: int
    chunk: int
    prefill: float

    @property
    def row(self) -> Geometry:
        cells = self.ranks // self.kv.copies(self.ranks)
        _, layers = self.kv.groups
        return Geometry(cells, layers * self.kv.layer_bytes * self.chunk // cells)

    def tokens(self, capacities: Iterable[int]) -> int:
        groups, _ = self.kv.groups
        return sum(capacity // self.row.row_bytes for capacity in capacities) // groups * self.chunk

    @property
    def break_even(self) -> tuple[float, float]:
        """Bytes/s: for very long prompts, of which windows and the one step of a hit are a small part, and for one of
        PROMPT tokens; infinite where computing it takes no longer than that step."""
        full, window = self.kv.full * self.kv.layer_bytes, self.kv.windowed * self.kv.layer_bytes
        spared_s = PROMPT / self.prefill - STEP_S if self.prefill else 0.0
        nbytes = full * PROMPT + window * min(PROMPT, self.kv.window)
        return full * self.prefill, nbytes / spared_s if spared_s > 0 else math.inf

    def verdict(self, measured: Sequence[float], place: str) -> str:
        """Of a tier that each engine loads from at these rates (bytes/s), one a measurement."""
        least, rate, most = min(measured), median(measured), max(measured)
        said, (low, high) = f"{_gb(rate)} GB/s", self.break_even
        if not self.prefill:
            return f"{said}: pays while the engine computes fewer than {rate / self.kv.token_bytes:,.0f} tokens/s"
        if near := [edge for edge in (low, high) if least < edge <= most]:
            spread = f"{_gb(least)} to {_gb(most)} in {len(measured)} measurements"
            return f"{said} ({spread}) beside {_gb(near[0])}: too close to call"
        if rate >= high:
            return f"{said} is above {_gb(high)}: hits are loaded"
        if rate >= low:
            return f"{said} is above {_gb(low)}: prompts of more than {self._least_tokens(rate):,.0f} tokens are loaded"
        return f"{said} is below {_gb(low)}: {place} will not be loaded from"

    def _least_tokens(self, rate: float) -> float:
        """From how many tokens on a prompt is loaded sooner than it is computed."""
        each_s, window = 1 / self.prefill, self.kv.windowed * self.kv.layer_bytes
        within = each_s - self.kv.token_bytes / rate
        if within > 0 and (tokens := STEP_S / within) <= (self.kv.window or math.inf):
            return tokens
        beyond = each_s - self.kv.full * self.kv.layer_bytes / rate
        return (STEP_S + window * self.kv.window / rate) / beyond if beyond > 0 else math.inf


@dataclass
class Tier:
    """A line of the table. `read_bytes_per_s`: as doctor measures it, None if it was not."""

    name: str
    capacity: int
    tokens: int
    read_bytes_per_s: float | None = None
    verdict: str = ""


def plan(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="A directory, a config.json, or a name in the hub's cache here.")
    ],
    config: Annotated[
        str | None, typer.Argument(help="As for `nixl-tiers config`: its tiers are tried.", metavar="[CONFIG]")
    ] = None,
    *,
    tp: Annotated[int, typer.Option(min=1, help="Tensor-parallel size.")] = 1,
    kv_dtype: Annotated[
        str, typer.Option(metavar="TYPE", help=f"As vLLM's --kv-cache-dtype: {', '.join(DTYPES)}.")
    ] = DTYPES[0],
    prefill: Annotated[
        float, typer.Option(min=0, metavar="TOKENS", help="What the engine computes a second; 0: not known.")
    ] = 0,
    chunk: Annotated[
        int | None, typer.Option(min=1, metavar="TOKENS", help="Of a chunk; by default as with NixlTiersConnector.")
    ] = None,
    as_json: Json = False,
) -> int:
    """Say how many bytes of KV cache a token of this model has, how many tokens tiers hold, and how fast a tier has to
    be, so that loading is faster than computing.

    With a configuration every storage tier is tried as by `nixl-tiers doctor`, on rows of this model's size (at most
    256 MiB, which are deleted). Nothing is downloaded.

    Of models whose KV cache is not known (recurrent layers, kinds that were not compared with vLLM) it says so, with
    exit code 2, instead of a number.
    """
    if kv_dtype not in DTYPES:
        raise InputError(f"--kv-dtype: the bytes of {kv_dtype} are not known here: {FROM_THE_LOG}")
    try:
        kv = kv_of(read_config(model), kv_dtype)
    except UnknownKv as error:
        raise InputError(f"{model}: {error}: {FROM_THE_LOG}") from None
    made = Plan(kv, tp, chunk or (BLOCK if kv.window else CHUNK_TOKENS), prefill)
    try:
        made.kv.copies(tp)
    except ValueError as error:
        raise InputError(f"--tp: {error}") from None
    given = schema.load(config) if config is not None else None
    lines = _tried(made, given) if given else [Tier("", each, made.tokens([each])) for each in EXAMPLES]
    if as_json:
        _print_json(made, lines)
    else:
        _print(made, lines)
    return OK


def _tried(made: Plan, given: TiersConfig) -> list[Tier]:
    host = Tier(CPU, given.cpu.capacity, made.tokens([given.cpu.capacity]))
    host.verdict = "not tried: it is loaded from as fast as the GPU's link copies"
    lines = [host]
    with tempfile.TemporaryDirectory(prefix="nixl-tiers-plan-") as scratch, progress("", len(given.storage)) as bar:
        for name, tier in zip(given.names, given.storage, strict=True):
            bar.update(bar.tasks[0].id, description=name)
            lines.append(Tier(name, tier.capacity, made.tokens(member.capacity for member in tier.members)))
            _try(made, tier, lines[-1], Path(scratch), given.replicas or 1)
            bar.advance(bar.tasks[0].id)
    return lines


def _try(made: Plan, tier: StorageConfig, line: Tier, scratch: Path, replicas: int) -> None:
    """Its members are on drives of their own, whose rates add up."""
    rates: list[Sequence[float]] = []
    for member in tier.members:
        findings = [*tiers.examine(scratch, member, geometry=made.row)]
        trial = next((found for found in findings if found.name == NAME), None)
        if trial is None or "read_bytes_per_s" not in trial.details:
            why = trial or next((found for found in findings if found.status is Status.BROKEN), findings[-1])
            line.verdict = f"{'broken' if why.status is Status.BROKEN else 'not tried'}: {why.text}"
            return
        rates.append(trial.details["reads_bytes_per_s"])
    # What engines of this node read from one directory at once adds up to what one of them reads alone.
    engines = replicas if isinstance(tier, FileConfig) else 1
    measured = [sum(each) / engines for each in zip(*rates, strict=False)]
    line.read_bytes_per_s = median(measured) * engines
    place = (
        "this disk" if isinstance(tier, FileConfig) else "this bucket" if isinstance(tier, S3Config) else "this tier"
    )
    line.verdict = made.verdict(measured, place)
    if engines > 1:
        line.verdict = f"for each of {engines} replicas {line.verdict}"


def _print_json(made: Plan, lines: Sequence[Tier]) -> None:
    low, high = made.break_even
    print_json(
        {
            "bytes_per_token": made.kv.token_bytes,
            "windowed_bytes_per_token": made.kv.windowed * made.kv.layer_bytes,
            "window": made.kv.window,
            "rank_bytes_per_token": made.kv.token_bytes * made.kv.copies(made.ranks) // made.ranks,
            "chunk_tokens": made.chunk,
            "rows_per_chunk": made.kv.groups[0],
            "row_bytes": made.row.row_bytes,
            "break_even_bytes_per_s": {
                "long_prompts": low,
                f"prompts_of_{PROMPT}_tokens": high if math.isfinite(high) else None,
            }
            if made.prefill
            else None,
            "tiers": [vars(line) for line in lines],
        }
    )


def _print(made: Plan, lines: Sequence[Tier]) -> None:
    print("\n".join(_summary(made)), end="\n\n")
    columns = ("tier", "capacity", "tokens", "verdict") if lines[0].name else ("capacity", "tokens")
    rows = [(line.name, format_size(line.capacity), f"{line.tokens:,}", line.verdict) for line in lines]
    print_table(columns, rows if lines[0].name else [row[1:3] for row in rows])


def _summary(made: Plan) -> Iterator[str]:
    kv, copies = made.kv, made.kv.copies(made.ranks)
    yield f"{kv.token_bytes:,} bytes of KV cache a token, in {kv.full + kv.windowed} layers"
    if kv.windowed:
        yield f"{kv.windowed * kv.layer_bytes:,} of these bytes only of the last {kv.window:,} tokens (sliding windows)"
    if made.ranks > 1:
        alike = f"; {copies} of them hold the same, which is stored once" if copies > 1 else ""
        yield f"{kv.token_bytes * copies // made.ranks:,} bytes on each of {made.ranks} ranks{alike}"
    groups, _ = kv.groups
    each = "a row" if groups == 1 else f"{groups} rows, each"
    yield f"a chunk of {made.chunk} tokens: {each} of {format_size(made.row.row_bytes)}"
    if made.prefill:
        low, high = made.break_even
        usual = f"{_gb(high)} GB/s" if math.isfinite(high) else "none"
        yield (
            f"break-even at {made.prefill:,.0f} tokens/s: {usual} for prompts of {PROMPT:,} tokens, {_gb(low)} GB/s "
            "for very long ones; a slower tier is not loaded from"
        )


def _gb(rate: float) -> str:
    return f"{rate / 1e9:.1f}" if rate >= 1e9 else f"{rate / 1e9:.2g}"
