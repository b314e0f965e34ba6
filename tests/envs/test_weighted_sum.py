"""Weighted sums: the parts by name, their sum by weight, and what happens when one of them cannot be scored."""

import asyncio
import sys

import pytest

from tandem.envs.verifiers import build_verifier, check_answers
from tandem.types import RolloutFailed, Score
from tests.envs.asking import ask_all, verifier_config

RIGHT = {"verifier": {"name": "gsm8k"}}
SHORT = {"weight": 0.5, "verifier": {"name": "length", "max_chars": 10, "falloff_chars": 9}}
FORM = {"weight": -0.25, "verifier": {"name": "format", "pattern": ".*!"}}


def weighted(**components):
    return verifier_config(name="weighted_sum", components=components)


@pytest.mark.parametrize(
    ("response", "score"),
    [
        ("#### 72", Score(1.5, {"right": 1.0, "short": 1.0, "form": 0.0})),
        ("#### 72!", Score(1.25, {"right": 1.0, "short": 1.0, "form": 1.0})),
        ("     #### 72!!!", Score(1.0, {"right": 1.0, "short": 0.5, "form": 1.0})),
        ("#### 7" + "!" * 50, Score(-0.25, {"right": 0.0, "short": 0.0, "form": 1.0})),
    ],
)
def test_the_reward_is_the_weighted_sum_and_the_parts_keep_their_own_size(response, score):
    assert ask_all(weighted(right=RIGHT, short=SHORT, form=FORM), [("72", response)]) == [score]


@pytest.mark.parametrize(
    ("length", "reward"),
    [(0, 0.0), (3, 0.0), (4, 0.25), (6, 0.75), (7, 1.0), (10, 1.0), (11, 0.75), (14, 0.0), (999, 0.0)],
)
def test_a_length_is_worth_1_within_its_bounds_and_falls_in_a_straight_line(length, reward):
    config = verifier_config(name="length", min_chars=7, max_chars=10, falloff_chars=3)
    assert ask_all(config, [("", "x" * length)]) == [Score(reward)]


def test_a_part_that_cannot_be_scored_fails_the_whole_by_its_name():
    (failure,) = ask_all(weighted(right=RIGHT, short=SHORT), [("no number", "#### 72")])
    assert isinstance(failure, RolloutFailed)
    assert str(failure).startswith(
        "env.verifier.components.right: the reference answer of prompt 'row:0' holds no number"
    )


def test_a_part_with_parts_of_its_own_fails_by_its_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "parts_of_its_own.py").write_text("def score(q, a, r): return {'a': 1, 'b': 2}")
    mine = {"verifier": {"name": "python", "target": "parts_of_its_own:score"}}
    (failure,) = ask_all(weighted(mine=mine, short=SHORT), [("72", "#### 72")])
    assert isinstance(failure, RolloutFailed)
    assert str(failure).startswith("env.verifier.components.mine gave parts of its own (a, b)")


def test_reference_answers_are_checked_for_every_part():
    check_answers(weighted(short=SHORT, form=FORM), [("a", "anything")])
    with pytest.raises(ValueError, match=r"components\.right: env\.verifier\.name=gsm8k compares numbers"):
        check_answers(weighted(short=SHORT, right=RIGHT), [("a", "anything")])


def test_a_part_that_cannot_be_built_is_named():
    mine = {"verifier": {"name": "python", "target": "no_such_module:score"}}
    with pytest.raises(ValueError, match=r"components\.mine: env\.verifier\.target='no_such_module:score'"):
        build_verifier(weighted(right=RIGHT, mine=mine))


def test_what_the_parts_hold_is_closed():
    async def closed():
        verifier = build_verifier(weighted(form=FORM))
        ((_, part),) = verifier._parts.values()
        worker = await part._workers._start()
        part._workers._idle.append(worker)
        await verifier.close()
        return worker.returncode

    assert asyncio.run(closed()) is not None


TRAP = verifier_config(name="format", pattern="(a*)*b", timeout_s=0.5)


def test_a_pattern_that_never_ends_on_some_response_fails_that_rollout_only():
    good, bad = ask_all(TRAP, [("", "aab"), ("", "a" * 60)])
    assert good == Score(1.0)
    assert isinstance(bad, RolloutFailed)
    assert "took longer than 0.5 s" in str(bad)
    assert "env.verifier.pattern='(a*)*b'" in str(bad)


def test_a_long_find_comes_back_whole():
    config = verifier_config(name="regex", pattern="<(.*)>")
    assert ask_all(config, [("x" * 300_000, "<" + "x" * 300_000 + ">")]) == [Score(1.0)]
