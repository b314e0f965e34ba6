"""What a check says: how a thing is, and what mends it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

State = Literal["ok", "warning", "broken", "absent"]
STYLES: dict[State, str] = {"ok": "green", "warning": "yellow", "broken": "red", "absent": "dim"}


@dataclass(frozen=True)
class Finding:
    """One line of the report. `fix` says what to do, "" where nothing is to be done."""

    thing: str
    state: State
    says: str
    fix: str = ""
    needed: bool = True  # a broken thing that is needed makes the exit code 1
