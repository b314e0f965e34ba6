"""Records of steps: whole, within their budget, the oldest first, none of what a resumed run trains again."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch

from tandem.control.flight_recorder import FlightRecorder, folder, number_of, read_step, recorded
from tandem.plane.files import read_rows
from tandem.plane.memory import MemoryPlane
from tandem.types import Group, Mean

GROUPS = [
    Group(
        index,
        f"p{index}",
        (2 * index, 2 * index + 1),
        (3, 2),
        (2, 1),
        (1.0, 0.0),
        (False, True),
        {"a": (1.0, 0.0)},
        4,
        4,
    )
    for index in (7, 8)
]


def record(directory: Path, steps: int, *, max_bytes: int = 1 << 30) -> FlightRecorder:
    async def run() -> FlightRecorder:
        plane = MemoryPlane()
        for group in GROUPS:
            await plane.put(group.keys, {"tokens": [torch.arange(3), torch.arange(2)]})
        recorder = FlightRecorder(directory, max_bytes=max_bytes, plane=plane)
        told = {"version": 4, "train_policy": True, "state": {"kl_coefficient": 0.1}}
        for step in range(1, steps + 1):
            learned = {"actor/loss": Mean(1.0, 4), "critic/loss": Mean(float("nan"), 1)}
            await recorder.record(step, [GROUPS[:1], GROUPS[1:]], learned, **told)
        return recorder

    return asyncio.run(run())


def kept(directory: Path) -> list[int]:
    return [number_of(place) for place in recorded(directory)]


def bytes_of(directory: Path) -> int:
    return sum(file.stat().st_size for file in directory.rglob("*") if file.is_file())


def test_a_record_says_whose_rows_it_holds_and_what_was_learned(tmp_path: Path):
    record(tmp_path, 1)
    said = read_step(folder(tmp_path, 1))
    assert [(g.index, g.prompt_id, g.keys, g.lengths, g.chunk) for g in said.groups] == [
        (7, "p7", (14, 15), (3, 2), 0),
        (8, "p8", (16, 17), (3, 2), 1),
    ]
    assert (said.step, said.version, said.train_policy, said.components) == (1, 4, True, ("a",))
    assert said.state == {"kl_coefficient": 0.1}
    assert said.metrics["actor/loss"] == 0.25
    assert said.metrics["critic/loss"] != said.metrics["critic/loss"], "NaN stays NaN"
    keys, tokens = read_rows(folder(tmp_path, 1))["tokens"]
    assert sorted(keys) == [14, 15, 16, 17]
    assert {len(row) for row in tokens} == {2, 3}


def test_the_oldest_steps_go_and_the_budget_holds(tmp_path: Path):
    record(tmp_path / "all", 5)
    one = bytes_of(folder(tmp_path / "all", 1))
    record(tmp_path / "some", 5, max_bytes=2 * one + one // 2)
    assert kept(tmp_path / "all") == [1, 2, 3, 4, 5]
    assert kept(tmp_path / "some") == [4, 5]
    assert bytes_of(tmp_path / "some") <= 2 * one + one // 2


def test_a_step_beyond_the_budget_is_told_and_not_kept(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    record(tmp_path, 1, max_bytes=10)
    assert kept(tmp_path) == []
    assert "logger.flight_recorder.max_bytes=10" in caplog.text


def test_a_resumed_run_forgets_the_steps_that_it_trains_again(tmp_path: Path):
    record(tmp_path, 4).forget_after(2)
    assert kept(tmp_path) == [1, 2]


@pytest.mark.parametrize(
    ("text", "complaint"), [(None, "no flight record"), ("{", "no flight record"), ('{"format": 0}', "of format 0")]
)
def test_what_is_no_record_is_refused(tmp_path: Path, text: str | None, complaint: str):
    if text is not None:
        (tmp_path / "step.json").write_text(text)
    with pytest.raises(ValueError, match=complaint):
        read_step(tmp_path)
