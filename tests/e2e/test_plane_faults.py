"""A run whose samples wait in processes of their own, one of which dies: it ends, and goes on as if it had not."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e import kills

pytest.importorskip("ray", reason="the package ray is not installed here (extra `ray`)")
pytest.importorskip("psutil", reason="the package psutil, which Ray brings along, is not installed here")

from tests.e2e.whole_runs import SIZE, Begin, alive_as, assert_gone, runs_in

pytestmark = pytest.mark.timeout(600)


@pytest.fixture
def begin(tmp_path: Path) -> Iterator[Begin]:
    with runs_in(tmp_path) as start:
        yield start


@pytest.mark.parametrize(
    ("plane", "package", "victim", "name", "lead"),
    [
        ("ray_actor", "ray", "ray::RowServer", "rows", 0),
        ("ray_actor", "ray", "ray::RowServer", "rows", 2),
        ("transfer_queue", "transfer_queue", "ray::SimpleStorageUnit", "storage unit 0", 0),
    ],
)
def test_a_run_that_loses_a_process_of_its_plane_ends_and_goes_on_as_if_it_had_not(
    tmp_path: Path, begin: Begin, plane: str, package: str, victim: str, name: str, lead: int
):
    pytest.importorskip(package, reason=f"the package {package} is not installed here")
    arguments = [*SIZE, f"async_rl.sampler.max_lookahead_versions={lead}"]
    units = ["data_plane.num_storage_units=1"] * (plane == "transfer_queue")
    run_dir = tmp_path / "run"
    run = begin([*arguments, f"data_plane.name={plane}", *units, f"run_dir={run_dir}"])
    run.trained(run_dir, steps=2)
    (lost,) = [each for each in run.started if alive_as(each).startswith(victim)]
    os.kill(lost.pid, signal.SIGKILL)
    run.wait(run.ended)
    assert run.process.exitcode == 1
    said = (tmp_path / "said").read_text()
    assert f"the data plane's process '{name}' is gone" in said
    assert "go on from the newest checkpoint" in said
    assert_gone(run)

    run = begin([str(run_dir)])
    run.wait(run.ended)
    assert run.process.exitcode == 0, (tmp_path / "said").read_text()
    assert_gone(run)
    assert_each_prompt_was_trained_once(run_dir)
    if lead == 0:
        kills.run_to_the_end([*arguments, f"run_dir={tmp_path / 'undisturbed'}"])
        assert kills.ended_with(run_dir) == kills.ended_with(tmp_path / "undisturbed")


def assert_each_prompt_was_trained_once(run_dir: Path) -> None:
    """All 20 had their ticket, none is waiting or given up, and 20 groups of two samples were trained."""
    state = json.loads((run_dir / "checkpoints" / "step_000005" / "state.json").read_text())["controller"]
    assert state["producer"]["next_index"] == 20
    assert state["buffer"] == []
    assert not (run_dir / "untrained.jsonl").exists()
    _, steps = kills.ended_with(run_dir)
    assert [(step["step"], step["rollout/samples"]) for step in steps] == [(number, 8) for number in range(1, 6)]
