"""A mixture of sources in the real loop: a resumed run goes on with the prompts that an uninterrupted one has."""

from __future__ import annotations

import json
from pathlib import Path

from tandem.config.load import load
from tests.e2e.runs import SHORT, run


def test_a_run_over_a_mixture_resumes_with_the_same_bits(tmp_path: Path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"question": f"{n} + 1?", "answer": n + 1}) + "\n" for n in range(3)))
    train = (
        f"data.train={{name: mixture, sources: {{mine: {{name: file, path: {rows}}},"
        " sums: {name: arithmetic, size: 5}}, weights: {mine: 3, sums: 1}}"
    )
    short = [each.format(algorithm="ppo") for each in SHORT if "data.train" not in each]
    config, begun = (load("quickstart", [*short, train, f"ppo.max_num_steps={steps}"]).config for steps in (4, 1))
    whole = run(config, tmp_path / "whole")  # two epochs of eight prompts
    run(begun, tmp_path / "resumed")
    resumed = run(config, tmp_path / "resumed", resume=True)
    assert resumed.weights == whole.weights
    assert resumed.records == whole.records[1:]
