"""The run directory: one run at a time, records that a resumed run writes again are dropped."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tandem.launch.run_dir import append_record, choose_run_dir, hold, keep_records


def test_a_directory_is_held_by_one_run(tmp_path: Path):
    with hold(tmp_path / "run"), pytest.raises(ValueError, match="in use by another run"), hold(tmp_path / "run"):
        pass
    with hold(tmp_path / "run"):
        pass


def test_a_directory_that_cannot_be_made_is_refused(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="cannot be written"), hold(tmp_path / "file" / "run"):
        pass


def test_new_runs_get_directories_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    first = choose_run_dir(None, "quickstart")
    first.mkdir(parents=True)
    assert choose_run_dir(None, "quickstart") != first
    assert choose_run_dir("here", "quickstart") == Path("here")


def test_records_of_prompts_that_come_again_and_a_torn_line_are_dropped(tmp_path: Path):
    path = tmp_path / "untrained.jsonl"
    for index in (3, 7, 9):
        append_record(path, {"index": index, "id": f"p{index}"})
    with path.open("a") as file:
        file.write('{"index": 10, "i')
    keep_records(path, lambda record: int(str(record["index"])) < 8)
    assert [json.loads(line)["index"] for line in path.read_text().splitlines()] == [3, 7]
    keep_records(tmp_path / "none.jsonl", lambda record: True)
