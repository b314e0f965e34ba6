"""What a run survives, and when it gives up: retries with back-off, budgets, and the cause it ends with."""

from __future__ import annotations

from collections.abc import Mapping

from tandem.config.asynchrony import Failures
from tandem.types import RolloutFailed


def backoff_s(config: Failures, attempt: int) -> float:
    """Seconds to wait after the `attempt`-th failure of the machinery: doubling, up to a limit."""
    return min(config.backoff_base_s * 2 ** (attempt - 1), config.max_backoff_s)


class Budgets:
    """Counts the prompts that were given up. Past a budget a ValueError ends the run with the first cause.

    Data failures count over the whole run: the data or the reward is at fault. Failures of the machinery count in a
    row: any finished group shows that it works again.
    """

    def __init__(self, config: Failures) -> None:
        self._config = config
        self.skipped = 0
        self.consecutive_dropped = 0
        self._first_skip = ""
        self._first_drop = ""

    def finished(self) -> None:
        """A rollout has ended well."""
        self.consecutive_dropped = 0
        self._first_drop = ""

    def given_up(self, failure: RolloutFailed) -> None:
        """A prompt's last attempt has failed."""
        if failure.kind == "data":
            self.skipped += 1
            self._first_skip = self._first_skip or str(failure)
            allowed = self._config.max_skipped_prompts
            if self.skipped > allowed:
                raise ValueError(exceeded(self.skipped, "", "max_skipped_prompts", allowed, self._first_skip))
        else:
            self.consecutive_dropped += 1
            self._first_drop = self._first_drop or str(failure)
            allowed, count = self._config.max_consecutive_dropped_prompts, self.consecutive_dropped
            if count > allowed:
                name = "max_consecutive_dropped_prompts"
                raise ValueError(exceeded(count, " in a row", name, allowed, self._first_drop))

    def state(self) -> dict[str, int]:
        return {"skipped": self.skipped, "consecutive_dropped": self.consecutive_dropped}

    def restore(self, state: Mapping[str, int]) -> None:
        self.skipped, self.consecutive_dropped = state["skipped"], state["consecutive_dropped"]


def exceeded(count: int, row: str, name: str, allowed: int, first: str) -> str:
    """Why the run ends."""
    return (
        f"{count} prompts failed{row}, failures.{name}={allowed}; the first cause: {first}. "
        f"Mend it, or raise failures.{name}"
    )
