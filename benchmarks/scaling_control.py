"""The parts of benchmarks/scaling.py that hold no tensors: buffer and samplers, the whole controller, the router."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from itertools import islice

from tandem.config.asynchrony import AsyncRl, Failures, InOrder, ReadyFirst, WeightFifo, Windowed
from tandem.control.buffer import Buffer
from tandem.control.entries import Entries
from tandem.control.plan import Plan
from tandem.control.samplers import Choice, Choose, build_sampler, whole
from tandem.rollout.router import Router
from tandem.simulation.lengths import Lengths
from tandem.simulation.run import Machines, Work, simulate
from tandem.types import Generation, Group, Sampling

STEP = 64  # groups of a step at the buffer
WINDOW = 8  # versions over which the buffered groups are spread
CYCLES = 20  # of a round
NO_BOUND = 10**9  # versions: nothing is dropped
STEPS = 4  # of a round of the whole controller
SMALL_STEP = 8  # groups of a step, where those in flight are what grows
FURTHER = 256  # steps, there
REQUESTS = 2_000  # of a round of the router
Round = Callable[[], float | None]


def custom(entries: Entries, version: int, want: int) -> Choice | None:
    """A user's own sampler: by arrival."""
    return whole(islice(entries.by_arrival.values(), want), want)


def windowed(*, freshest: bool) -> Choose:
    section = Windowed(
        name="windowed", buffer_capacity_groups=1, max_staleness_versions=NO_BOUND, sample_freshest_first=freshest
    )
    return build_sampler(section)


SAMPLERS: dict[str, Choose] = {
    "in_order": build_sampler(InOrder()),
    "ready_first": build_sampler(ReadyFirst(name="ready_first")),
    "weight_fifo": build_sampler(WeightFifo(name="weight_fifo", max_staleness_versions=NO_BOUND)),
    "windowed, oldest first": windowed(freshest=False),
    "windowed, freshest first": windowed(freshest=True),
    "custom (by arrival)": custom,
}


def group(index: int, version: int) -> Group:
    return Group(index, f"p{index}", (index,), (4,), (3,), (1.0,), (False,), {}, version, version)


@dataclass
class BufferCycle:
    """What 64 groups cost the real buffer: admit and finish each, one decision, release. It is as full as before."""

    buffer: Buffer
    size: int  # what else it holds
    place: int = 0
    steps: int = 0

    async def fill(self, *, finished: bool) -> None:
        """Groups of WINDOW versions, that wait for a step or are still in flight."""
        await self.buffer.open(self.size + STEP)
        await self._produce(self.size, lambda index: index * WINDOW // self.size, finished=finished)

    async def cycle(self) -> None:
        # A buffer's worth of steps is a window.
        version, self.steps = WINDOW + self.steps * STEP * WINDOW // self.size, self.steps + 1
        await self._produce(STEP, lambda index: version, finished=True)
        choice = await self.buffer.take(version, STEP)
        assert len(choice.take) == STEP, f"wanted {STEP} groups, got {len(choice.take)}"
        await self.buffer.release(STEP)

    async def _produce(self, count: int, version_of: Callable[[int], int], *, finished: bool) -> None:
        for index in range(self.place, self.place + count):
            version = version_of(index)
            await self.buffer.admit(index, lambda version=version: version)
            if finished:
                await self.buffer.finish(index, group(index, version))
        self.place += count


def buffered(choose: Choose, size: int) -> Round:
    """Cycles while `size` finished groups wait."""
    return cycles_of(BufferCycle(Buffer(choose), size), finished=True)


def in_flight(size: int) -> Round:
    """Cycles while `size` groups are in flight."""
    return cycles_of(BufferCycle(Buffer(SAMPLERS["ready_first"]), size), finished=False)


def cycles_of(work: BufferCycle, *, finished: bool) -> Round:
    async def cycles() -> None:
        for _ in range(CYCLES):
            await work.cycle()

    asyncio.run(work.fill(finished=finished))
    return lambda: timed(cycles())


def timed(work: Coroutine[None, None, None]) -> float:
    """CPU seconds of a coroutine, without those of its loop's start."""

    async def measured() -> float:
        began = time.process_time()
        await work
        return time.process_time() - began

    return asyncio.run(measured())


@dataclass
class Scan:
    """Poll and scan: one list of groups, looked through for each decision. Polling more than once would cost more."""

    groups: list[Group] = field(default_factory=list)

    def decide(self, version: int, want: int) -> list[Group] | None:
        fresh = [each for each in self.groups if each.oldest_version >= version - NO_BOUND]
        if len(fresh) < want:
            return None
        chosen = sorted(fresh, key=lambda each: (each.oldest_version, each.index))[:want]
        gone = {each.index for each in chosen}
        self.groups = [each for each in self.groups if each.index not in gone]
        return chosen


def scanned(size: int) -> Round:
    """One of the same cycles by poll and scan."""
    scan, place = Scan([group(index, index * WINDOW // size) for index in range(size)]), size
    random.Random(0).shuffle(scan.groups)

    def cycle() -> None:
        nonlocal place
        scan.groups += [group(index, WINDOW) for index in range(place, place + STEP)]
        place += STEP
        assert scan.decide(WINDOW, STEP) is not None

    return cycle


def plan(groups: int, steps: int, lead: int) -> Plan:
    return Plan(
        groups_per_step=groups,
        max_num_steps=steps,
        max_num_prompts=10**9,
        policy_training_start_step=0,
        async_rl=AsyncRl(
            sampler=ReadyFirst(name="ready_first", max_lookahead_versions=lead),
            weight_update="in_flight",
            stall_timeout_s=1e12,
        ),
        failures=Failures(),
        dynamic_sampling_max_gen_batches=10,
        val_period=0,
        val_at_start=False,
        val_at_end=False,
        save_period=10**9,
        save_at_end=False,
    )


def run(plan: Plan, samples: int, engines: int, slots: int) -> float:
    """CPU seconds of a whole simulated run: the real controller, buffer, producer and plane in memory."""
    machines = Machines(engines=engines, slots=slots, tokens_per_s=50.0, trainers=1, train_tokens_per_s=1e5)
    work = Work(samples, 0, Lengths("lognormal", 100, 1_000), prompts_per_epoch=10**6)
    began = time.process_time()
    simulate(plan, machines, work)
    return time.process_time() - began


def controller(samples: int) -> Round:
    """Steps of so many samples, lead 1."""
    return lambda: run(plan(samples // 8, STEPS, 1), 8, engines=8, slots=32)


def controller_of_engines(engines: int) -> Round:
    """Steps of 1,024 samples, lead 1, by engines that have 1,024 slots together."""
    return lambda: run(plan(128, STEPS, 1), 8, engines, slots=1_024 // engines)


def controller_in_flight(groups: int) -> Round:
    """What FURTHER steps cost while so many groups are in flight: a run's cost less that of a shorter one.

    A run fills the house at its start and leaves it at its end, both in proportion to what is in flight.
    """
    lead = groups // SMALL_STEP

    def difference() -> float:
        short, long = (run(plan(SMALL_STEP, lead + steps, lead), 1, 8, slots=8) for steps in (STEPS, STEPS + FURTHER))
        return long - short

    return difference


class AtOnce:
    """An engine that answers at once: what is left is the router's own cost."""

    def __init__(self) -> None:
        self._answer = Generation((1,), (0.0,), (0,), "stop")

    async def generate(self, tokens: Sequence[int], sampling: Sampling) -> Generation:
        return self._answer


def router(engines: int) -> Round:
    """Requests of groups of 8 that arrive at the real router, each answered at once."""
    house = Router([AtOnce() for _ in range(engines)], max_reissues=0, max_imbalance=4)
    law, prompts = Sampling(1, 1.0, 0, ()), [tuple(range(index, index + 100)) for index in range(REQUESTS // 8)]

    async def requests() -> None:
        for prompt in prompts:
            for _ in range(8):
                await house.generate(prompt, law)

    return lambda: timed(requests())
