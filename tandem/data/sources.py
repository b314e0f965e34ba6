"""Rows of every source that a recipe can name."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Literal

from tandem.config.data import ArithmeticData, FileData, HubData, MixtureData, Preset, ReasoningGymData, Source
from tandem.data.arithmetic import problem
from tandem.data.files import file_records
from tandem.data.hub import hub_records
from tandem.data.presets import public_set
from tandem.data.reasoning_gym import reasoning_gym_rows
from tandem.data.rows import Fields, Reading, Row, read_rows

BadRows = Literal["error", "skip"]


def rows_of(
    source: Source | MixtureData, seed: int, *, on_bad_row: BadRows = "error", key: str = "data.train"
) -> list[Row]:
    """The rows of a source, which stands at `key` of the recipe. Only the built-in problems depend on the seed."""
    match source:
        case ArithmeticData():
            drawn = (problem(seed, index, source.split) for index in range(source.size))
            return [Row(f"{source.split}:{index}", one.question, str(one.answer)) for index, one in enumerate(drawn)]
        case FileData():
            reading = reading_of(source, on_bad_row)
            return read_rows(file_records(source.path, reading.fields), reading, f"data file {source.path}")
        case HubData():
            reading = reading_of(source, on_bad_row)
            records = hub_records(source, reading.fields, f"{key}.name=file and {key}.path=FILE")
            return read_rows(records, reading, f"data set {source.dataset} ({source.split})")
        case MixtureData():
            return list(mixed(source, seed, on_bad_row, key))
        case ReasoningGymData():
            return list(reasoning_gym_rows(source, key))
        case Preset():
            return preset_rows(source, on_bad_row, key)


def reading_of(source: FileData | HubData, on_bad_row: BadRows) -> Reading:
    """How the records of a file or a hub's set become rows."""
    fields = Fields(source.prompt_field, source.answer_field, source.id_field)
    return Reading(fields, on_bad_row, source.drop_repeats, source.max_rows, source.prompt_template)


def preset_rows(source: Preset, on_bad_row: BadRows, key: str) -> list[Row]:
    """The rows of a public data set, from a local copy if the recipe gives one."""
    known = public_set(source)
    reading = Reading(known.fields, on_bad_row, known.drop_repeats, source.max_rows, source.prompt_template)
    if source.path is not None:
        return read_rows(file_records(source.path, known.fields), reading, f"data file {source.path}")
    records = hub_records(known.on_hub(source.revision), known.fields, f"{key}.path=FILE")
    return read_rows(records, reading, f"data set {known.dataset} ({known.split})")


def mixed(mixture: MixtureData, seed: int, on_bad_row: BadRows, key: str) -> Iterator[Row]:
    """The rows of all sources, one source after the other; an id begins with the name of its source."""
    for name, source in mixture.sources.items():
        for row in rows_of(source, seed, on_bad_row=on_bad_row, key=f"{key}.sources.{name}"):
            yield replace(row, id=f"{name}/{row.id}", source=name)
