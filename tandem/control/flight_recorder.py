"""What every trained token was computed from, one folder a step, within a budget of bytes on disk."""

from __future__ import annotations

import asyncio
import json
import logging
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from tandem.metrics.reduce import flatten
from tandem.roles import DataPlane
from tandem.types import Group, Metrics

log = logging.getLogger(__name__)
STEP, PARTIAL = "step.json", ".partial"
FORMAT = 1


@dataclass(frozen=True)
class RecordedGroup:
    """Whose samples these rows are. `chunk` is the part of the step that training took them with."""

    index: int
    prompt_id: str
    keys: tuple[int, ...]
    lengths: tuple[int, ...]
    chunk: int


@dataclass(frozen=True)
class StepRecord:
    """What a record says beside the rows. `state` is the algorithm's before the step; `metrics` are what it learned."""

    format: int
    step: int  # as in metrics.jsonl: the first is 1
    version: int  # of the policy that the step began with
    train_policy: bool
    components: tuple[str, ...]
    state: Mapping[str, float]
    groups: tuple[RecordedGroup, ...]
    metrics: Mapping[str, float]


class FlightRecorder:
    """Writes a step's rows with all their columns before the plane forgets them. The oldest steps go first."""

    def __init__(self, directory: Path, *, max_bytes: int, plane: DataPlane) -> None:
        self._directory = directory
        self._max_bytes = max_bytes
        self._plane = plane

    async def record(
        self,
        step: int,
        chunks: Sequence[Sequence[Group]],
        learned: Metrics,
        *,
        version: int,
        train_policy: bool,
        state: Mapping[str, float],
    ) -> None:
        """`chunks` are the step's groups as training took them, in its order; `learned` is what the algorithm told."""
        groups = tuple(
            RecordedGroup(group.index, group.prompt_id, group.keys, group.lengths, number)
            for number, chunk in enumerate(chunks)
            for group in chunk
        )
        components = tuple(chunks[0][0].components)
        said = StepRecord(FORMAT, step, version, train_policy, components, dict(state), groups, flatten(learned))
        write_rows = await self._plane.snapshot([key for group in groups for key in group.keys])

        def write() -> None:
            place = folder(self._directory, step)
            partial = place.with_name(place.name + PARTIAL)
            shutil.rmtree(partial, ignore_errors=True)
            write_rows(partial)
            (partial / STEP).write_text(json.dumps(asdict(said)), encoding="utf-8")
            shutil.rmtree(place, ignore_errors=True)
            partial.rename(place)
            self._keep_budget()

        await asyncio.to_thread(write)

    def forget_after(self, step: int) -> None:
        """Drop the steps that a resumed run trains again."""
        for place in recorded(self._directory):
            if number_of(place) > step:
                shutil.rmtree(place)

    def _keep_budget(self) -> None:
        places = recorded(self._directory)
        sizes = {place: sum(file.stat().st_size for file in place.iterdir()) for place in places}
        total = sum(sizes.values())
        for place in places:
            if total <= self._max_bytes:
                return
            if place == places[-1]:
                log.warning(
                    "the flight record of one step takes %d bytes, more than logger.flight_recorder.max_bytes=%d: none "
                    "is kept; raise it",
                    sizes[place],
                    self._max_bytes,
                )
            shutil.rmtree(place)
            total -= sizes[place]


def read_step(place: Path) -> StepRecord:
    """What a record says beside its rows. ValueError when it is none, or of another format."""
    try:
        text = (place / STEP).read_text(encoding="utf-8")
        found = json.loads(text).get("format")
        if found != FORMAT:
            raise ValueError(f"{place} is a flight record of format {found}, this version reads {FORMAT}")
        return TypeAdapter(StepRecord).validate_json(text)
    except (OSError, json.JSONDecodeError, ValidationError) as error:
        raise ValueError(f"{place} holds no flight record of a step: {error}") from error


def recorded(directory: Path) -> list[Path]:
    """The folders of the steps that are there, oldest first."""
    return sorted(place for place in directory.glob("step_*") if not place.name.endswith(PARTIAL))


def folder(directory: Path, step: int) -> Path:
    """Where the record of a step lies."""
    return directory / f"step_{step:06d}"


def number_of(place: Path) -> int:
    return int(place.name.removeprefix("step_"))
