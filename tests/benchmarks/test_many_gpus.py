"""The script for many GPUs where there are none: a dry run, what it says of parts that fail, and its tables."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from benchmarks.many_gpus.place import Place
from benchmarks.many_gpus.runs import steps_of
from benchmarks.many_gpus.table import busy, table

ROOT = Path(__file__).parents[2]
SCRIPT = "benchmarks/many_gpus.sh"


def run(*options: str, python: str = sys.executable) -> subprocess.CompletedProcess[str]:
    env = os.environ | {"PYTHON": python, "OMP_NUM_THREADS": "1"}
    return subprocess.run([SCRIPT, *options], cwd=ROOT, env=env, capture_output=True, text=True, timeout=500)


def rows(text: str, title: str) -> list[dict[str, str]]:
    """The table under a title."""
    lines = text.split(f"{title}\n\n")[1].split("\n\n")[0].splitlines()
    head, _, *body = ([cell.strip() for cell in line.split("|")[1:-1]] for line in lines)
    return [dict(zip(head, cells, strict=True)) for cells in body]


def test_a_dry_run_measures_what_a_cpu_can_and_says_what_it_cannot(tmp_path: Path):
    done = run("--cpu", "--parts", "a,b,e", "--out", str(tmp_path))
    assert done.returncode == 0, done.stderr
    (update,) = rows(done.stdout, "a: FSDP2 update")
    assert update["ranks"] == "2"
    assert min(float(update[f"{part} tok/s"].replace(",", "")) for part in ("passes", "step")) > 0
    (sync,) = rows(done.stdout, "e: weight sync")
    assert sync["ranks -> engines"] == "1 -> 1"
    assert float(sync["sync s"]) > 0
    assert "\nb: not run: Megatron-Core computes on GPUs only\n" in done.stdout


@pytest.mark.slow
@pytest.mark.timeout(580)
def test_a_dry_run_of_whole_runs_has_their_stages_and_their_lead(tmp_path: Path):
    pytest.importorskip("ray", reason="the package ray is not installed here (extra `ray`)")
    done = run("--cpu", "--parts", "c,d", "--seconds", "480", "--out", str(tmp_path))
    assert done.returncode == 0, done.stderr
    (step,) = rows(done.stdout, "c: colocated PPO step")
    stages = ("writing", "log-probs, values", "critic", "actor", "sync")
    assert 0 < sum(float(step[f"{stage} s"]) for stage in stages) <= float(step["step s"]) + 0.03  # rounded
    leads = rows(done.stdout, "d: trainers and engines on GPUs of their own")
    assert [row["lead"] for row in leads] == ["0", "1", "2"]
    assert all(float(row["staleness mean"]) <= float(row["staleness max"]) <= float(row["lead"]) for row in leads)
    assert all(0 <= float(row[side]) < 1 for row in leads for side in ("generation idle", "training idle"))


def test_a_part_that_fails_or_hangs_is_a_line_and_the_others_go_on(tmp_path: Path):
    python = tmp_path / "python"  # an interpreter on which part a fails, and part b never ends
    python.write_text(
        f"""#!/usr/bin/env bash
        case "$3" in
        a) echo 'something "odd" is missing' >&2 && exit 3 ;;
        b) exec tail -f /dev/null ;;
        *) exec {sys.executable} "$@" ;;
        esac
        """
    )
    python.chmod(0o755)
    done = run("--cpu", "--parts", "a,b", "--seconds", "10", python=str(python))
    assert done.returncode == 0, done.stderr
    assert "a: failed after 0 s, exit code 3: something odd is missing" in done.stdout
    assert "b: not done in the 10 s that were left for it" in done.stdout


@pytest.mark.parametrize("options", [("--gpus", "99"), ("--everything",), ("--parts", "a,z")])
def test_what_it_cannot_do_is_said(options: Sequence[str]):
    done = run(*options)
    assert done.returncode == 2
    assert "--cpu" in done.stdout + done.stderr


def test_efficiency_is_against_the_fewest_ranks_of_the_same_variant(tmp_path: Path):
    def row(ranks: int, variant: str, tokens: float) -> dict[str, object]:
        passes = {"passes_tok_s": tokens, "passes_mfu": 0.5, "passes_gib": 9.0}
        step = {"step_tok_s": tokens, "step_mfu": 0.5, "step_gib": 9.0}
        return {"shape": "qwen2-7b", "variant": variant, "ranks": ranks} | passes | (step if ranks > 1 else {})

    found = [row(8, "actor,keep=true", 720.0), row(1, "actor", 100.0), row(2, "actor,keep=true", 190.0)]
    kept = "\n".join(map(json.dumps, [*found, row(8, "critic", 1.0)]))
    (tmp_path / "fsdp.jsonl").write_text(kept + '\n{"shape": "torn')
    shown = rows(table(tmp_path), "a: FSDP2 update")
    assert [(row["ranks"], row["passes efficiency"]) for row in shown if "actor" in row["shape, variant"]] == [
        ("1", ""),
        ("2", "0.95 of 1"),
        ("8", "0.90 of 1"),
    ]
    assert [row["step tok/s"] for row in shown][:1] == ["out of memory"]
    assert [row["step efficiency"] for row in shown] == ["", "", "0.95 of 2", ""]


def test_a_lead_is_measured_between_its_start_and_its_end(tmp_path: Path):
    steps, first, last = steps_of(1)
    run_dir = tmp_path / "apart-1"
    run_dir.mkdir()
    records = [
        {"step": step, "time/step_s": 9.0, "rollout/tokens": 60.0, "staleness/mean": 1.0, "staleness/max": 1.0}
        for step in range(1, steps + 1)
    ]
    learns = [("control/learn", 3.0 * step, 3.0 * step + 1.5) for step in range(1, steps + 1)]
    writes = [("rollout/in_flight", 0.0, 3.0 * last + 0.9)]  # it ends 0.6 s before the last step that is measured does
    events = [
        {"ph": "X", "name": name, "ts": 1e6 * begin, "dur": 1e6 * (end - begin)}
        for name, begin, end in [*learns, *writes]
    ]
    (run_dir / "timeline.json").write_text("[\n" + "".join(json.dumps(event) + ",\n" for event in events) + '{"ph": "X')
    whole, cut = tmp_path / "whole", tmp_path / "cut"  # the second was ended while its last step learned
    for out, kept in ((whole, records), (cut, records[:-2])):
        shutil.copytree(run_dir, out / "apart-1")
        (out / "apart-1" / "metrics.jsonl").write_text("\n".join(map(json.dumps, kept)))
    assert table(cut) == ""
    (row,) = rows(table(whole), "d: trainers and engines on GPUs of their own")
    assert (first, last) == (2, 3)
    assert (row["lead"], row["step s"], row["tok/s"]) == ("1", "3.00", "20")
    assert row["training idle"] == "0.50"
    assert row["generation idle"] == f"{0.6 / 6:.2f}"


def test_a_part_that_runs_again_forgets_what_it_left_before(tmp_path: Path):
    place = Place(2, True, tmp_path, tmp_path, 10.0)
    place.note("d", "not done")
    place.note("e", "12 s")
    (tmp_path / "apart-1").mkdir()
    (tmp_path / "apart-1" / "metrics.jsonl").write_text("{}")
    place.forget("d", ["apart", "apart-1"])
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["notes.jsonl"]
    assert table(tmp_path).splitlines()[-1] == "e: 12 s"


def test_spans_that_overlap_count_once():
    spans = [("a", 0.0, 4.0), ("a", 1.0, 2.0), ("b", 3.0, 6.0), ("c", 0.0, 9.0), ("a", 8.0, 12.0)]
    assert busy(spans, ("a", "b"), (2.0, 10.0)) == pytest.approx((4.0 + 2.0) / 8)
