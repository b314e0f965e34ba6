"""Says a verdict once: when it begins, when it gets worse, when it ends. The rest of the time it is a metric."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping

from tandem.config.health import Health
from tandem.control.health import FINE, SEVERE, WATCHED, Facts, Verdict, judge
from tandem.control.history import Record

log = logging.getLogger(__name__)
FIRST, NEWEST = 10, 1000  # records that a history keeps
WORDS = {FINE: "fine", 1: "warning", SEVERE: "severe"}
Remark = Mapping[str, str | int]


class HealthWatch:
    """The history of a run, and which verdicts have been said."""

    def __init__(self, limits: Health, facts: Facts, write: Callable[[Remark], None]) -> None:
        """`write` keeps each remark: step, verdict, severity, change (begins, gets worse, ends), text."""
        self._limits = limits
        self._facts = facts
        self._write = write
        self._history: list[Record] = []
        self._said: dict[str, int] = {}  # verdicts that have begun and not ended, and their worst severity
        self._quiet: dict[str, int] = {}  # for how many steps each of those has been fine

    def observe(self, step: int, record: Record) -> dict[str, float]:
        """Judge a step. Returns its metrics: health/NAME, 0 fine, 1 warning, 2 severe."""
        found = self._judge(record)
        for name, verdict in found.items():
            if change := self._change(name, verdict):
                self._say(step, name, verdict, change)
        return {f"health/{name}": float(verdict.severity) for name, verdict in found.items()}

    def recall(self, records: Iterable[Record]) -> None:
        """Know the records of a run that goes on: what was said of them is not said again."""
        for record in records:
            for name, verdict in self._judge(record).items():
                self._change(name, verdict)

    def _judge(self, record: Record) -> dict[str, Verdict]:
        self._history.append({name: record[name] for name in WATCHED & record.keys()})
        if len(self._history) > FIRST + NEWEST:
            del self._history[FIRST]
        return judge(self._history, self._facts, self._limits)

    def _change(self, name: str, verdict: Verdict) -> str:
        """What is new about a verdict, or nothing."""
        known = self._said.get(name, FINE)
        if verdict.severity > FINE:
            self._quiet[name] = 0
            self._said[name] = max(known, verdict.severity)
            return "begins" if not known else "gets worse" if verdict.severity > known else ""
        if not known:
            return ""
        self._quiet[name] += 1
        if self._quiet[name] < self._limits.steps:
            return ""
        del self._said[name]
        return "ends"

    def _say(self, step: int, name: str, verdict: Verdict, change: str) -> None:
        severity = WORDS[verdict.severity]
        text = f"fine for {self._limits.steps} steps" if change == "ends" else verdict.text
        remark = {"step": step, "verdict": name, "severity": severity, "change": change, "text": text}
        self._write(remark)
        level = logging.ERROR if verdict.severity == SEVERE else logging.WARNING
        log.log(level, "health: step %d: %s %s (%s): %s", step, name, change, severity, text)
