"""Whole simulated runs against hand-worked times, and the command that asks for them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from rich.console import Console

from tandem.config.asynchrony import AsyncRl, Failures, InOrder
from tandem.control.plan import Plan
from tandem.launch.simulate import Question, simulate_recipe
from tandem.simulation.lengths import Lengths
from tandem.simulation.run import Machines, Work, simulate

MACHINES = Machines(engines=1, slots=4, tokens_per_s=10, trainers=2, train_tokens_per_s=10)
WORK = Work(samples=2, prompt_tokens=0, lengths=Lengths("fixed", 20, 100), prompts_per_epoch=1000)


def plan(lead: int, steps: int = 10, **changes: object) -> Plan:
    return Plan(
        groups_per_step=2,
        max_num_steps=steps,
        max_num_prompts=1000,
        policy_training_start_step=0,
        async_rl=AsyncRl(sampler=InOrder(max_lookahead_versions=lead), weight_update="in_flight", **changes),
        failures=Failures(),
        dynamic_sampling_max_gen_batches=10,
        val_period=0,
        val_at_start=False,
        val_at_end=False,
        save_period=1000,
        save_at_end=False,
    )


def test_synchronous_time_is_the_sum_and_ahead_it_is_the_longer_of_both():
    # 4 samples of 20 tokens: 2 s to write, 80 tokens at 20 a second: 4 s to train on
    sync, ahead = simulate(plan(0), MACHINES, WORK), simulate(plan(1), MACHINES, WORK)
    assert sync.total_s == pytest.approx(10 * (2 + 4))
    assert ahead.total_s == pytest.approx(2 + 10 * 4)
    assert sync.staleness_max == 0
    assert ahead.staleness_max == 1
    assert sync.trainers_busy == pytest.approx(4 / 6)
    assert sync.engines_busy == pytest.approx(2 / 6)


def test_streaming_hides_the_share_that_can_be_done_chunk_by_chunk():
    half = Machines(engines=1, slots=2, tokens_per_s=10, trainers=2, train_tokens_per_s=10, streamed_share=0.5)
    # the first group comes at 2 s, the second at 4 s: 1 s of the first chunk's computing fits in between
    assert simulate(plan(0, 1), half, WORK).total_s == pytest.approx(4 + 4)
    streams = plan(0, 1, min_groups_for_streaming_train=1)
    assert simulate(streams, half, WORK).total_s == pytest.approx(4 + 4 - 1)


@pytest.mark.parametrize("field", ["engines", "slots", "tokens_per_s", "trainers", "train_tokens_per_s", "publish_s"])
def test_machines_that_cannot_be_are_refused(field: str):
    numbers = {"engines": 1, "slots": 1, "tokens_per_s": 1.0, "trainers": 1, "train_tokens_per_s": 1.0}
    with pytest.raises(ValueError, match=f"{field}=-1: wanted"):
        Machines(**numbers | {field: -1})


def test_the_command_prints_a_table_and_writes_timelines_that_perfetto_reads(tmp_path: Path):
    console = Console(record=True, width=120)
    machines = {"engines": 2, "slots": 16, "tokens_per_s": 50.0, "trainers": 2, "train_tokens_per_s": 400.0}
    question = Question("heavy", 10.0, prompt_tokens=5, steps=4, timelines=tmp_path / "lines")
    simulate_recipe("quickstart", [], question, machines, console)
    text = console.export_text()
    assert "a step: 16 prompts x 4 samples; lengths heavy, mean 10, at most 28 tokens" in text
    for variant in ("sync", "lead 1", "lead 2", "lead 4"):
        assert variant in text
    events = json.loads((tmp_path / "lines" / "lead_1.json").read_text())
    written = [event for event in events if event.get("name") == "engine/write"]
    learned = [event for event in events if event.get("name") == "control/learn"]
    assert len(written) >= 4 * 16 * 4
    assert len(learned) == 4
    assert sum(event["dur"] for event in learned) / 1e6 > 4 * 64 * 15 / 800 * 0.8  # virtual seconds, not the wall's


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [({"steps": 0}, "--steps 0"), ({"prompt_tokens": -1}, "--prompt-tokens -1"), ({"law": "flat"}, "'flat'")],
)
def test_a_question_that_makes_no_sense_is_refused(changes: dict[str, object], complaint: str):
    asked = {"law": "fixed", "mean_length": 10.0, "prompt_tokens": 0, "steps": 1, "timelines": None}
    machines = {"engines": 1, "slots": 1, "tokens_per_s": 1.0, "trainers": 1, "train_tokens_per_s": 1.0}
    with pytest.raises(ValueError, match=complaint):
        simulate_recipe("quickstart", [], Question(**asked | changes), machines, Console())
