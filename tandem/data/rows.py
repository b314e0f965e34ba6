"""Records of any source to rows, a question and its answer each; every way a record can be wrong has its message."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

log = logging.getLogger(__name__)

ROLES = ("system", "user", "assistant")


class BadRow(ValueError):
    """One record is wrong. The recipe says whether that is an error or a counted skip (`data.on_bad_row`)."""


@dataclass(frozen=True)
class Message:
    """One turn of a chat."""

    role: str
    content: str


@dataclass(frozen=True)
class Row:
    """One question of a data set and its reference answer. `id` is unique within the set.

    `before` are messages that come before the question, which is then the last message of the record's prompt.
    """

    id: str
    question: str
    answer: str
    before: tuple[Message, ...] = ()
    template: str | None = None  # the source's own; None: data.prompt_template
    source: str = ""  # its name in a mixture
    place: str = field(default="", compare=False)  # file and line, for messages

    @property
    def shown(self) -> str:
        """How messages name it."""
        return f"{self.id!r} ({self.place})" if self.place else repr(self.id)


@dataclass(frozen=True)
class Record:
    """What a source holds at one place. `place` names it in messages, `id` where it has no id of its own."""

    place: str
    id: str
    value: object  # a mapping of fields if all is well, a BadRow if it could not be read


@dataclass(frozen=True)
class Fields:
    """Where a record keeps what is wanted. A dotted name goes into objects: `reward_model.ground_truth`."""

    prompt: str
    answer: str
    id: str | None = None
    needs_id: bool = True  # else the place names a record that has no such field
    answer_of: Callable[[str], str] | None = None  # the part of the answer to compare with; raises BadRow

    def columns(self, there: Collection[str]) -> list[str] | None:
        """Which of a table's columns to read. None: all, for one is missing and a message will name those there are."""
        id_name = self.id or "id"
        heads = {name: name if name in there else name.split(".")[0] for name in (self.prompt, self.answer, id_name)}
        needed = [heads[self.prompt], heads[self.answer], *([heads[id_name]] if self.id and self.needs_id else [])]
        if not set(needed) <= set(there):
            return None
        return sorted({*needed, heads[id_name]} & set(there))


@dataclass(frozen=True)
class Reading:
    """How records become rows."""

    fields: Fields
    on_bad_row: Literal["error", "skip"]
    drop_repeats: bool = False
    max_rows: int | None = None
    template: str | None = None


def read_rows(records: Iterable[Record], reading: Reading, what: str) -> list[Row]:
    """The rows of a source, which messages call `what`. ValueError for what the recipe does not skip, or for none."""
    rows: list[Row] = []
    bad: list[BadRow] = []
    places: dict[str, str] = {}
    seen: set[tuple[object, ...]] = set()
    repeats = count = 0
    for record in records:
        count += 1
        try:
            row = row_of(record, reading)
            if reading.drop_repeats and (key := (row.question, row.answer, row.before)) in seen:
                repeats += 1
            elif row.id in places:
                raise BadRow(
                    f"{record.place}: id {row.id!r} was already used at {places[row.id]}: ids must differ; rename one,"
                    " or take ids from another field (id_field)"
                )
            else:
                places[row.id] = record.place
                rows.append(row)
                if reading.drop_repeats:
                    seen.add(key)
        except BadRow as error:
            if reading.on_bad_row == "error":
                raise BadRow(f"{error} (data.on_bad_row=skip leaves such rows out)") from error
            bad.append(error)
        if len(rows) == reading.max_rows:
            break
    if repeats:
        log.info("%s: %d of %d rows are repeats of others, taken once", what, repeats, count)
    if bad and rows:
        log.warning("%s: %d of %d rows skipped, as data.on_bad_row=skip says; first %s", what, len(bad), count, bad[0])
    if not rows:
        example = example_of(reading.fields)
        why = f"none of its {count} rows can be used: first {bad[0]}" if bad else f"it needs rows, such as {example}"
        raise ValueError(f"{what} is empty: {why}")
    return rows


def row_of(record: Record, reading: Reading) -> Row:
    """One record as a row. BadRow when it is none."""
    fields, place = reading.fields, record.place
    if isinstance(record.value, BadRow):
        raise record.value
    if not isinstance(record.value, Mapping):
        raise BadRow(f"{place}: is {kind(record.value)}, not a JSON object. Wanted: {example_of(fields)}")
    before, question = prompt_of(value_of(record.value, fields.prompt, key="prompt_field", place=place), fields, place)
    found = value_of(record.value, fields.answer, key="answer_field", place=place)
    answer = text_of(found)
    if answer is None:
        raise BadRow(f"{place}: field {fields.answer!r} is {kind(found)}; an answer must be a text or a number")
    if fields.answer_of is not None:
        try:
            answer = fields.answer_of(answer)
        except BadRow as error:
            raise BadRow(f"{place}: field {fields.answer!r} {error}") from error
    row = Row(id_of(record.value, fields, record), question, answer, before, reading.template, place=place)
    if not all(map(writable, (row.id, question, answer, *(message.content for message in before)))):
        raise BadRow(f"{place}: holds half of a surrogate pair (as \\ud83d), which no text in UTF-8 can: repair it")
    return row


def id_of(value: Mapping[str, object], fields: Fields, record: Record) -> str:
    """The record's own id, or its place."""
    name = fields.id or "id"
    if not (fields.id and fields.needs_id) and missing(value, name):
        return record.id
    found = value_of(value, name, key="id_field", place=record.place)
    given = text_of(found)
    if given is None:
        raise BadRow(f"{record.place}: field {name!r} is {kind(found)}; an id must be a text or a number")
    return given


def prompt_of(value: object, fields: Fields, place: str) -> tuple[tuple[Message, ...], str]:
    """The messages before the question, and the question: a text, or the last of a list of messages."""
    where = f"{place}: field {fields.prompt!r}"
    if isinstance(value, list) and value:
        messages = [message_of(entry, f"{where}, message {number}") for number, entry in enumerate(value, start=1)]
        if messages[-1].role != "user":
            raise BadRow(f"{where} ends with a message of {messages[-1].role!r}; the last one must be the user's")
        return tuple(messages[:-1]), messages[-1].content
    if not isinstance(value, str) or not value.strip():
        came = "empty" if value in ("", []) or isinstance(value, str) else kind(value)
        raise BadRow(f"{where} is {came}; a question must be a text that says something, or a list of messages")
    return (), value


def message_of(entry: object, where: str) -> Message:
    """One message of a prompt that is a list of them."""
    if not isinstance(entry, Mapping):
        raise BadRow(f'{where} is {kind(entry)}; wanted {{"role": "user", "content": "What is 2 + 3?"}}')
    role, content = entry.get("role"), entry.get("content")
    if role not in ROLES:
        raise BadRow(f"{where} has the role {role!r}; wanted one of {', '.join(ROLES)}")
    if not isinstance(content, str) or not content.strip():
        came = "empty" if isinstance(content, str) else kind(content)
        raise BadRow(f"{where}: its content is {came}; wanted a text that says something")
    if more := [name for name, value in entry.items() if name not in ("role", "content") and value is not None]:
        raise BadRow(f"{where} has {', '.join(map(repr, more))} beside role and content, which nothing here reads")
    return Message(str(role), content)


def missing(value: Mapping[str, object], name: str) -> bool:
    """Whether a record has no field of this name. A name with dots that is a field's own name is that field."""
    if name in value:
        return False
    first, dot, rest = name.partition(".")
    inner = value.get(first)
    return not (dot and isinstance(inner, Mapping)) or missing(inner, rest)


def value_of(value: Mapping[str, object], name: str, *, key: str, place: str) -> object:
    """A field of a record by its name or dotted path. BadRow naming the fields that there are."""
    if missing(value, name):
        there = ", ".join(map(repr, value)) or "none"
        raise BadRow(f"{place}: has no field {name!r}; its fields: {there}. Set `{key}` to the name of the one meant")
    if name in value:
        return value[name]
    first, _, rest = name.partition(".")
    inner = value[first]
    assert isinstance(inner, Mapping), "it is not missing"
    return value_of(inner, rest, key=key, place=place)


def writable(text: str) -> bool:
    """Whether a text can be written in UTF-8. JSON's escapes can say halves of characters, which cannot."""
    if text.isascii():
        return True
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def text_of(value: object) -> str | None:
    """A text as it is, a number as JSON writes it, None for anything else."""
    if isinstance(value, str):
        return value
    return json.dumps(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def kind(value: object) -> str:
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
        case dict():
            return "an object"
    return f"a {type(value).__name__}"


def example_of(fields: Fields) -> str:
    """A record as it should be."""
    record: dict[str, object] = {}
    for name, value in ((fields.prompt, "What is 2 + 3?"), (fields.answer, "5")):
        at = record
        *parents, last = name.split(".")
        for parent in parents:
            inner = at.setdefault(parent, {})
            assert isinstance(inner, dict), "made here"
            at = inner
        at[last] = value
    return json.dumps(record)
