"""What the records of past steps say of one metric."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence

# The metrics of one step, by name; of all steps, oldest first.
Record = Mapping[str, float]
History = Sequence[Record]


def now(history: History, name: str) -> float | None:
    """The metric of the last record; None where it is not there or not finite."""
    value = history[-1].get(name) if history else None
    return value if value is not None and math.isfinite(value) else None


def column(history: History, name: str) -> list[float]:
    """Every finite value of a metric, oldest first."""
    return [record[name] for record in history if name in record and math.isfinite(record[name])]


def mean_of(history: History, name: str, steps: int) -> float:
    """Mean of a metric's last values; NaN without any, which no comparison is true of."""
    values = column(history, name)[-steps:]
    return statistics.fmean(values) if values else math.nan


def streak(history: History, name: str, holds: Callable[[float], bool]) -> int:
    """In how many last records in a row a condition holds. A record without the metric ends the row."""
    for count in range(len(history)):
        value = history[-1 - count].get(name)
        if value is None or not holds(value):
            return count
    return len(history)
