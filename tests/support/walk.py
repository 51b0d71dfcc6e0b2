"""A random walk of the core's state machine, without hypothesis, and a trace of all that the core does on it.

The same seed takes the same walk in every process, so two traces differ only if the core does. Run as a program, it
prints the trace: `python -m tests.support.walk SEED STEPS`.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from random import Random
from typing import ClassVar, Final

from hypothesis.stateful import RULE_MARKER

from nixl_tiers.base.chunk import Outcome
from nixl_tiers.core.announced import Announced
from nixl_tiers.core.manager import TierManager
from nixl_tiers.core.member import UNLIMITED
from tests.support.simulation import MANY_TURNS, SOME_ROOM, Scan, Sent, SimulatedJob, Simulation
from tests.support.stateful import ROWS, SLOTS, WRITES, CascadeStateMachine

WALK: Final = 150  # steps until the next simulation begins


def _prompt(random: Random) -> str:
    return "".join(random.choices("ab", k=random.randint(1, 5)))


def _prompts(random: Random) -> list[str]:
    return [_prompt(random) for _ in range(random.randint(1, 3))]


def _rarely(random: Random) -> bool:
    return random.random() < 0.1


ARGUMENTS: Final[dict[str, Callable[[Random], object]]] = {
    "abort": _rarely,
    "after_s": lambda random: random.choice([0.5, 3.0]),
    "after": _prompt,
    "before": _prompt,
    "beside": _rarely,
    "count": lambda random: random.randint(1, 4),
    "chunks": lambda random: random.randint(1, 5),
    "delivered": lambda random: random.random() < 0.5,
    "ends": lambda random: random.randrange(32),
    "good": lambda random: not _rarely(random),
    "host_only": _rarely,
    "keep": lambda random: random.random() < 0.5,
    "keys": lambda random: random.randint(1, 3),
    "own": lambda random: random.randint(1, 5),
    "outcome": lambda random: random.choice([Outcome.OK] * 6 + [Outcome.FAILED, Outcome.NO_SPACE]),
    "pick": lambda random: random.randrange(32),
    "prompt": _prompt,
    "prompts": _prompts,
    "reset_among_calls.after": _prompts,
    "reset_among_calls.before": _prompts,
    "ranks": lambda random: random.choices(range(3), k=3),
    "really": _rarely,
    "room": lambda random: random.choice([1, SOME_ROOM, UNLIMITED, UNLIMITED]),
    "rots": _rarely,
    "row_s": lambda random: random.choice([4.0, 8.0]),
    "scan": lambda random: random.choice(list(Scan)),
    "seconds": lambda random: random.choice([0.1, 0.1, 0.4, 1.0, 6.0]),
    "stale": _rarely,
    "slow_tier_is_declined.ends": lambda random: random.choice(["aborted", "finished", "lives"]),
    "stays": _rarely,
    "steps": lambda random: random.randint(1, 4),
    "store": lambda random: random.random() < 0.5,
    "tier": lambda random: random.randrange(2),
    "told": lambda random: random.random() < 0.5,
    "ttl_s": lambda random: random.choice([0.5, 3.0, 20.0]),
    "turns": lambda random: random.choice([1, 2, MANY_TURNS, MANY_TURNS]),
    "wait_s": lambda random: random.choice([0.4, 1.5, 1.5, 6.0]),
}
"""How the walk draws an argument, by its name; or by its rule's too, where others mean something else by it."""

OFTEN: Final = ("request", "traffic", "catch_up", "mover_works", "deliver", "worker_finishes", "end_step") * 4


class TracedSimulation(Simulation):
    """Notes what the core sends to movers."""

    notes: ClassVar[list[str]] = []  # of the one that runs
    announced: Announced

    def _start(self) -> TierManager:
        core = super()._start()
        self.announced = core.announce(8)
        return core

    def _send(self, tier: int, message: Sent) -> None:
        if isinstance(message, SimulatedJob):
            job = message.job
            moves = zip([move.key for move in job.moves], message.rows, message.slots, strict=True)
            ticks = [(move.tick, move.seal) for move in job.moves]
            self.notes.append(
                f"tier {tier} {job.direction.name} {job.id} {list(moves)} {ticks} until {job.hard_deadline_s}"
            )
        else:
            self.notes.append(f"tier {tier} {message}")
        super()._send(tier, message)


class TracedStateMachine(CascadeStateMachine):
    simulated = TracedSimulation
    simulation: TracedSimulation


def trace(seed: int, steps: int) -> Iterator[str]:
    """What the core does on `steps` steps of a walk."""
    random = Random(seed)
    rules = {name: rule for name, rule in vars(CascadeStateMachine).items() if hasattr(rule, RULE_MARKER)}
    parameters = {name: [*inspect.signature(rule).parameters][1:] for name, rule in rules.items()}
    names = [*OFTEN, *rules]
    machine = None
    for step in range(steps):
        if machine is None or step % WALK == 0:
            if machine is not None:
                machine.teardown()
            machine = TracedStateMachine()
            machine.begin(
                random.choice(WRITES),
                random.choice([None, 0, 2]),
                random.choice([256, 2, 3]),
                random.choice([None, 5.0, 100.0]),
                rows=random.choice(ROWS),
                slots=random.choice(SLOTS),
            )
        name = random.choice(names)
        drawn = {each: ARGUMENTS.get(f"{name}.{each}", ARGUMENTS[each])(random) for each in parameters[name]}
        yield f"step {step}: {name} {drawn}"
        getattr(machine, name)(**drawn)
        yield from TracedSimulation.notes
        TracedSimulation.notes.clear()
        core = machine.simulation.core
        yield f"announced {machine.simulation.announced.take()}"
        yield f"samples {core.take_samples()}"
        yield from (f"{name} {stats}" for name, stats in core.counters().items())
    if machine is not None:
        machine.teardown()


if __name__ == "__main__":
    for line in trace(int(sys.argv[1]), int(sys.argv[2])):
        print(line)
