"""What a step costs as samples, length, groups in flight and ranks grow: each part by itself, in CPU time.

uv run python benchmarks/scaling.py [--axes samples length groups ranks] [--repeats 5]

A row measures one part at several sizes, which take turns, so that a busy machine slows all alike; CPU time of this
process (of all ranks), without garbage collection, medians. `exponent` is the slope of log cost against log size over
the three largest sizes: 1 is linear, 0 is flat; up to 1.1 passes as `linear or better`. Where the work itself is not
linear (attention, a sort) its own exponent stands in the place of 1. "poll and scan" is no part of ours: it is what
the buffer's orders are for.
"""

from __future__ import annotations

import argparse
import gc
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from benchmarks import scaling_control, scaling_train

SLACK = 0.1  # of an exponent: what the clock leaves uncertain


@dataclass(frozen=True)
class Part:
    """`build(size)` -> a round of work, which gives the CPU seconds that it took, or None: they are measured here."""

    name: str
    sizes: Sequence[int]
    build: Callable[[int], Callable[[], float | None]]
    unit: str  # what a cost is shown for
    units: Callable[[int], float]  # how many of them a round has
    work: tuple[str, Callable[[int], float]] | None = None  # what must be done at a size; None: in proportion to it
    ours: bool = True
    once: bool = False  # a round warms up and repeats by itself
    last: int = 3  # the largest sizes, over which the exponent is taken


def groups_parts() -> list[Part]:
    """A buffer's cycle is what a step of 64 groups costs; a decision does not depend on what is buffered."""
    sizes, step = (1, 10, 100, 1_000, 10_000, 100_000), scaling_control.STEP
    parts = [
        Part(f"groups buffered: {name}", sizes, lambda n, choose=choose: scaling_control.buffered(choose, n), "group",
             lambda n: step * scaling_control.CYCLES)
        for name, choose in scaling_control.SAMPLERS.items()
    ]  # fmt: skip
    parts += [
        Part("groups in flight: buffer", sizes, scaling_control.in_flight, "group",
             lambda n: step * scaling_control.CYCLES),
        Part("groups in flight: the whole controller", (8, 80, 800, 8_000), scaling_control.controller_in_flight,
             "group", lambda n: scaling_control.FURTHER * scaling_control.SMALL_STEP),
        Part("groups buffered: poll and scan", (100, 1_000, 10_000, 100_000), scaling_control.scanned, "group",
             lambda n: step, ours=False),
    ]  # fmt: skip
    return parts


def samples_parts() -> list[Part]:
    """Samples of a step, 8 a prompt; those that train are of 16 to 32 tokens."""
    return [
        Part("samples: controller, buffer, plane", (16, 256, 1_024, 4_096, 16_384), scaling_control.controller,
             "sample", lambda n: scaling_control.STEPS * n),
        Part("samples: put into the plane, get, drop", (1_024, 4_096, 16_384), scaling_train.plane, "sample", float),
        Part("samples: cut into packs (one rank)", (1_024, 4_096, 16_384), lambda n: scaling_train.plan(n, 1), "sample",
             float, work=("n log n", n_log_n)),
        Part("samples: cut into packs (64 ranks)", (1_024, 4_096, 16_384), lambda n: scaling_train.plan(n, 64),
             "sample", float, work=("n log n", n_log_n)),
        Part("samples: advantages, T 512", (64, 256, 1_024), lambda n: scaling_train.advantages(n, 512), "sample",
             float),
        Part("samples: the whole PPO step", (16, 64, 256, 1_024), lambda n: scaling_train.ppo_step(n, 32), "sample",
             float),
    ]  # fmt: skip


def length_parts() -> list[Part]:
    """Tokens of a sample, prompt included."""
    return [
        Part("length: advantages, 16 samples", (256, 1_024, 4_096, 16_384), lambda t: scaling_train.advantages(16, t),
             "token", lambda t: 16 * t),
        Part("length: packs, 64 samples", (256, 1_024, 4_096, 16_384), lambda t: scaling_train.packs(64, t), "token",
             lambda t: 64 * t),
        Part("length: the whole PPO step, 8 samples", (128, 256, 512, 1_024), lambda t: scaling_train.ppo_step(8, t),
             "token", lambda t: 8 * t, work=("FLOPs", lambda t: scaling_train.flops(8, t))),
    ]  # fmt: skip


def ranks_parts() -> list[Part]:
    """Every rank brings as many samples: the cost of all together is linear where each costs what one alone does."""
    machines, router = (1, 4, 16, 64, 256), scaling_control.router
    return [
        Part("engines: controller, 1,024 samples a step", machines, scaling_control.controller_of_engines, "sample",
             lambda n: scaling_control.STEPS * 1_024),
        Part("ranks: who takes which samples, 16 a rank", machines, lambda n: scaling_train.plan(16 * n, n), "rank",
             float, work=("n log n", lambda n: n_log_n(16 * n))),
        Part("engines: router, a request", machines, router, "request", lambda n: scaling_control.REQUESTS),
        Part("ranks: update of an actor (gloo, FSDP2)", (1, 2, 4), scaling_train.ranks, "rank", float, once=True,
             last=2),  # one rank alone sends nothing
    ]  # fmt: skip


def n_log_n(samples: int) -> float:
    """Of a sort, and of first fit decreasing."""
    return samples * math.log2(samples)


AXES = {"samples": samples_parts, "length": length_parts, "groups": groups_parts, "ranks": ranks_parts}


def measure(part: Part, repeats: int) -> dict[int, float]:
    """CPU seconds of a round by size: medians over `repeats` rounds, behind one that warms up."""
    rounds = {size: part.build(size) for size in part.sizes}
    seconds: dict[int, list[float]] = {size: [] for size in part.sizes}
    for _ in range(1 if part.once else repeats + 1):
        for size, work in rounds.items():
            gc.collect()
            gc.disable()  # as timeit does: a collection looks at all that lives, in whose part it falls is chance
            began = time.process_time()
            told = work()
            seconds[size].append(time.process_time() - began if told is None else told)
            gc.enable()
    return {size: statistics.median(found[1:] or found) for size, found in seconds.items()}


def exponent(costs: dict[int, float], last: int) -> float:
    """The slope of log cost against log size, by least squares over the largest sizes."""
    points = [(math.log(size), math.log(max(cost, 1e-9))) for size, cost in sorted(costs.items())[-last:]]
    mean_x, mean_y = (statistics.fmean(column) for column in zip(*points, strict=True))
    return sum((x - mean_x) * (y - mean_y) for x, y in points) / sum((x - mean_x) ** 2 for x, _ in points)


def line(part: Part, costs: dict[int, float]) -> str:
    """A row of the table."""
    found = exponent(costs, part.last)
    name, work = part.work or ("", float)
    allowed = exponent({size: work(size) for size in part.sizes}, part.last)
    shown = ", ".join(f"{size:,}: {costs[size] / part.units(size) * 1e6:.3g}" for size in part.sizes)
    passes = f"as {name} ({allowed:.2f}) or better" if name else "linear or better"
    verdict = passes if found <= allowed + SLACK else "WORSE" if part.ours else "(worse)"
    return f"| {part.name} | {shown} | us a {part.unit} | {found:.2f} | {verdict} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--axes", nargs="+", choices=AXES, default=list(AXES))
    parser.add_argument("--repeats", type=int, default=5, help="rounds of each size (5)")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    print("| part | CPU cost at size | unit | exponent | verdict |\n|---|---|---|---|---|")
    for axis in asked.axes:
        for part in AXES[axis]():
            print(line(part, measure(part, asked.repeats)), flush=True)


if __name__ == "__main__":
    main()
