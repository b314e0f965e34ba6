"""A run whose samples wait in processes of their own: one of them dies, the driver dies, or it ends. All go with it."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tandem import cli
from tests.e2e import kills

pytest.importorskip("ray", reason="the package ray is not installed here (extra `ray`)")
psutil = pytest.importorskip("psutil", reason="the package psutil, which Ray brings along, is not installed here")

pytestmark = pytest.mark.timeout(600)
SIZE = [
    *("quickstart", "ppo.num_prompts_per_step=4", "ppo.num_generations_per_prompt=2", "ppo.max_num_steps=5"),
    *("policy.train_global_batch_size=4", "data.train.size=20", "ppo.max_num_epochs=1", "data.validation=null"),
    *("cluster.deterministic=true", "checkpointing.save_period=1"),
    *("logger.tensorboard=false", "logger.timeline=false"),
]
ENDLESS = [*SIZE, "ppo.max_num_steps=4000", "ppo.max_num_epochs=4000"]
WAIT_S = 200.0  # twenty seconds, on a machine that does nothing else
GONE_S = 30.0  # as above: a few seconds


def trains(arguments: list[str], said: Path) -> None:
    """The process of a run: the command line, and what it says in a file."""
    sys.argv = ["tandem", "train", *arguments]
    sys.stdout = sys.stderr = said.open("w", buffering=1)
    cli.main()


class Run:
    """A run in a process of its own, and every process that it was ever seen to have started."""

    def __init__(self, arguments: list[str], said: Path) -> None:
        self._said = said
        self.process = kills.CONTEXT.Process(target=trains, args=(arguments, said))
        self.process.start()
        self.started: set[psutil.Process] = set()

    def wait(self, until: Callable[[], bool]) -> None:
        end = time.monotonic() + WAIT_S
        while not until():
            assert time.monotonic() < end, f"nothing within {WAIT_S:g} s; the run says: {self._said.read_text()}"
            self.process.join(timeout=0.05)
            self.look()

    def look(self) -> None:
        with suppress(psutil.NoSuchProcess):  # it may end at any time
            self.started |= set(psutil.Process(self.process.pid).children(recursive=True))

    def trained(self, run_dir: Path, steps: int) -> None:
        """Wait for so many steps."""
        metrics = run_dir / "metrics.jsonl"
        self.wait(lambda: self.ended() or (metrics.exists() and metrics.read_text().count("rollout/reward") >= steps))
        assert not self.ended(), f"the run has ended before its time: {self._said.read_text()}"
        self.look()

    def ended(self) -> bool:
        return self.process.exitcode is not None


def alive_as(process: psutil.Process) -> str:
    """How a process calls itself; Ray's write what they serve there."""
    try:
        return " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return ""


def assert_gone(run: Run) -> None:
    """Nothing of the run is left: neither Ray's processes nor the plane's."""
    assert len(run.started) >= 5  # or nothing was there to be left
    _, alive = psutil.wait_procs(run.started, timeout=GONE_S)
    assert [each for each in alive if each.status() != psutil.STATUS_ZOMBIE] == []


Begin = Callable[[list[str]], Run]


@pytest.fixture
def begin(tmp_path: Path) -> Iterator[Begin]:
    """Begins runs; what a failed test leaves of them is ended."""
    runs: list[Run] = []

    def start(arguments: list[str]) -> Run:
        runs.append(Run(arguments, tmp_path / "said"))
        return runs[-1]

    yield start
    for run in runs:
        run.process.kill()
        run.process.join()


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


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGINT], ids=lambda end: end.name)
def test_nothing_is_left_of_a_run_that_is_killed_or_interrupted(tmp_path: Path, begin: Begin, end: signal.Signals):
    run = begin([*ENDLESS, "data_plane.name=ray_actor", f"run_dir={tmp_path / 'run'}"])
    run.trained(tmp_path / "run", steps=1)
    assert run.process.pid is not None
    os.kill(run.process.pid, end)
    run.wait(run.ended)
    assert run.process.exitcode == (-signal.SIGKILL if end == signal.SIGKILL else 130)
    assert_gone(run)
