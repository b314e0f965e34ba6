"""Real faults in real runs of the quickstart: all promises are kept, and one that cannot be is found broken."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from tandem.config.load import load
from tandem.launch.drill.drill import Drill, drill, ends_tidily, held_back, prepare, run_alone, run_with
from tandem.launch.drill.evidence import Ended, Verdict, judge, newest_step
from tandem.launch.drill.faults import FAULTS
from tandem.launch.session import train

LIMIT_S = 900.0  # only a hang takes so long: a process is 10 s alone, and a few times that on a busy machine
pytestmark = pytest.mark.timeout(3600)
SMALL = (
    *("ppo.max_num_steps=2", "ppo.num_prompts_per_step=2", "policy.train_global_batch_size=4"),
    *("data.validation=null", "data.train.size=16", "policy.generation.max_new_tokens=12"),
    *("cluster.num_threads=1", "failures.backoff_base_s=0"),
)


def drilled(run_dir: Path, *overrides: str, only: Sequence[str]) -> tuple[int, str]:
    """The exit code, and what was said."""
    out = StringIO()
    changes = [*overrides, f"run_dir={run_dir}"]
    code = drill("quickstart", changes, only=only, limit_s=LIMIT_S, console=Console(file=out, width=200))
    return code, out.getvalue()


def test_a_full_disk_and_a_killed_trainer_lose_nothing(tmp_path: Path):
    code, said = drilled(tmp_path, *SMALL, only=("full_disk", "killed_trainer"))
    assert code == 0, said
    assert (said.count(" kept "), said.count(" the same ")) == (2, 2), said
    assert "every promise was kept" in said
    assert (tmp_path / "killed_trainer" / "said-2.txt").exists()


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Drill, Ended]:
    """The recipe in its small form, and its run without a fault. In this process: a new one mostly imports."""
    directory = tmp_path_factory.mktemp("drill")
    rehearsal = prepare("quickstart", [*SMALL, f"run_dir={directory}"], LIMIT_S)
    run_dir = directory / "whole"
    assert train(load("quickstart", [*rehearsal.overrides, f"run_dir={run_dir}"])) == 0
    return rehearsal, Ended(run_dir, 0, newest_step(run_dir))


def tried(name: str, rehearsal: Drill, whole: Ended, run_dir: Path, *overrides: str) -> Verdict:
    """One fault that leaves this process alive, as the drill tries and judges it."""
    fault = FAULTS[name]
    changes = [*rehearsal.overrides, *fault.settings(rehearsal.config), *overrides, f"run_dir={run_dir}"]
    code = run_with(name, "quickstart", changes)
    ended = Ended(run_dir, code, newest_step(run_dir))
    if code:
        ended = replace(ended, code_of_next=train(load(str(run_dir), [f"run_dir={run_dir}"])))
    return judge(name, fault, ended, rehearsal.config, whole)


@pytest.mark.parametrize(
    ("name", "did", "bits"),
    [
        ("straggler", "went on", "the same"),
        ("dead_engine", "ended with code 1; step 1 is whole; gone on with from there", "the same"),
        ("scorer_error", "gave up prompt 'train:", "not promised"),
        ("hung_scorer", "tried 1 rollout again", "the same"),
    ],
)
def test_a_fault_that_a_run_can_take_costs_nothing(
    whole: tuple[Drill, Ended], tmp_path: Path, name: str, did: str, bits: str
):
    verdict = tried(name, *whole, tmp_path)
    assert verdict.broken == ()
    assert verdict.did.startswith(did)
    assert (verdict.bits, verdict.prompts.endswith(", 0 lost")) == (bits, True)


def test_without_retries_a_hung_scorer_costs_a_prompt_and_that_is_a_broken_promise(
    whole: tuple[Drill, Ended], tmp_path: Path
):
    verdict = tried("hung_scorer", *whole, tmp_path, "failures.max_infra_attempts_per_prompt=1")
    (broken,) = verdict.broken
    assert broken.startswith("prompt 'train:")
    assert broken.endswith("(infrastructure_failure): given up for a fault that had passed")


def test_a_signal_that_comes_as_a_run_begins_waits_until_it_is_known():
    seen: list[int] = []

    def begin() -> None:
        with held_back() as came:
            os.kill(os.getpid(), signal.SIGTERM)
            seen.extend(came)

    with ends_tidily(), pytest.raises(KeyboardInterrupt):
        begin()
    assert seen == [signal.SIGTERM]


@pytest.mark.timeout(120)  # far less than what would be left
@pytest.mark.parametrize(
    ("script", "limit_s", "ends"),
    [("sleep 1000 & sleep 1000", 0.2, "time"), ("sleep 1000 & kill -TERM $PPID; sleep 1000", 600.0, "signal")],
)
def test_a_run_leaves_no_process_past_its_time_or_when_the_drill_is_ended(script: str, limit_s: float, ends: str):
    read, write = os.pipe()
    with open(read, "rb") as all_ended:  # at its end: nobody is left who could write
        with open(write, "wb") as out, ends_tidily():
            if ends == "time":
                assert run_alone(["sh", "-c", script], out, limit_s) is None
            else:
                with pytest.raises(KeyboardInterrupt):
                    run_alone(["sh", "-c", script], out, limit_s)
        assert all_ended.read() == b""


@pytest.mark.slow
def test_the_quickstart_keeps_its_promises_under_every_fault(tmp_path: Path):
    code, said = drilled(tmp_path, "cluster.num_threads=1", only=())
    assert code == 0, said
    assert said.count(" kept ") == len(FAULTS)
    assert said.count(" the same ") == len(FAULTS) - 1  # of all but the one whose prompt is given up
