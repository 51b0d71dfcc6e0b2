"""`nixl-tiers plan MODEL [CONFIG]`: how large a model's KV cache is, what tiers hold, and which are fast enough."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final

import typer

from nixl_tiers.base.chunk import Geometry
from nixl_tiers.base.kv_bytes import DTYPES, Kv, UnknownKv, kv_of
from nixl_tiers.base.policies import Write
from nixl_tiers.cli import OK
from nixl_tiers.cli.checks import tiers
from nixl_tiers.cli.checks.finding import Status
from nixl_tiers.cli.checks.trial import NAME
from nixl_tiers.cli.model_config import read_config
from nixl_tiers.cli.output import InputError, Json, print_json, print_table, progress
from nixl_tiers.cli.trace import BLOCK_TOKENS, Prompt, read, replay
from nixl_tiers.config import schema
from nixl_tiers.config.schema import FileConfig, S3Config, StorageConfig, TiersConfig, format_size, parse_size
from nixl_tiers.core.rows import CPU

CHUNK_TOKENS: Final = 64  # of NixlTiersConnector
BLOCK: Final = 16  # of vLLM; a chunk where layers have windows
EXAMPLES: Final = tuple(parse_size(size) for size in ("64GiB", "256GiB", "1TiB", "4TiB", "16TiB"))
MONTH_S: Final = 30 * 86400
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
        """Bytes/s: for very long prompts, of which windows are a small part, and for those within a window."""
        return self.kv.full * self.kv.layer_bytes * self.prefill, self.kv.token_bytes * self.prefill

    def verdict(self, rate: float, place: str) -> str:
        """Of a tier that is loaded from at `rate` bytes/s."""
        said, (low, high) = f"{_gb(rate)} GB/s", self.break_even
        if not self.prefill:
            return f"{said}: pays while the engine computes fewer than {rate / self.kv.token_bytes:,.0f} tokens/s"
        if rate >= high:
            return f"{said} is above {_gb(high)}: hits are loaded"
        if rate > low:
            least = (high - low) * self.kv.window / (rate - low)
            return f"{said} is between {_gb(low)} and {_gb(high)}: prompts of more than {least:,.0f} tokens are loaded"
        return f"{said} is below {_gb(low)}: {place} will not be loaded from"


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
    new_tokens_per_s: Annotated[
        float, typer.Option(min=0, metavar="TOKENS", help="Prompt tokens that are computed, for S3's requests.")
    ] = 0,
    hit_rate: Annotated[
        float, typer.Option(min=0, max=0.999, metavar="SHARE", help="Of the prompt tokens, loaded from S3.")
    ] = 0,
    s3_prices: Annotated[
        tuple[float, float] | None, typer.Option(metavar="PUT GET", help="Of 1000 requests each, in any currency.")
    ] = None,
    trace: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Prompts in Mooncake's format: hits at other capacities.")
    ] = None,
    trace_block: Annotated[
        int, typer.Option(min=1, metavar="TOKENS", help="That an id in the trace stands for.")
    ] = BLOCK_TOKENS,
    as_json: Json = False,
) -> int:
    """Say how many bytes of KV cache a token of this model has, how many tokens tiers hold, and how fast a tier has to
    be, so that loading is faster than computing.

    With a configuration every storage tier is tried as by `nixl-tiers doctor`, on rows of this model's size (at most
    256 MiB, which are deleted). Nothing is downloaded.

    Of models whose KV cache is not known (recurrent layers, kinds that were not compared with vLLM) it says so, with
    exit code 2, instead of a number.
    """
    for option, is_given, base, has_base in (
        ("--hit-rate", hit_rate, "--new-tokens-per-s", new_tokens_per_s),
        ("--s3-prices", s3_prices, "--new-tokens-per-s", new_tokens_per_s),
        ("--trace-block", trace_block != BLOCK_TOKENS, "--trace", trace),
    ):
        if is_given and not has_base:
            raise InputError(f"{option}: says nothing without {base}")
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
    prompts = read(trace) if trace else []
    lines = _tried(made, given) if given else [Tier("", each, made.tokens([each])) for each in EXAMPLES]
    s3 = _requests(made, given, new_tokens_per_s, hit_rate, s3_prices) if new_tokens_per_s else None
    # Of a tier that is configured: half and twice its capacity, too.
    capacities = sorted({round(line.capacity * by) for line in lines for by in ((0.5, 1, 2) if given else (1,))})
    replayed = [*_replayed(made, prompts, capacities, trace_block)] if trace else None
    if as_json:
        _print_json(made, lines, s3, replayed)
    else:
        _print(made, lines, s3, replayed)
    return OK


def _tried(made: Plan, given: TiersConfig) -> list[Tier]:
    host = Tier(CPU, given.cpu.capacity, made.tokens([given.cpu.capacity]))
    host.verdict = "not tried: it is loaded from as fast as the GPU's link copies"
    lines = [host]
    with tempfile.TemporaryDirectory(prefix="nixl-tiers-plan-") as scratch, progress("", len(given.storage)) as bar:
        for name, tier in zip(given.names, given.storage, strict=True):
            bar.update(bar.tasks[0].id, description=name)
            lines.append(Tier(name, tier.capacity, made.tokens(member.capacity for member in tier.members)))
            _try(made, tier, lines[-1], Path(scratch))
            bar.advance(bar.tasks[0].id)
    return lines


def _try(made: Plan, tier: StorageConfig, line: Tier, scratch: Path) -> None:
    """Its members are on drives of their own, whose rates add up."""
    rate = 0.0
    for member in tier.members:
        findings = [*tiers.examine(scratch, member, geometry=made.row)]
        trial = next((found for found in findings if found.name == NAME), None)
        if trial is None or "read_bytes_per_s" not in trial.details:
            why = trial or next((found for found in findings if found.status is Status.BROKEN), findings[-1])
            line.verdict = f"{'broken' if why.status is Status.BROKEN else 'not tried'}: {why.text}"
            return
        rate += trial.details["read_bytes_per_s"]
    line.read_bytes_per_s = rate
    place = (
        "this disk" if isinstance(tier, FileConfig) else "this bucket" if isinstance(tier, S3Config) else "this tier"
    )
    line.verdict = made.verdict(rate, place)


def _requests(
    made: Plan, given: TiersConfig | None, new: float, hit_rate: float, prices: tuple[float, float] | None
) -> dict[str, float]:
    """Of rows, in a month."""
    buckets = [tier for tier in given.storage if isinstance(tier, S3Config)] if given else []
    writers = [tier for tier in buckets if tier.write is not Write.OFF]
    rows = new * MONTH_S / made.chunk * made.kv.groups[0]
    found = {"put": rows if writers or not buckets else 0.0, "get": rows * hit_rate / (1 - hit_rate)}
    found["head"] = rows if any(tier.shared for tier in writers) else 0.0
    if prices is not None:
        found["price"] = (found["put"] * prices[0] + (found["get"] + found["head"]) * prices[1]) / 1000
    return found


def _replayed(
    made: Plan, prompts: Sequence[Prompt], capacities: Sequence[int], block: int
) -> Iterator[dict[str, float]]:
    """With one tier of each capacity, least recently used first out. `block`: tokens of an id in the trace."""
    distinct = len({key for prompt in prompts for key in prompt.keys})
    seconds = prompts[-1].now_s - prompts[0].now_s if prompts else 0.0
    if seconds <= 0:
        raise InputError("--trace: its prompts are all of one time, so that there is no rate")
    groups, layers = made.kv.groups
    block_bytes = block * groups * layers * made.kv.layer_bytes
    with progress("trace", len(capacities)) as bar:
        for capacity in capacities:
            rows = min(distinct, made.tokens([capacity]) // block)
            if rows:
                found = replay(prompts, rows)
                day = found.stored * block_bytes * 86400 / seconds
                yield {"capacity": capacity, "hits": found.hits, "written_bytes_per_day": day}
            bar.advance(bar.tasks[0].id)


def _print_json(
    made: Plan, lines: Sequence[Tier], s3: dict[str, float] | None, replayed: list[dict[str, float]] | None
) -> None:
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
            "break_even_bytes_per_s": {"long_prompts": low, "within_the_window": high} if made.prefill else None,
            "tiers": [vars(line) for line in lines],
            "s3_requests_per_month": s3,
            "trace": replayed,
        }
    )


def _print(
    made: Plan, lines: Sequence[Tier], s3: dict[str, float] | None, replayed: list[dict[str, float]] | None
) -> None:
    print("\n".join(_summary(made)), end="\n\n")
    columns = ("tier", "capacity", "tokens", "verdict") if lines[0].name else ("capacity", "tokens")
    rows = [(line.name, format_size(line.capacity), f"{line.tokens:,}", line.verdict) for line in lines]
    print_table(columns, rows if lines[0].name else [row[1:3] for row in rows])
    if s3 is not None:
        counted = ", ".join(
            f"{s3[kind] / 1e6:,.1f} million {kind.upper()}" for kind in ("put", "get", "head") if s3[kind]
        )
        print(f"\nS3 requests for rows in 30 days: {counted}" + (f": {s3['price']:,.2f}" if "price" in s3 else ""))
    if replayed is not None:
        print("\nthe trace at its own rate, with one tier of each capacity")
        print_table(
            ("capacity", "hits", "written a day"),
            [
                (
                    format_size(int(each["capacity"])),
                    f"{each['hits']:.1%}",
                    format_size(round(each["written_bytes_per_day"])),
                )
                for each in replayed
            ],
        )


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
        both = f" (long prompts) to {_gb(high)} GB/s (up to {kv.window:,} tokens)" if kv.windowed else " GB/s"
        yield f"break-even at {made.prefill:,.0f} tokens/s: {_gb(low)}{both}; a slower tier is not loaded from"


def _gb(rate: float) -> str:
    return f"{rate / 1e9:.1f}" if rate >= 1e9 else f"{rate / 1e9:.2g}"
