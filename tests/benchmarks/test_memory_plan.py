"""The memory benchmark runs where there is no GPU, so that its code is not first tried on one."""

from __future__ import annotations

import pytest

from benchmarks.memory_plan import DEFAULT, SHAPES, line, measure, parse, plan_of


def test_a_row_and_its_plan_are_made_on_a_cpu():
    row = parse("tiny,actor,mb=1024,ac=full,beside=critic")
    assert measure(row, "cpu") == {"infer": 0, "update": 0}
    assert all(held.total > 0 for held in plan_of(row, "cpu").values())


@pytest.mark.parametrize("text", DEFAULT)
def test_every_row_of_the_default_can_be_planned_and_fits_an_h200(text: str):
    row = parse(text)
    assert row.shape in SHAPES
    plan = {name: held.total for name, held in plan_of(row, "cuda").items()}
    assert max(plan.values()) < 139 * 2**30
    assert "out of memory" in line(text, plan, None)
