"""What a group costs the controller with 100 to 100,000 groups buffered: the real buffer, and poll-and-scan beside it.

uv run python benchmarks/controller_scale.py [--repeats 15]

A cycle is what 64 groups cost: admit and finish each, one decision, release. The buffer is as full after it as before.
Medians over repeats, in microseconds a group. The sizes take turns, so that a busy machine slows all alike.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import random
import statistics
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from itertools import islice

from rich.console import Console
from rich.table import Table

from tandem.config.asynchrony import InOrder, ReadyFirst, WeightFifo, Windowed
from tandem.control.buffer import Buffer
from tandem.control.entries import Entries
from tandem.control.samplers import Choice, Choose, build_sampler, whole
from tandem.types import Group

SIZES = (100, 1_000, 10_000, 100_000)
STEP = 64  # groups of a step
WINDOW = 8  # versions over which the buffered groups are spread
CYCLES = 20  # a repeat
GOAL = 1.2
NO_BOUND = 10**9  # versions: nothing is dropped

Cycle = Callable[[], Awaitable[None]]


def custom(entries: Entries, version: int, want: int) -> Choice | None:
    """A user's own sampler: by arrival."""
    return whole(islice(entries.by_arrival.values(), want), want)


SAMPLERS: dict[str, Choose] = {
    "in_order": build_sampler(InOrder()),
    "ready_first": build_sampler(ReadyFirst(name="ready_first")),
    "weight_fifo": build_sampler(WeightFifo(name="weight_fifo", max_staleness_versions=NO_BOUND)),
    **{
        f"windowed, {'freshest' if freshest else 'oldest'} first": build_sampler(
            Windowed(
                name="windowed",
                buffer_capacity_groups=1,
                max_staleness_versions=NO_BOUND,
                sample_freshest_first=freshest,
            )
        )
        for freshest in (False, True)
    },
    "custom (by arrival)": custom,
}


def group(index: int, version: int) -> Group:
    return Group(index, f"p{index}", (index,), (4,), (3,), (1.0,), (False,), {}, version, version)


async def real(choose: Choose, size: int) -> Cycle:
    """A cycle on the real buffer, which holds `size` finished groups of several versions."""
    buffer = Buffer(choose)
    await buffer.open(size + STEP)
    place = 0

    async def produce(count: int, version_of: Callable[[int], int]) -> None:
        nonlocal place
        for index in range(place, place + count):
            version = version_of(index)
            await buffer.admit(index, lambda version=version: version)
            await buffer.finish(index, group(index, version))
        place += count

    await produce(size, lambda index: (index - place) * WINDOW // size)
    steps = 0

    async def cycle() -> None:
        nonlocal steps
        version, steps = WINDOW + steps * STEP * WINDOW // size, steps + 1  # a buffer's worth of steps is a window
        await produce(STEP, lambda index: version)
        choice = await buffer.take(version, STEP)
        assert len(choice.take) == STEP
        await buffer.release(STEP)

    return cycle


@dataclass
class Scan:
    """Poll and scan: one list of groups, looked through for each group that arrives and for each decision."""

    groups: list[Group] = field(default_factory=list)

    def decide(self, version: int, want: int) -> list[Group] | None:
        fresh = [each for each in self.groups if each.oldest_version >= version - NO_BOUND]
        if len(fresh) < want:
            return None
        chosen = sorted(fresh, key=lambda each: (each.oldest_version, each.index))[:want]
        gone = {each.index for each in chosen}
        self.groups = [each for each in self.groups if each.index not in gone]
        return chosen


async def strawman(size: int) -> Cycle:
    """The same cycle by poll and scan. It polls once a step: polling more often would cost more."""
    rng = random.Random(0)
    scan, place = Scan([group(index, index * WINDOW // size) for index in range(size)]), size
    rng.shuffle(scan.groups)

    async def cycle() -> None:
        nonlocal place
        scan.groups += [group(index, WINDOW) for index in range(place, place + STEP)]
        place += STEP
        chosen = scan.decide(WINDOW, STEP)
        assert chosen is not None

    return cycle


async def measure(build: Callable[[int], Awaitable[Cycle]], repeats: int, cycles: int) -> dict[int, float]:
    """Median microseconds a group, by size."""
    built = {size: await build(size) for size in SIZES}
    times: dict[int, list[float]] = {size: [] for size in SIZES}
    gc.collect()
    gc.freeze()  # what is buffered is no garbage: the collector need not look at it, in any size
    for _ in range(repeats + 1):
        for size, cycle in built.items():
            began = time.process_time()
            for _ in range(cycles):
                await cycle()
            times[size].append((time.process_time() - began) / (cycles * STEP) * 1e6)
    gc.unfreeze()
    return {size: statistics.median(samples[1:]) for size, samples in times.items()}


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=15, help="repeats of each size (15)")
    repeats = parser.parse_args().repeats
    table = Table(title="microseconds a group (admit + finish + its share of the decision)")
    for name in ("sampler", *(f"{size:,}" for size in SIZES), "last / first", f"goal <= {GOAL}"):
        table.add_column(name, justify="left" if name == "sampler" else "right")
    rows = {
        name: await measure(lambda size, choose=choose: real(choose, size), repeats, CYCLES)
        for name, choose in SAMPLERS.items()
    }
    rows["poll and scan"] = await measure(strawman, max(3, repeats // 5), 2)
    for name, costs in rows.items():
        ratio = costs[SIZES[-1]] / costs[SIZES[0]]
        verdict = "yes" if ratio <= GOAL else "no"
        table.add_row(name, *(f"{costs[size]:.1f}" for size in SIZES), f"{ratio:.2f}", verdict)
    Console(width=100).print(table)


if __name__ == "__main__":
    asyncio.run(main())
