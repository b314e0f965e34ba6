"""Records of local files: JSON lines, CSV and parquet by the file's ending; a folder stands for the files in it."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterator
from pathlib import Path

from tandem.data.parquet import parquet_records
from tandem.data.rows import BadRow, Fields, Record

LONGEST_CELL = 1 << 30  # characters of a CSV cell; the csv module's own limit of 131,072 is short for a long prompt


def file_records(given: str, fields: Fields) -> Iterator[Record]:
    """The records of a file, or of a folder's files in the order of their names; `fields` are what will be read."""
    for path in files_of(given):
        yield from READERS[path.suffix.lower()](path, fields)


def files_of(given: str) -> list[Path]:
    """The file of this path, or the data files in the folder. ValueError when there is none."""
    path = Path(given).expanduser()
    if path.is_file():
        if path.suffix.lower() not in READERS:
            raise ValueError(
                f"data file {given} has the ending {path.suffix!r}, which is no known format: wanted one of {ENDINGS}"
            )
        return [path]
    if not path.is_dir():
        raise ValueError(
            f"data file {given} does not exist (looked at {path.resolve()}): set `path` to a file ({ENDINGS})"
        )
    files = sorted(p for p in path.iterdir() if p.suffix.lower() in READERS and not p.name.startswith((".", "_")))
    kinds = sorted({file.suffix.lower() for file in files})
    if not files:
        raise ValueError(
            f"data folder {given} holds no data files: set `path` to a file or a folder of files ({ENDINGS})"
        )
    if len(kinds) > 1:
        raise ValueError(
            f"data folder {given} holds files of several kinds ({', '.join(kinds)}): set `path` to one file, or to a"
            " folder of one kind"
        )
    return files


def json_records(path: Path, fields: Fields) -> Iterator[Record]:
    """One object a line, or one list of objects. A line that cannot be read is a bad row. Blank lines are skipped."""
    if first_character(path) == b"[":
        yield from listed(path)
        return
    with path.open("rb") as file:
        for number, raw in enumerate(file, start=1):
            if raw.strip():
                yield Record(f"{path}:{number}", f"{path.name}:{number}", json_value(path, number, raw))


def json_value(path: Path, number: int, raw: bytes) -> object:
    """What a line says, or the BadRow that it is."""
    try:
        line = decoded(path, number, raw)
    except BadRow as error:
        return error
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as error:  # ValueError: of a number with thousands of digits too
        return BadRow(f"{path}:{number}: is not JSON ({error}): {shortened(line)} Wanted: one JSON object a line")


def first_character(path: Path) -> bytes:
    """The first byte that is no white space; of a file of one JSON object a line it is a brace."""
    with path.open("rb") as file:
        while (byte := file.read(1)).isspace() or byte in (b"\xef", b"\xbb", b"\xbf"):
            continue
    return byte if path.suffix.lower() == ".json" else b""


def listed(path: Path) -> Iterator[Record]:
    """The entries of one JSON list."""
    text = "".join(line for _, line in lines(path))
    try:
        entries = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}:{error.lineno}: is not JSON ({error.msg})") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: is not JSON ({error})") from error
    for number, entry in enumerate(entries, start=1):
        yield Record(f"{path}, entry {number}", f"{path.name}:{number}", entry)


def csv_records(path: Path, fields: Fields) -> Iterator[Record]:
    """Comma-separated cells under a header. Every value is a text."""
    csv.field_size_limit(LONGEST_CELL)
    reader = csv.reader((line for _, line in lines(path)), strict=True)
    try:
        header = next(reader, [])
        if twice := [name for name in header if header.count(name) > 1]:
            raise ValueError(f"{path}:1: the header names the column {twice[0]!r} twice: rename one")
        begins = reader.line_num + 1
        for cells in reader:
            place, name = f"{path}:{begins}", f"{path.name}:{begins}"
            begins = reader.line_num + 1
            if not cells:
                continue
            if len(cells) != len(header):
                bad = BadRow(f"{place}: has {len(cells)} cells, but the header names {len(header)} columns")
                yield Record(place, name, bad)
                continue
            yield Record(place, name, dict(zip(header, cells, strict=True)))
    except csv.Error as error:
        raise ValueError(f"{path}:{reader.line_num}: is not CSV ({error})") from error


def lines(path: Path) -> Iterator[tuple[int, str]]:
    """The lines of a text file with their numbers. ValueError where one is not UTF-8."""
    with path.open("rb") as file:
        for number, raw in enumerate(file, start=1):
            yield number, decoded(path, number, raw)


def decoded(path: Path, number: int, raw: bytes) -> str:
    """A line as text. BadRow where it is not UTF-8."""
    try:
        return raw.decode("utf-8-sig" if number == 1 else "utf-8")
    except UnicodeDecodeError as error:
        raise BadRow(f"{path}:{number}: is not UTF-8 ({error}): convert the file to UTF-8") from error


def shortened(line: str) -> str:
    """A line for a message."""
    text = line.strip()
    return repr(text if len(text) <= 60 else f"{text[:57]}...") + "."


READERS: dict[str, Callable[[Path, Fields], Iterator[Record]]] = {
    ".jsonl": json_records,
    ".ndjson": json_records,
    ".json": json_records,
    ".csv": csv_records,
    ".parquet": parquet_records,
}
ENDINGS = ", ".join(READERS)
