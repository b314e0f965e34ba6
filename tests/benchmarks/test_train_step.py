"""The training benchmark runs: a tiny shape on a CPU, all kinds of variants, one rank."""

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
SMALL = ("--shape", "tiny", "--device", "cpu", "--tokens", "64", "--length", "32", "--steps", "1", "--warmup", "1")


def test_it_prints_a_row_for_each_variant(tmp_path: Path):
    variants = ["plain,mb=32", "actor,mb=32,ac=selective", "critic,mb=32,ac=full"]
    done = subprocess.run(
        [sys.executable, "benchmarks/train_step.py", *SMALL, "--json", tmp_path / "rows", "--variants", *variants],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    rows = [
        line.split("|")[1:-1] for line in done.stdout.splitlines() if line.startswith(("| plain", "| actor", "| cri"))
    ]
    assert [row[0].strip() for row in rows] == variants
    for row in rows:
        tokens_a_second = [float(row[column].replace(",", "")) for column in (1, 4)]
        assert min(tokens_a_second) > 0
        assert len(row) == 9
    kept = [json.loads(line) for line in (tmp_path / "rows").read_text().splitlines()]
    assert [(row["variant"], f"{row['step_tok_s']:,.0f}") for row in kept] == [
        (row[0].strip(), row[4].strip()) for row in rows
    ]
