"""Whole runs in processes of their own, and every process that they start: for tests of what ends, and what is left."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from tandem import cli
from tests.e2e import kills

SIZE = [
    *("quickstart", "ppo.num_prompts_per_step=4", "ppo.num_generations_per_prompt=2", "ppo.max_num_steps=5"),
    *("policy.train_global_batch_size=4", "data.train.size=20", "ppo.max_num_epochs=1", "data.validation=null"),
    *("cluster.deterministic=true", "checkpointing.save_period=1"),
    *("logger.tensorboard=false", "logger.timeline=false"),
]
ENDLESS = [*SIZE, "ppo.max_num_steps=4000", "ppo.max_num_epochs=4000"]
WAIT_S = 200.0  # twenty seconds, on a machine that does nothing else
GONE_S = 30.0  # as above: a few seconds


def trains(arguments: list[str], said: Path, environment: Mapping[str, str]) -> None:
    """The process of a run: the command line, and what it says in a file."""
    os.environ.update(environment)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # tests that run in the background of a shell ignore it
    sys.argv = ["tandem", "train", *arguments]
    sys.stdout = sys.stderr = said.open("w", buffering=1)
    cli.main()


class Run:
    """A run in a process of its own, and every process that it was ever seen to have started."""

    def __init__(self, arguments: list[str], said: Path, environment: Mapping[str, str]) -> None:
        self._said = said
        self.process = kills.CONTEXT.Process(target=trains, args=(arguments, said, environment))
        self.process.start()
        self.started: set[psutil.Process] = set()

    def wait(self, until: Callable[[], bool], *, within_s: float = WAIT_S) -> None:
        end = time.monotonic() + within_s
        while not until():
            assert time.monotonic() < end, f"nothing within {within_s:g} s; the run says: {self._said.read_text()}"
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


Begin = Callable[..., Run]


@contextmanager
def runs_in(tmp_path: Path) -> Generator[Begin]:
    """Begins runs; what a failed test leaves of them is ended."""
    runs: list[Run] = []

    def start(arguments: list[str], **environment: str) -> Run:
        runs.append(Run(arguments, tmp_path / "said", environment))
        return runs[-1]

    yield start
    for run in runs:
        run.process.kill()
        run.process.join()
