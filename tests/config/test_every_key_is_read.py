"""No knob without effect: every field of every section is read somewhere in the package."""

from __future__ import annotations

import re
from pathlib import Path

import tandem.config.run
from tandem.config.section import Section

PACKAGE = Path(tandem.config.run.__file__).parents[1]
# Read by pattern matching on the section (`case RawReward(normalize_advantages=normalize)`) or to tell variants apart.
MATCHED = {"name"}


def sections(root: type[Section] = Section) -> list[type[Section]]:
    found = root.__subclasses__()
    return found + [deeper for section in found for deeper in sections(section)]


def test_every_field_is_read_outside_the_checks():
    readers = [p for p in PACKAGE.rglob("*.py") if "config" not in p.relative_to(PACKAGE).parts]
    readers += [
        PACKAGE / "config" / name
        for name in ("run.py", "algorithm.py", "asynchrony.py", "data.py", "models.py", "placement.py")
    ]
    text = "\n".join(path.read_text() for path in readers)
    read = (
        set(re.findall(r"\.(\w+)", text))
        | set(re.findall(r"\((\w+)=", text))
        | set(re.findall(r"getattr\(\w+, .(\w+)", text))
        | MATCHED
    )
    unread = {f"{section.__name__}.{field}" for section in sections() for field in section.model_fields} - {
        f"{section.__name__}.{field}" for section in sections() for field in section.model_fields if field in read
    }
    assert unread == set()
