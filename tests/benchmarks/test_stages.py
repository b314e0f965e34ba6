"""The benchmark of stages runs: a tiny shape on a CPU, every stage once at two lengths, and a weight sync."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
SMALL = ("--shape", "tiny", "--device", "cpu", "--tokens", "64", "--lengths", "16", "32", "--steps", "1")


def test_it_prints_a_row_for_each_stage_and_length():
    done = subprocess.run(
        [sys.executable, "benchmarks/stages.py", *SMALL],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    rows = [line.split("|")[1:-1] for line in done.stdout.splitlines() if ", samples of " in line]
    stages = ("log-probs", "policy update", "log-probs of a reference", "values", "critic update")
    wanted = [f"{stage}, samples of {length}" for stage in stages for length in (16, 32)]
    assert sorted(row[0].strip() for row in rows) == sorted(wanted)
    assert all(float(row[1].replace(",", "")) > 0 for row in rows)
    assert "weight sync of" in done.stdout
