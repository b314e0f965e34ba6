"""Real faults in real runs of the quickstart: all promises are kept, and one that cannot be is found broken."""

from __future__ import annotations

from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from tandem.launch.drill.drill import drill, prepare, try_all
from tandem.launch.drill.evidence import Ended
from tandem.launch.drill.faults import FAULTS

# Only a hang ends these: processes one after the other take a minute alone, and many on a busy machine.
LIMIT_S = 900.0
pytestmark = pytest.mark.timeout(3600)
SMALL = (
    *("ppo.max_num_steps=2", "ppo.num_prompts_per_step=2", "policy.train_global_batch_size=4"),
    *("data.validation=null", "data.train.size=16", "policy.generation.max_new_tokens=12"),
    *("cluster.num_threads=1", "failures.backoff_base_s=0"),
)


def test_the_quickstart_keeps_its_promises_under_every_fault(tmp_path: Path):
    out = StringIO()
    changes = [*SMALL, f"run_dir={tmp_path}"]
    code = drill("quickstart", changes, only=(), limit_s=LIMIT_S, console=Console(file=out, width=200))
    said = out.getvalue()
    assert code == 0, said
    assert said.count(" kept ") == len(FAULTS), said
    assert said.count(" the same ") == len(FAULTS) - 1, said  # of all but the one whose prompt is given up
    assert "every promise was kept" in said


def test_without_retries_a_hung_scorer_costs_a_prompt_and_that_is_a_broken_promise(tmp_path: Path):
    changes = [*SMALL, "failures.max_infra_attempts_per_prompt=1", f"run_dir={tmp_path}"]
    rehearsal = prepare("quickstart", changes, LIMIT_S)
    whole = Ended(tmp_path / "whole", 0, 2)  # never looked at: what is broken is found before bits are compared
    (verdict,) = try_all(rehearsal, ["hung_scorer"], whole, Console(file=StringIO()))
    (broken,) = verdict.broken
    assert broken.startswith("prompt 'train:")
    assert broken.endswith("(infrastructure_failure): given up for a fault that had passed")
    assert ", 0 lost" in verdict.prompts
