"""The library's own scorers, in processes of their own: right, wrong, and scorers that would run what they read."""

import asyncio
import json
from pathlib import Path

import pytest

from tandem.config.data import ReasoningGymData
from tandem.config.env import ReasoningGymVerifier
from tandem.data.sources import rows_of
from tandem.envs.reasoning_gym import ReasoningGym, tagged
from tandem.envs.verifiers import check_answers
from tandem.envs.worker import RUNS_TEXT, called_by
from tandem.types import Prompt

pytest.importorskip("reasoning_gym", reason="needs the extra reasoning-gym")
CONFIG = ReasoningGymVerifier(name="reasoning_gym", num_workers=1, timeout_s=60.0)


def rows(*tasks):
    return rows_of(ReasoningGymData(name="reasoning_gym", tasks=tasks, size=2), 0)


async def scores(pairs):
    verifier = ReasoningGym(CONFIG)
    try:
        prompts = [Prompt(0, row.id, row.question, row.answer, (1,)) for row, _ in pairs]
        return [(await verifier.score(p, said)).reward for p, (_, said) in zip(prompts, pairs, strict=True)]
    finally:
        await verifier.close()


def test_the_tasks_own_scorer_reads_the_last_answer():
    made = rows("chain_sum", "leg_counting", "basic_arithmetic")
    right = [json.loads(row.answer)["answer"] for row in made]
    pairs = [
        (row, f"<answer>0</answer> no <answer> {answer} </answer>.") for row, answer in zip(made, right, strict=True)
    ]
    pairs += [(made[0], right[0]), (made[0], "<answer>-12345</answer>"), (made[0], "<answer></answer>")]
    found = asyncio.run(scores(pairs))
    assert found[:6] == [1.0] * 6
    assert found[6] == 0.0, "without tags"
    assert max(found[7:]) < 1.0


def test_scorers_that_may_run_what_a_model_wrote_are_found():
    from reasoning_gym.factory import DATASETS

    found = {task for task, (made_by, _) in DATASETS.items() if called_by(made_by, "score_answer") & RUNS_TEXT}
    assert {"spiral_matrix", "countdown", "number_sorting", "simple_integration", "string_insertion"} <= found
    assert found.isdisjoint({"chain_sum", "leg_counting", "basic_arithmetic", "sudoku", "propositional_logic"})
    named = (Path(__file__).parents[2] / "docs" / "environments.md").read_text()
    assert [task for task in found if f"`{task}`" not in named] == []


def test_a_task_with_such_a_scorer_is_refused():
    answers = [(row.id, row.answer) for row in rows("chain_sum", "spiral_matrix")]
    with pytest.raises(ValueError, match="task spiral_matrix calls eval") as error:
        check_answers(CONFIG, answers)
    assert "spiral_matrix:0:0" in str(error.value)


def test_rows_of_another_set_are_refused():
    with pytest.raises(ValueError, match=r"data\.train\.name=reasoning_gym"):
        check_answers(CONFIG, [("row:1", "72")])
    check_answers(CONFIG, [(row.id, row.answer) for row in rows("chain_sum")])


@pytest.mark.parametrize(
    ("response", "found"),
    [
        ("<answer>5</answer>", "5"),
        ("<answer>4</answer> no <answer>\n5 </answer> so", "5"),
        ("5", None),
        ("<answer>5", None),
        ("5</answer>", None),
        ("<answer>5</answer> <answer>6", "5"),
    ],
)
def test_the_last_whole_pair_of_tags_counts(response, found):
    assert tagged(response, "answer") == found
