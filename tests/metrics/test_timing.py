"""The timeline: sums that add up, a drawing in which nothing hides, and a file that survives a kill."""

import asyncio
import json
import logging
import threading

import pytest

from tandem.metrics.timing import Timeline
from tandem.types import Sum


def events(path, kind="X"):
    text = path.read_text()
    if not text.rstrip().endswith("]"):  # as Perfetto does with the file of a killed run
        text = text.rstrip().rstrip(",") + "]"
    return [event for event in json.loads(text) if event["ph"] == kind]


def row_names(path):
    return {
        (event["pid"], event["tid"]): event["args"]["name"] for event in events(path, "M") if "name" in event["args"]
    }


def test_spans_of_one_name_are_summed_until_they_are_drained():
    timeline = Timeline()
    for _ in range(3):
        with timeline.span("actor/infer"):
            pass
    with timeline.span("step"):
        pass
    drained = timeline.drain()
    assert set(drained) == {"time/actor/infer_s", "time/step_s"}
    assert all(isinstance(metric, Sum) and metric.value > 0 for metric in drained.values())
    assert timeline.drain() == {}


def test_a_span_counts_when_its_body_raises(tmp_path):
    timeline = Timeline(tmp_path / "timeline.json")
    with pytest.raises(KeyError), timeline.span("actor/infer"):
        raise KeyError
    assert "time/actor/infer_s" in timeline.drain()
    assert len(events(tmp_path / "timeline.json")) == 1


def test_nested_spans_share_a_row_and_tracks_do_not(tmp_path):
    timeline = Timeline(tmp_path / "timeline.json")
    with timeline.span("actor/step"), timeline.span("actor/infer"), timeline.span("plane/get", track="data"):
        pass
    timeline.close()
    rows = {event["name"]: (event["pid"], event["tid"]) for event in events(tmp_path / "timeline.json")}
    names = row_names(tmp_path / "timeline.json")
    assert rows["actor/step"] == rows["actor/infer"] != rows["plane/get"]
    assert {names[row] for row in rows.values()} == {"actor", "data"}
    inner, outer = (
        next(e for e in events(tmp_path / "timeline.json") if e["name"] == name) for name in rows if name[0] == "a"
    )
    assert outer["ts"] <= inner["ts"]
    assert inner["ts"] + inner["dur"] <= outer["ts"] + outer["dur"]


def test_spans_that_overlap_in_several_tasks_get_rows_of_their_own_and_rows_are_used_again(tmp_path):
    timeline = Timeline(tmp_path / "timeline.json")

    async def roll_out(gate: asyncio.Barrier):
        with timeline.span("rollout/group"):
            await gate.wait()
            with timeline.span("rollout/score"):
                await asyncio.sleep(0)

    async def run():
        for _ in range(2):
            gate = asyncio.Barrier(3)
            await asyncio.gather(*(roll_out(gate) for _ in range(3)))

    asyncio.run(run())
    timeline.close()
    spans = events(tmp_path / "timeline.json")
    assert len(spans) == 12
    assert {event["tid"] for event in spans} == {1, 2, 3}
    for row in (1, 2, 3):
        mine = sorted((e for e in spans if e["tid"] == row and e["name"] == "rollout/group"), key=lambda e: e["ts"])
        assert mine[0]["ts"] + mine[0]["dur"] <= mine[1]["ts"]


def test_threads_have_rows_of_their_own(tmp_path):
    timeline = Timeline(tmp_path / "timeline.json")
    gate = threading.Barrier(4)

    def work():
        with timeline.span("engine/decode"):
            gate.wait()

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(event["tid"] for event in events(tmp_path / "timeline.json")) == [1, 2, 3, 4]


def test_a_killed_run_leaves_a_readable_file_and_a_closed_one_is_plain_json(tmp_path):
    timeline = Timeline(tmp_path / "timeline.json")
    with timeline.span("actor/infer"):
        pass
    timeline.counter("buffer/ready", 3)
    assert len(events(tmp_path / "timeline.json")) == 1  # nothing was closed, nothing flushed by hand
    assert events(tmp_path / "timeline.json", "C")[0]["args"] == {"value": 3}
    timeline.close()
    timeline.close()
    json.loads((tmp_path / "timeline.json").read_text())
    with timeline.span("actor/late"):
        pass
    assert "time/actor/late_s" in timeline.drain()


def test_the_file_is_bounded_and_says_so_once(tmp_path, caplog):
    timeline = Timeline(tmp_path / "timeline.json", max_events=10)
    with caplog.at_level(logging.WARNING):
        for _ in range(50):
            with timeline.span("actor/infer"):
                pass
    timeline.close()
    assert len(json.loads((tmp_path / "timeline.json").read_text())) == 11  # and the closing one
    assert [record.getMessage().count("full at 10 events") for record in caplog.records] == [1]
    assert "time/actor/infer_s" in timeline.drain()


def test_the_timeline_of_an_earlier_process_is_kept(tmp_path):
    for _ in range(3):
        Timeline(tmp_path / "timeline.json").close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["timeline-1.json", "timeline-2.json", "timeline.json"]
