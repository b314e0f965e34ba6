"""What `tandem eval --data` names, as an override of `data.validation`: public sets by name, files, both."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path

# The split of a public set that one evaluates on, where it has several.
SPLITS = {"gsm8k": "test", "arithmetic": "validation"}
PUBLIC = ("gsm8k", "dapo_math_17k", "aime_2024", "math_500", "openmathinstruct2")


def data_override(given: Sequence[str]) -> str:
    """The override for these `--data`: NAME, NAME:PATH (a local copy of that set) or PATH. Several are named sets."""
    sources = [source_of(one) for one in given]
    if len(sources) == 1:
        return f"data.validation={sources[0][1]}"
    named: dict[str, str] = {}
    for name, source in sources:
        number = 2
        unique = name
        while unique in named:
            unique, number = f"{name}-{number}", number + 1
        named[unique] = source
    return f"data.validation={{name: sets, sets: {{{', '.join(f'{name}: {text}' for name, text in named.items())}}}}}"


def source_of(given: str) -> tuple[str, str]:
    """A name for a set, and its section in YAML. ValueError when it is neither a known name nor a file."""
    name, colon, path = given.partition(":")
    if name in PUBLIC and colon:
        return name, f"{{name: {name}, path: {json.dumps(path)}}}"
    if given in (*PUBLIC, "arithmetic"):
        split = f", split: {SPLITS[given]}" if given in SPLITS else ""
        return given, f"{{name: {given}{split}}}"
    file = Path(given).expanduser()
    if not file.exists():
        known = ", ".join((*PUBLIC, "arithmetic"))
        raise ValueError(f"--data {given}: there is no such file or folder, and no public set of this name ({known})")
    return re.sub(r"[^A-Za-z0-9_-]+", "-", file.stem) or "rows", f"{{name: file, path: {json.dumps(given)}}}"
