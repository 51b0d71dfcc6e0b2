"""A walk of the core's state machine, without hypothesis, and a trace of all that the core does on it.

The same seed takes the same walk in every process, so two traces differ only if the core does. Run as a program, it
prints the trace: `python -m tests.support.walk SEED STEPS`.
"""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from random import Random
from typing import ClassVar, Final

from nixl_tiers.core.announced import Announced
from nixl_tiers.core.manager import TierManager
from tests.support.simulation import Sent, SimulatedJob, Simulation
from tests.support.stateful import CascadeStateMachine
from tests.support.steps import Step, steps_of

STORED: Final = Path(__file__).parents[1] / "core/steps.toml"
WALK: Final = 150  # steps until the next simulation begins


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


def walk(random: Random) -> Iterator[Step]:
    """The steps that show planted bugs, over and over, in an order of chance: every event may follow every other."""
    texts = [text for bugs in tomllib.loads(STORED.read_text()).values() for text in bugs.values()]
    steps = [step for text in texts for step in steps_of(text)]
    begins = [step for step in steps if step[0] == "begin"]
    others = [step for step in steps if step[0] != "begin"]
    while True:
        yield random.choice(begins)
        yield from random.choices(others, k=WALK)


def trace(seed: int, steps: int) -> Iterator[str]:
    """What the core does on `steps` steps of a walk."""
    machine = TracedStateMachine()
    for number, (name, given) in enumerate(islice(walk(Random(seed)), steps)):
        if name == "begin" and number:
            machine.teardown()
            machine = TracedStateMachine()
        yield f"step {number}: {name} {given}"
        getattr(machine, name)(**given)
        yield from TracedSimulation.notes
        TracedSimulation.notes.clear()
        yield f"announced {machine.simulation.announced.take()}"
        yield f"samples {machine.simulation.core.take_samples()}"
        yield from (f"{name} {stats}" for name, stats in machine.simulation.core.counters().items())
    machine.teardown()


if __name__ == "__main__":
    for line in trace(int(sys.argv[1]), int(sys.argv[2])):
        print(line)
