"""What a part is told: how many GPUs there are, and where it leaves what it finds."""

from __future__ import annotations

import importlib.util
import json
from dataclasses import dataclass
from pathlib import Path

NOTES = "notes.jsonl"


@dataclass(frozen=True)
class Place:
    """`gpus` are places for gloo ranks on a CPU, where shapes are tiny: that tries the code and measures nothing."""

    gpus: int
    cpu: bool
    out: Path
    scratch: Path  # for what nobody wants to keep: a model

    @property
    def device(self) -> str:
        return "cpu" if self.cpu else "cuda"

    def note(self, part: str, text: str) -> None:
        """A line for the summary: what was left out, and what it needs."""
        with (self.out / NOTES).open("a", encoding="utf-8") as file:
            print(json.dumps({"part": part, "text": text}), file=file)

    def lacks(self, part: str, package: str, way_out: str) -> bool:
        """Whether a package is missing, which is noted then."""
        if importlib.util.find_spec(package) is not None:
            return False
        self.note(part, f"not run: the package {package} is not installed here ({way_out})")
        return True
