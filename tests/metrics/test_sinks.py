"""Sinks: what is written can be read back, and a resumed run has every step once."""

import importlib.util
import json

import pytest

from tandem.config.run import Logger, Mlflow, Wandb
from tandem.metrics.reduce import flatten
from tandem.metrics.sinks import JsonLines, TensorBoard, first_value, open_sinks
from tandem.types import Max, Mean, Sum


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def write_steps(path, steps, *, resume_step=None, value=1.0):
    sink = JsonLines(path, resume_step=resume_step)
    for step in steps:
        sink.write(step, {"rollout/reward": value})
    sink.close()


def test_metrics_become_a_flat_record_sorted_by_name():
    record = flatten({"b": Mean(3.0, 2.0), "a": Sum(2), "c": Max(7.0)})
    assert record == {"a": 2.0, "b": 1.5, "c": 7.0}
    assert list(record) == ["a", "b", "c"]


def test_each_record_is_on_disk_at_once_and_what_json_lacks_is_null(tmp_path):
    sink = JsonLines(tmp_path / "metrics.jsonl")
    sink.write(1, {"a": 0.5, "b": float("nan"), "c": float("-inf")})
    assert lines(tmp_path / "metrics.jsonl") == [{"step": 1, "a": 0.5, "b": None, "c": None}]


def test_a_resumed_run_drops_the_steps_after_its_checkpoint_and_appends(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write_steps(path, range(1, 8))
    write_steps(path, range(6, 9), resume_step=5, value=2.0)
    assert [(line["step"], line["rollout/reward"]) for line in lines(path)] == [
        *((step, 1.0) for step in range(1, 6)),
        *((step, 2.0) for step in range(6, 9)),
    ]
    assert [file.name for file in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_a_line_cut_off_by_a_kill_is_dropped_with_a_word(tmp_path, caplog):
    path = tmp_path / "metrics.jsonl"
    write_steps(path, range(1, 4))
    path.write_text(path.read_text() + '{"step": 4, "rollout/rew')
    write_steps(path, [4], resume_step=3)
    assert [line["step"] for line in lines(path)] == [1, 2, 3, 4]
    assert "metrics.jsonl:4" in caplog.text


def test_a_new_run_in_an_old_directory_keeps_the_old_metrics(tmp_path):
    write_steps(tmp_path / "metrics.jsonl", [1, 2])
    write_steps(tmp_path / "metrics.jsonl", [1])
    assert len(lines(tmp_path / "metrics-1.jsonl")) == 2
    assert len(lines(tmp_path / "metrics.jsonl")) == 1


def test_a_resumed_run_can_ask_how_it_began(tmp_path):
    path = tmp_path / "metrics.jsonl"
    assert first_value(path, "val/accuracy") is None
    write_steps(path, [1, 2], value=0.5)
    path.write_text('{"step": 0, "val/accuracy": null}\n{"step": 0, "val/acc\n' + path.read_text())
    assert first_value(path, "rollout/reward") == 0.5
    assert first_value(path, "val/accuracy") is None


def test_tensorboard_shows_every_step_once_after_a_resume(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for resume_step, steps, value in ((None, [90], 0.0), (None, range(1, 8), 1.0), (5, range(6, 9), 2.0)):
        sink = TensorBoard(tmp_path / "board", resume_step=resume_step)
        for step in steps:
            sink.write(step, {"rollout/reward": value, "critic/loss": float("nan")})
        sink.close()
    events = EventAccumulator(str(tmp_path / "board")).Reload().Scalars("rollout/reward")
    assert [(event.step, event.value) for event in events] == [
        *((step, 1.0) for step in range(1, 6)),
        *((step, 2.0) for step in range(6, 9)),
    ]


def test_the_run_gets_the_sinks_it_asks_for(tmp_path):
    sinks = open_sinks(Logger(tensorboard=False), run_dir=tmp_path, run_config={})
    assert [type(sink) for sink in sinks] == [JsonLines]
    sinks = open_sinks(Logger(), run_dir=tmp_path, run_config={}, resume_step=3)
    assert [type(sink) for sink in sinks] == [JsonLines, TensorBoard]
    for sink in sinks:
        sink.close()


@pytest.mark.parametrize(
    ("package", "logger"),
    [
        ("wandb", Logger(tensorboard=False, wandb=Wandb(project="p"))),
        ("mlflow", Logger(tensorboard=False, mlflow=Mlflow(experiment_name="e"))),
    ],
)
def test_a_missing_extra_says_how_to_get_it(tmp_path, package, logger):
    if importlib.util.find_spec(package):
        pytest.skip(f"{package} is installed here")
    with pytest.raises(ValueError, match=f"uv sync --extra {package}"):
        open_sinks(logger, run_dir=tmp_path, run_config={})
