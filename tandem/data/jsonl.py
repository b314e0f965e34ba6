"""JSON-lines files of questions and answers; every way such a file can be wrong has its own message."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tandem.config.run import JsonlData


@dataclass(frozen=True)
class Row:
    """One question of a data set and its reference answer. `id` is unique within the set."""

    id: str
    question: str
    answer: str


def read_jsonl(config: JsonlData) -> list[Row]:
    """The rows of a file: a row's id is its field `id`, or else `<file name>:<line>`. Blank lines are skipped."""
    path = Path(config.path).expanduser()
    if not path.is_file():
        what = "is a directory" if path.is_dir() else "does not exist"
        raise ValueError(
            f"data file {config.path} {what} (looked at {path.resolve()}): set `path` to a JSON-lines file"
        )
    places: dict[str, int] = {}
    rows = []
    for number, line in _lines(path):
        row = _row(config, line, name=path.name, number=number)
        if row.id in places:
            raise ValueError(
                f"{path}:{number}: id {row.id!r} was already used in line {places[row.id]}: ids must differ;"
                " rename one, or remove the field `id` to use line numbers"
            )
        places[row.id] = number
        rows.append(row)
    if not rows:
        raise ValueError(f"data file {path} is empty: it needs one JSON object a line, such as {_example(config)}")
    return rows


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    with path.open("rb") as file:
        for number, raw in enumerate(file, start=1):
            try:
                line = raw.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                raise ValueError(f"{path}:{number}: is not UTF-8 ({error}): convert the file to UTF-8") from error
            if line.strip():
                yield number, line


def _row(config: JsonlData, line: str, *, name: str, number: int) -> Row:
    place = f"{config.path}:{number}"
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{place}: is not JSON ({error}): {_shorten(line)} Wanted: {_example(config)}") from error
    if not isinstance(record, dict):
        raise ValueError(f"{place}: is {_kind(record)}, not a JSON object. Wanted: {_example(config)}")
    question = _field(record, config.prompt_field, key="prompt_field", place=place)
    if not isinstance(question, str) or not question.strip():
        came = "empty" if isinstance(question, str) else _kind(question)
        raise ValueError(
            f"{place}: field {config.prompt_field!r} is {came}; a question must be a text that says something"
        )
    answer = _text(_field(record, config.answer_field, key="answer_field", place=place))
    if answer is None:
        came = _kind(record[config.answer_field])
        raise ValueError(f"{place}: field {config.answer_field!r} is {came}; an answer must be a text or a number")
    given = _text(record.get("id", f"{name}:{number}"))
    if given is None:
        raise ValueError(f"{place}: field 'id' is {_kind(record['id'])}; an id must be a text or a number")
    return Row(given, question, answer)


def _field(record: dict[str, object], name: str, *, key: str, place: str) -> object:
    if name not in record:
        there = ", ".join(map(repr, record)) or "none"
        raise ValueError(
            f"{place}: has no field {name!r}; its fields: {there}. Set `{key}` to the name of the one meant"
        )
    return record[name]


def _text(value: object) -> str | None:
    """A text as it is, a number as JSON writes it, None for anything else."""
    if isinstance(value, str):
        return value
    return json.dumps(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _kind(value: object) -> str:
    """What JSON calls a value, for a message."""
    match value:
        case None:
            return "null"
        case bool():
            return "true or false"
        case int() | float():
            return "a number"
        case str():
            return "a text"
        case list():
            return "a list"
    return "an object"


def _shorten(line: str) -> str:
    text = line.strip()
    return repr(text if len(text) <= 60 else f"{text[:57]}...") + "."


def _example(config: JsonlData) -> str:
    return json.dumps({config.prompt_field: "What is 2 + 3?", config.answer_field: "5"})
