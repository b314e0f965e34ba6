"""Validation: metrics of one set and of several, pass@k, failures, how many prompts at one time, what is written."""

import asyncio
import json

import pytest

from tandem.control.evaluate import Evaluator
from tandem.types import Prompt, RolloutFailed, Sample, Score


class Numbers:
    """A data set of sums: prompt i asks for i."""

    def __init__(self, count, prefix=""):
        self.count = count
        self.prefix = prefix

    def __len__(self):
        return self.count

    def prompt(self, index):
        return Prompt(index, f"{self.prefix}{index}", f"{index}?", str(index), (index,))


def sample(prompt, reward, *, components=None):
    length = 2 + prompt.index
    return Sample(
        tokens=(prompt.index,) * length,
        mask=(False,) + (True,) * (length - 1),
        logprobs=(0.0,) * length,
        versions=(0,) * length,
        score=Score(reward, components or {}),
        truncated=prompt.index == 0,
        text=f"answer {reward:g}",
    )


def evaluated(sets, play, tmp_path, *, max_samples=None, batch=100):
    evaluator = Evaluator(sets, play, max_samples=max_samples, batch=batch, answers=tmp_path / "answers")
    calls = []
    metrics = asyncio.run(evaluator(7, lambda: calls.append(None)))
    assert len(calls) == sum(min(len(dataset), max_samples or len(dataset)) for dataset in sets.values())
    lines = (tmp_path / "answers" / "step_000007.jsonl").read_text(encoding="utf-8").splitlines()
    return {name: metric.value for name, metric in metrics.items()}, [json.loads(line) for line in lines]


async def right_below_three(prompt):
    return [sample(prompt, float(prompt.index < 3))]


def test_one_set_has_the_plain_names(tmp_path):
    metrics, records = evaluated({"": Numbers(4)}, right_below_three, tmp_path)
    assert metrics == {
        "val/reward": 0.75,
        "val/accuracy": 0.75,
        "val/length": 2.5,
        "val/truncated": 0.25,
        "val/failed": 0,
    }
    assert [record["id"] for record in records] == ["0", "1", "2", "3"]
    assert records[3] == {
        "id": "3",
        "sample": 0,
        "question": "3?",
        "answer": "3",
        "response": "answer 0",
        "reward": 0.0,
        "truncated": False,
    }


def test_several_sets_have_names_of_their_own_and_are_counted_together(tmp_path):
    metrics, records = evaluated({"small": Numbers(4, "s"), "large": Numbers(12, "l")}, right_below_three, tmp_path)
    assert metrics["val/small/accuracy"] == 0.75
    assert metrics["val/large/accuracy"] == 0.25
    assert metrics["val/accuracy"] == 6 / 16  # of all prompts, not of the two means
    assert [record["set"] for record in records] == ["small"] * 4 + ["large"] * 12


def test_k_answers_give_pass_at_k_and_mean_at_k(tmp_path):
    async def play(prompt):  # prompt i has i right answers of 4, its first ones
        return [sample(prompt, float(number < prompt.index), components={"format": 0.5}) for number in range(4)]

    metrics, records = evaluated({"": Numbers(3)}, play, tmp_path)
    assert metrics["val/accuracy"] == metrics["val/mean@4"] == 3 / 12
    assert metrics["val/pass@4"] == 2 / 3
    assert metrics["val/pass@2"] == pytest.approx((0 + 1 / 2 + 5 / 6) / 3)
    assert metrics["val/reward/format"] == 0.5
    assert [(record["id"], record["sample"]) for record in records] == [(str(i), n) for i in range(3) for n in range(4)]
    assert records[0]["components"] == {"format": 0.5}


def test_the_first_prompts_are_taken_and_only_so_many_at_one_time(tmp_path):
    running, most = 0, 0

    async def play(prompt):
        nonlocal running, most
        running += 1
        most = max(most, running)
        for _ in range(prompt.index % 3 + 1):
            await asyncio.sleep(0)
        running -= 1
        return await right_below_three(prompt)

    metrics, records = evaluated({"": Numbers(50)}, play, tmp_path, max_samples=20, batch=6)
    assert most == 6
    assert [record["id"] for record in records] == [str(index) for index in range(20)]
    assert metrics["val/accuracy"] == 3 / 20


def test_a_prompt_that_fails_is_counted_and_named_and_changes_no_mean(tmp_path, caplog):
    async def play(prompt):
        if prompt.index == 1:
            raise RolloutFailed("the judge slept")
        return await right_below_three(prompt)

    metrics, records = evaluated({"a": Numbers(4), "b": Numbers(1)}, play, tmp_path)
    assert (metrics["val/failed"], metrics["val/a/failed"], metrics["val/b/failed"]) == (1, 1, 0)
    assert metrics["val/a/accuracy"] == pytest.approx(2 / 3)
    assert len(records) == 4
    assert "1 of 4 validation prompts of a failed; the first: the judge slept" in caplog.text


def test_a_set_of_which_nothing_can_be_scored_ends_the_run(tmp_path):
    async def play(prompt):
        raise RolloutFailed("no judge")

    with pytest.raises(ValueError, match="none of the 3 validation prompts of a could be scored; the first: no judge"):
        asyncio.run(Evaluator({"a": Numbers(3)}, play, max_samples=None, batch=2, answers=tmp_path)(0, list))
