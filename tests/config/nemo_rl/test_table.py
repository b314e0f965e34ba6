"""The table: a row decides for some key, names keys that there are, and is in docs/migrate.md word for word."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tandem.config.nemo_rl.entry import WORDS, Entry, types_of
from tandem.config.nemo_rl.importing import TABLE

DOCS = Path(__file__).parents[3] / "docs" / "migrate.md"
ENTRIES = [entry for entries in TABLE.values() for entry in entries]
IDS = [entry.keys[0] for entry in ENTRIES]
OURS = re.compile(r"`(seed|run_dir|reference|cluster|[A-Za-z_]+\.[A-Za-z_.*]+)(?:: \w+)?`")


def sample(pattern: str) -> str:
    """A key that this pattern is about."""
    parts = ["some.thing" if part == "**" else WORDS.get(part, (part,))[0] for part in pattern.split(".")]
    return ".".join(parts).replace("*", "some")


def documented(heading: str) -> list[tuple[str, str, str]]:
    """The rows below a heading of docs/migrate.md."""
    section = DOCS.read_text().partition(f"### {heading}\n")[2].partition("\n#")[0]
    lines = [line for line in section.splitlines() if line.startswith("| `")]
    return [tuple(cell.strip() for cell in line.strip("|").split("|")) for line in lines]  # type: ignore[misc]


@pytest.mark.parametrize("heading", TABLE)
def test_the_docs_hold_the_table(heading: str):
    told = [(", ".join(f"`{key}`" for key in entry.keys), entry.fate, entry.text) for entry in TABLE[heading]]
    assert documented(heading) == told


def test_the_docs_hold_no_other_table_of_keys():
    headings = re.findall(r"^### (.+)$", DOCS.read_text().partition("## From NeMo-RL")[2], re.MULTILINE)
    assert headings[: len(TABLE)] == list(TABLE)


@pytest.mark.parametrize("entry", ENTRIES, ids=IDS)
def test_no_row_is_hidden_behind_another(entry: Entry):
    for pattern in entry.keys:
        key = sample(pattern)
        first = next(other for other in ENTRIES if other.matches(key))
        assert first is entry, f"{key} is decided by {first.keys}"


@pytest.mark.parametrize("entry", ENTRIES, ids=IDS)
def test_keys_that_a_row_names_as_ours_are_there(entry: Entry):
    for name in OURS.findall(entry.text):
        key = name.replace("ALGO", "ppo").replace("MODEL", "policy").removesuffix(".*")
        assert types_of(key), f"no key {name}"
