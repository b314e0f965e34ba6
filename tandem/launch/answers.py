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
    changed = [key for key in first if key in last and first[key]["response"] != last[key]["response"]]
    for key in changed[:count]:
        yield f"question  {first[key]['question']}"
        yield f"  before  {' '.join(first[key]['response'].split())}  ({first[key]['reward']:g})"
        yield f"  after   {' '.join(last[key]['response'].split())}  ({last[key]['reward']:g})"


def read_answers(file: Path) -> dict[tuple[str, str], dict]:
    """The first answer to each prompt of one validation, by set ("" where there is one alone) and prompt id."""
    records = map(json.loads, file.read_text(encoding="utf-8").splitlines())
    return {(record.get("set", ""), record["id"]): record for record in records if not record["sample"]}
