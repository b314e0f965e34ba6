"""Every prompt that was started and not trained on, by name, and how many of each kind."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Literal

from tandem.types import Metrics, Sum

Why = Literal["data_failure", "infrastructure_failure", "no_signal", "stale", "left_over"]
Record = Mapping[str, str | int]


class Accounts:
    """Writes a record for each untrained prompt and counts them for the step's metrics."""

    def __init__(self, write: Callable[[Record], None]) -> None:
        self._write = write
        self._counts: Counter[str] = Counter()

    def untrained(self, index: int, prompt_id: str, why: Why, cause: str = "") -> None:
        """This prompt has had its turn and no step will train on it."""
        self._counts[f"rollout/untrained_{why}"] += 1
        self._write({"index": index, "id": prompt_id, "why": why, "cause": cause})

    def retried(self) -> None:
        """A rollout failed and starts again."""
        self._counts["rollout/retries"] += 1

    def drain(self) -> Metrics:
        """Counts since the last drain."""
        counts, self._counts = self._counts, Counter()
        return {name: Sum(count) for name, count in counts.items()}
