"""The one definition of staleness, as the table of docs/staleness.md."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tandem.control.steps import staleness, staleness_metrics
from tandem.types import Group

DOC = Path(__file__).parents[2] / "docs" / "staleness.md"
ROW = re.compile(r"^\| (\d+) \| (\d+) \| (\d+) \| ([\d, ]+) \| (\d+) \| ", re.MULTILINE)


def group(versions: list[int]) -> Group:
    return Group(0, "p", (0,), (9,), (len(versions),), (1.0,), (False,), {}, min(versions), max(versions))


def rows() -> list[tuple[int, int, int, list[int], int]]:
    found = ROW.findall(DOC.read_text())
    return [(int(a), int(b), int(c), [int(v) for v in d.split(",")], int(e)) for a, b, c, d, e in found]


def test_the_table_is_there():
    assert len(rows()) >= 6


@pytest.mark.parametrize(("dispatched", "finished", "trained", "versions", "expected"), rows())
def test_a_row_of_the_table(dispatched: int, finished: int, trained: int, versions: list[int], expected: int):
    assert dispatched <= min(versions)
    assert max(versions) <= finished <= trained
    assert staleness(group(versions), trained) == expected


def test_mean_and_max_over_a_step():
    metrics = staleness_metrics([group([3]), group([1, 2]), group([2])], version=3)
    assert metrics["staleness/mean"].value == pytest.approx((0 + 2 + 1) / 3)
    assert metrics["staleness/max"].value == 2
