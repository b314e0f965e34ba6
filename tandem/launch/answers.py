"""The same validation questions before and after training, for the end of a run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from tandem.report.run import number, paired, read_answers


def before_and_after(validation: Path, count: int) -> Iterator[str]:
    """Up to `count` questions whose answer has changed between the first and the last validation, as lines."""
    answers = read_answers(validation, [])
    if len(answers) < 2:
        return
    (_, first), (_, last) = answers
    changed = [(then, now) for then, now in paired(first, last) if then["response"] != now["response"]]
    for then, now in changed[:count]:
        yield f"question  {then['question']}"
        for word, record in (("before", then), ("after ", now)):
            yield f"  {word}  {' '.join(str(record['response']).split())}  ({number(record['reward']) or 0.0:g})"
