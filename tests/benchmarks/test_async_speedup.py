"""What running ahead is measured with: waits that are the same for both sides, and when a level counts as reached."""

from __future__ import annotations

import asyncio
import math
import statistics

import pytest

from benchmarks.async_speedup import FIGURES, TO_LEVEL, Real, outcome, ratios_of
from benchmarks.seeds import Curve
from benchmarks.slow_scorer import LAW, score, seconds_of
from tandem.config.env import PythonVerifier
from tandem.envs.function_verifier import build_function_verifier
from tandem.types import Prompt


def curve(rewards: list[float], steps_s: float) -> Curve:
    return Curve(rewards, [None] * len(rewards), 0.1, 0.9, 60.0, 50.0, [steps_s] * len(rewards), 1.0, 1.0)


def test_a_wait_follows_from_the_texts_alone_and_has_the_mean_that_was_asked_for():
    seconds = seconds_of("lognormal:0.5:0.5")
    waits = [seconds("2 + 2?", f"The answer is {n}") for n in range(4000)]
    assert waits == [seconds_of("lognormal:0.5:0.5")("2 + 2?", f"The answer is {n}") for n in range(4000)]
    assert statistics.fmean(waits) == pytest.approx(0.5, rel=0.03)
    assert statistics.stdev(math.log(wait) for wait in waits) == pytest.approx(0.5, rel=0.05)
    assert seconds_of("fixed:0.25")("a", "b") == 0.25


@pytest.mark.parametrize(
    "law", ["", "fixed", "fixed:x", "fixed:1:2", "lognormal:1", "pareto:1", "fixed:-1", "fixed:inf"]
)
def test_a_law_that_cannot_be_read_is_refused_with_what_is_wanted(law: str):
    with pytest.raises(ValueError, match="wanted fixed:SECONDS or lognormal"):
        seconds_of(law)


def test_it_scores_as_the_built_in_problems_are_scored(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(LAW, "fixed:0")
    verifier = build_function_verifier(PythonVerifier(name="python", target="benchmarks.slow_scorer:score"))
    prompt = Prompt(0, "p0", "2 + 2?", "#### 4", (1,))
    texts = ("The answer is 4.", "The answer is 5. The answer is 4", "The answer is 5.", "4")
    scores = [asyncio.run(verifier.score(prompt, text)).reward for text in texts]
    assert scores == [1.0, 1.0, 0.0, 0.0]
    assert asyncio.run(score("2 + 2?", "none", "The answer is 4")) == 0.0


def test_a_level_is_reached_when_three_steps_average_it():
    run = Real(curve([0.2, 0.5, 0.9, 0.95, 0.97, 1.0], 2.0), level=0.9)
    assert run.reached_step == 5
    assert run.reached_s == 10.0
    assert run.total_s == 12.0
    assert Real(curve([0.2, 0.3, 0.4], 1.0), level=0.9).reached_s == math.inf


def test_a_lead_that_needs_more_steps_is_faster_only_by_its_clock():
    sync = [Real(curve([0.5, 0.9, 0.9, 0.9, 0.9], 3.0), level=0.9)]
    ahead = [Real(curve([0.5, 0.5, 0.9, 0.9, 0.9], 1.0), level=0.9)]
    assert ratios_of(sync, ahead, FIGURES[TO_LEVEL]) == [12.0 / 5.0]
    assert ratios_of(sync, ahead, FIGURES["all steps"]) == [3.0]


def test_the_simulated_goal_holds_in_the_short_form():
    sync, ahead = (outcome("heavy", "in_order", "in_flight", lead, steps=4) for lead in (0, 1))
    assert sync.step_s / ahead.step_s > 1.3
    assert ahead.staleness_max == 1
