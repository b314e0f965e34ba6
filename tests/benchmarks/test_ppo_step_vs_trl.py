"""Our side of the comparison does the work that its arguments ask for, and a side that does less is found out."""

from __future__ import annotations

import importlib.util
from dataclasses import replace

import pytest

from benchmarks.ppo_step.job import Job, Result
from benchmarks.ppo_step_vs_trl import differences, measure, report

JOB = Job(
    directory="",
    model="tiny",
    samples=8,
    prompt=48,
    response=6,
    epochs=3,
    mini_batches=2,
    steps=1,
    warmup=0,
    threads=1,
    micro_batch=2,
)


@pytest.fixture(scope="module")
def ours() -> Result:
    return next(result for _, result in measure(JOB, ["ours"], rounds=1))


def test_our_step_does_all_the_work_of_its_arguments(ours: Result):
    tokens, written = JOB.samples * (JOB.prompt + JOB.response), JOB.samples * JOB.response
    work = ours.work
    assert work["generated tokens"] == written
    for name in ("old log-probs", "reference", "values"):
        assert work[f"{name}, forward tokens"] == tokens
    for name in ("policy", "critic"):
        assert work[f"{name}, trained tokens"] == JOB.epochs * tokens
        assert work[f"{name}, tokens in the loss"] == JOB.epochs * written
    assert work["optimizer steps"] == 2 * JOB.epochs * JOB.mini_batches


def test_our_step_is_timed_and_cut_into_stages(ours: Result):
    assert len(ours.step_s) == len(ours.cpu_s) == JOB.steps
    assert set(ours.stages) == {"generate", "forwards", "update"}
    assert 0 < sum(seconds for (seconds,) in ours.stages.values()) < 1.5 * ours.step_s[0]
    assert ours.memory["resident"] > 1 << 27
    table = "\n".join(report({"ours": [ours], "trl": [ours]}))
    assert "step, s" in table
    assert "1.00" in table


def test_less_work_on_either_side_is_told(ours: Result):
    peer = {**ours.work, "old log-probs, forward tokens": 0, "optimizer steps": JOB.epochs * JOB.mini_batches}
    assert differences(ours, replace(ours, work=peer)) == []
    for name in set(peer) - {"padding in passes"}:
        less = replace(ours, work={**peer, name: peer[name] - 1})
        assert [line.split(":")[0] for line in differences(ours, less)] == [name]


@pytest.mark.skipif(importlib.util.find_spec("trl") is None, reason="TRL is no dependency")
def test_trl_does_the_same_work(ours: Result):
    peer = next(result for _, result in measure(JOB, ["trl"], rounds=1))
    assert differences(ours, peer) == []
