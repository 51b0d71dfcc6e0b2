"""One run of one cell on one side: what it starts and asks, and what came of it."""

from __future__ import annotations

import contextlib
import random
import shutil
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from tests.support.models import save_random
from tools.torture.engine import Answer, Engine, EngineDied, NoAnswer, Plan
from tools.torture.places import Place, wait_until_stored
from tools.torture.sides import Running, Side

PROMPT_TOKENS, PROMPT_ROWS, PROMPTS = 700, 5, 8
NO_ANSWER_S: Final = 60.0
MODEL: Final[dict[str, Any]] = {
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "initializer_range": 0.2,  # with which each token depends on the whole prompt
    "max_position_embeddings": 1024,
}
NO_LIMIT, NOT_APPLICABLE = "no such limit exists", "n/a"


class NotApplicable(Exception):
    """The fault cannot happen to this side; the text says why."""


def prompt(number: int) -> list[int]:
    return random.Random(number).choices(range(3, 512), k=PROMPT_TOKENS)


def prompts(count: int = PROMPTS) -> list[list[int]]:
    return [prompt(number) for number in range(count)]


class Models:
    """Two with the same configuration and other weights, and what they answer without a cache."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._known: dict[tuple[Any, ...], dict[int, tuple[int, ...]]] = {}

    def path(self, weights: str = "first") -> Path:
        place = self.folder / weights
        if not place.exists():
            draft = save_random("LlamaForCausalLM", self.folder / "draft", **MODEL)
            if weights != "first":
                _scale_weights(draft)
            draft.rename(place)
        return place

    def cold(self, count: int, weights: str, settings: dict[str, Any]) -> dict[int, tuple[int, ...]]:
        """By prompt, the tokens of an engine without a connector, and without prefix caching."""
        key = (weights, *sorted(settings.items()))
        known = self._known.setdefault(key, {})
        if missing := [number for number in range(count) if number not in known]:
            plan = Plan(str(self.path(weights)), None, settings={"enable_prefix_caching": False, **settings})
            engine = Engine(plan, self.folder / "cold.log")
            try:
                for number, answer in zip(missing, engine.ask(map(prompt, missing), 10 * NO_ANSWER_S), strict=True):
                    known[number] = answer.tokens
            finally:
                engine.stop()
        return known


def _scale_weights(model: Path) -> None:
    from safetensors.torch import load_file, save_file

    file = model / "model.safetensors"
    save_file({name: value.flip(-1).contiguous() for name, value in load_file(file).items()}, file, {"format": "pt"})


@dataclass
class Run:
    """`again`, of the engine that could have hits, is what counts as cached."""

    side: Side
    folder: Path
    base: Path
    """Of all runs of the side, whose engines find their model at one path: rows of vLLM and LMCache are named by it."""
    models: Models
    limit_s: float
    stack: ExitStack
    weights: str = "first"
    settings: dict[str, Any] = field(default_factory=dict)
    where: Any = None
    """A folder, or a Bucket."""
    capacity: int | None = None
    engines: int = 1
    """At once on the place."""
    asked: int = 0
    wrong: int = 0
    failed: int = 0
    cached: int = 0
    slowest_s: float = 0.0
    seconds: float = 0.0
    """Of all requests that were answered."""
    pause_s: float = 0.0
    """Between requests that fill the place."""
    left: str = ""
    """What has leaked: bytes, and where."""
    above: str = ""
    """By how many bytes a limit was exceeded."""
    no_limit: bool = False
    met: Callable[[], int] | None = None
    """How often the fault was met, where that can be counted."""
    note: str = ""

    def __post_init__(self) -> None:
        self.model = self.base / "model"
        self.use_weights(self.weights)
        if self.where is None:
            self.where = self.folder / "place"
            self.where.mkdir()

    @property
    def place(self) -> Place:
        return self.side.place(self.where)

    def use_weights(self, weights: str) -> None:
        """In the same directory as those before."""
        self.weights = weights
        shutil.rmtree(self.model, ignore_errors=True)
        shutil.copytree(self.models.path(weights), self.model)

    def start(self) -> Running:
        return self._kept(self.side.start(self._plan(), self.where, self.folder, self.capacity, self.engines))

    def beside(self, running: Running) -> Running:
        """Another engine on the same place; of LMCache, on the same server, as it is meant to be."""
        return self._kept(self.side.beside(running, self._plan(), self.folder, self.engines))

    def _plan(self) -> Plan:
        return Plan(str(self.model), settings=dict(self.settings))

    def _kept(self, running: Running) -> Running:
        self.stack.callback(running.stop_server)
        self.stack.callback(running.engine.kill)
        return running

    def ask(self, running: Running, count: int = PROMPTS, first: int = 0, *, again: bool = False) -> None:
        for number in range(first, count):
            (answer,) = running.engine.ask([prompt(number)], self.limit_s)
            self._check(answer, number, count, again=again)
            if not again:
                time.sleep(self.pause_s)

    def ask_at_once(self, running: Running, resets: Sequence[int], first: int = 0, *, again: bool = False) -> None:
        running.engine.begin_at_once(prompts(first + PROMPTS)[first:], resets)
        self._check_at_once(running, first, again=again)

    def ask_both(self, one: Running, other: Running) -> None:
        """The same of two engines, at the same time, so that both store the same rows."""
        for running in (one, other):
            running.engine.begin_at_once(prompts())
        for running in (one, other):
            self._check_at_once(running)

    def _check_at_once(self, running: Running, first: int = 0, *, again: bool = False) -> None:
        for number, answer in enumerate(running.engine.answered_at_once(self.limit_s), first):
            self._check(answer, number, first + PROMPTS, again=again)

    def _check(self, answer: Answer, number: int, count: int, *, again: bool) -> None:
        expected = self.models.cold(count, self.weights, self.settings)[number]
        self.asked += 1
        self.slowest_s = max(self.slowest_s, answer.seconds)
        self.seconds += answer.seconds
        if answer.reason not in ("length", "stop"):
            self.failed += 1
        elif answer.tokens != expected:
            self.wrong += 1
        self.cached += answer.cached if again else 0

    def fill(self, count: int = PROMPTS) -> None:
        """An engine that stores, and ends."""
        running = self.start()
        self.ask(running, count)
        self.settle(running, count * PROMPT_ROWS)
        running.stop()

    def fill_once(self) -> None:
        """`fill`, whose outcome is kept for all runs of the side with the same settings. No fault is there yet."""
        kept = self.base / "-".join(["stored", *self.settings.values()])
        if kept.exists():
            self.place.put_back(kept)
        else:
            self.fill()
            self.place.keep(kept)

    def settle(self, running: Running, rows: int) -> int:
        """Until that many rows are stored, or no more come. Tiny requests carry what is handed on in a next step."""
        for number in range(3):
            running.engine.ask([[5 + number]], self.limit_s, 1)
        return wait_until_stored(self.place, rows)

    def restart(self, after: Callable[[Running], object] = lambda _: None) -> Running:
        """A new engine asked the same, with `after` when it is up."""
        running = self.start()
        after(running)
        self.ask(running, again=True)
        return running


@dataclass(frozen=True)
class Outcome:
    name: str
    asked: int
    wrong: int
    cached: int
    seconds: float
    """Of the slowest request."""
    note: str


def carry_out(step: Callable[[Run, bool], None], fault: bool, cached: int | None, **about: Any) -> Outcome:
    """One run. `cached`: of the control, which tells `right` from `right, recomputed`; None: this is the control."""
    with ExitStack() as stack:
        run = Run(stack=stack, **about)
        try:
            step(run, fault)
            name = _class(run, cached)
        except NotApplicable as reason:
            name, run.note = NOT_APPLICABLE, str(reason)
        except EngineDied as error:
            name, run.note = "engine dead", str(error)
        except NoAnswer as error:
            name, run.note = "no answer within 60 s", str(error)
        if fault and run.met:
            met = run.met()
            name = name if met else "void"
            run.note = f"{run.note} The fault was met {met} times.".strip()
    if run.asked:
        run.note = f"{run.note} {run.seconds:.1f} s for {run.asked} answers.".strip()
    return Outcome(name, run.asked, run.wrong, run.cached, round(run.slowest_s, 2), run.note)


def _class(run: Run, cached: int | None) -> str:
    if run.wrong:
        return "wrong tokens"
    if run.failed:
        return "error"
    if run.left:
        return f"leak ({run.left})"
    if run.above:
        return f"limit exceeded ({run.above})"
    if run.no_limit:
        return NO_LIMIT
    return "right" if cached is None or run.cached >= cached else "right, recomputed"


# --- what may be left of a killed engine ------------------------------------------------------------------------------


def shared_memory() -> dict[str, int]:
    """Bytes by name of what lies in /dev/shm and no process maps: others use it too, and for less than a MiB."""
    maps = []
    for file in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):
            maps.append(file.read_text())
    mapped, found = "".join(maps), {}
    for file in Path("/dev/shm").iterdir():
        with contextlib.suppress(OSError):
            size = file.stat().st_blocks * 512
            if size >= 1 << 20 and str(file) not in mapped:
                found[file.name] = size
    return found


def started_by(pid: int) -> list[int]:
    """The processes that one has started, and those that these have."""
    found = []
    for children in Path("/proc").glob(f"{pid}/task/*/children"):
        for child in children.read_text().split():
            found += [int(child), *started_by(int(child))]
    return found


def runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False
