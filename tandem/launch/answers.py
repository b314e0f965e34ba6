"""The same validation questions before and after training, for the end of a run."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path


def before_and_after(validation: Path, count: int) -> Iterator[str]:
    """Up to `count` questions whose answer has changed between the first and the last validation, as lines."""
    files = sorted(validation.glob("step_*.jsonl"))
    if len(files) < 2:
        return
    first, last = read_answers(files[0]), read_answers(files[-1])
    changed = [id_ for id_ in first if id_ in last and first[id_]["response"] != last[id_]["response"]]
    for id_ in changed[:count]:
        yield f"question  {first[id_]['question']}"
        yield f"  before  {' '.join(first[id_]['response'].split())}  ({first[id_]['reward']:g})"
        yield f"  after   {' '.join(last[id_]['response'].split())}  ({last[id_]['reward']:g})"


def read_answers(file: Path) -> dict[str, dict]:
    """The answers of one validation by prompt id."""
    records = map(json.loads, file.read_text(encoding="utf-8").splitlines())
    return {record["id"]: record for record in records}
