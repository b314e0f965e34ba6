"""How a cost grows is read off rightly, and the parts that are measured run at their smallest sizes."""

from __future__ import annotations

import math

import pytest

from benchmarks.scaling import AXES, Part, exponent, line


@pytest.mark.parametrize(("power", "found"), [(0, 0.0), (1, 1.0), (2, 2.0)])
def test_the_exponent_of_a_power_is_found(power: int, found: float):
    costs = {size: 1e-6 * size**power for size in (10, 100, 1_000, 10_000)}
    assert exponent(costs, 3) == pytest.approx(found)


def test_what_grows_faster_than_its_work_is_called_worse():
    costs = {size: 1e-6 * size**1.3 for size in (10, 100, 1_000)}
    part = Part("p", (10, 100, 1_000), lambda size: lambda: None, "sample", float)
    assert "| 1.30 | WORSE |" in line(part, costs)
    sort = Part("p", part.sizes, part.build, "sample", float, work=("n log n", lambda n: n * math.log2(n)))
    assert "| 1.30 | as n log n (1.24) or better |" in line(sort, costs)


@pytest.mark.parametrize("axis", ["samples", "length", "groups"])
def test_every_part_does_its_round_at_its_smallest_size(axis: str):
    for part in AXES[axis]():
        told = part.build(min(part.sizes))()
        assert told is None or math.isfinite(told)
