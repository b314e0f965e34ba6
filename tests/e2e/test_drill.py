"""Real faults in real runs of the quickstart: all promises are kept, and one that cannot be is found broken."""

from __future__ import annotations

from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from tandem.launch.drill.drill import drill
from tandem.launch.drill.faults import FAULTS

pytestmark = pytest.mark.timeout(1200)  # processes one after the other; minutes on a busy machine
SMALL = ("ppo.max_num_steps=2", "data.validation=null", "data.train.size=32", "cluster.num_threads=1")


def drilled(run_dir: Path, *overrides: str, only: tuple[str, ...] = ()) -> tuple[int, str]:
    """The exit code, and what was said."""
    out = StringIO()
    console = Console(file=out, width=200)
    changes = [*SMALL, "failures.backoff_base_s=0", *overrides, f"run_dir={run_dir}"]
    return drill("quickstart", changes, only=only, limit_s=240.0, console=console), out.getvalue()


def test_without_retries_a_hung_scorer_costs_a_prompt_and_that_is_a_broken_promise(tmp_path: Path):
    faults = ("scorer_error", "hung_scorer")
    code, said = drilled(tmp_path, "failures.max_infra_attempts_per_prompt=1", only=faults)
    assert code == 1, said
    assert "hung_scorer env.score_timeout_s=2 ..." in said
    (broken,) = [line for line in said.splitlines() if line.endswith("given up for a fault that had passed")]
    assert broken.startswith("hung_scorer: prompt 'train:")
    assert (said.count(" kept "), said.count(" broken ")) == (1, 1), said


@pytest.mark.slow
def test_the_quickstart_keeps_its_promises_under_every_fault(tmp_path: Path):
    code, said = drilled(tmp_path)
    assert code == 0, said
    assert said.count(" kept ") == len(FAULTS)
    assert said.count(" the same ") == len(FAULTS) - 1  # of all but the one whose prompt is given up
    assert "every promise was kept" in said
