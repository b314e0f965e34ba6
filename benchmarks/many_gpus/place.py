"""What a part is told: how many GPUs there are, and where it leaves what it finds."""

from __future__ import annotations

import importlib.util
import json
import shutil
from collections.abc import Sequence
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
    seconds: float  # that the part has

    @property
    def device(self) -> str:
        return "cpu" if self.cpu else "cuda"

    @property
    def patience_s(self) -> float:
        """After which what has not come will not come: there is time left then to say where it stands."""
        return 0.8 * self.seconds

    def forget(self, part: str, kept: Sequence[str]) -> None:
        """What the part left here in a run before: files and directories, and its lines of the summary."""
        for path in (self.out / name for name in kept):
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        notes = self.out / NOTES
        if notes.exists():
            lines = notes.read_text(encoding="utf-8").splitlines(keepends=True)
            notes.write_text("".join(line for line in lines if json.loads(line)["part"] != part), encoding="utf-8")

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
