"""What a run tells of its validations when it ends."""

from __future__ import annotations

import json
from pathlib import Path

from tandem.launch.answers import before_and_after


def test_answers_that_changed_are_told_before_and_after(tmp_path: Path):
    def write(step: int, *responses: str) -> None:
        records = [
            {"id": f"v:{place}", "sample": sample, "question": f"{place}?", "response": text, "reward": step / 4}
            for place, text in enumerate(responses)
            for sample in (0, 1)
        ]
        lines = "".join(json.dumps(record) + "\n" for record in records)
        (tmp_path / f"step_{step:06}.jsonl").write_text(lines + '{"id": "v:9", "sam')  # cut off by a kill

    write(0, "same", "so\nso", "no")
    assert list(before_and_after(tmp_path, 5)) == []
    write(1, "a validation between")
    write(2, "same", "yes", "yes", "new")
    assert list(before_and_after(tmp_path, 1)) == ["question  1?", "  before  so so  (0)", "  after   yes  (0.5)"]
    assert list(before_and_after(tmp_path, 5))[3:] == ["question  2?", "  before  no  (0)", "  after   yes  (0.5)"]
