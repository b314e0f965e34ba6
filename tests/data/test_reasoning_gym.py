"""Problems of reasoning-gym as rows: the same for the same seed, and what cannot be had is named."""

import json

import pytest

from tandem.config.data import ReasoningGymData
from tandem.data.sources import rows_of

pytest.importorskip("reasoning_gym", reason="needs the extra reasoning-gym")


def rows(*tasks: str, **settings):
    return rows_of(ReasoningGymData(name="reasoning_gym", tasks=tasks, **settings), 42)


def test_each_task_gives_its_problems_and_the_seed_says_which():
    made = rows("chain_sum", "leg_counting", size=3, seed=5)
    assert [row.id for row in made] == [f"{task}:5:{n}" for task in ("chain_sum", "leg_counting") for n in range(3)]
    assert made == rows("chain_sum", "leg_counting", size=3, seed=5)
    others = rows("chain_sum", size=3, seed=8)
    assert {row.question for row in made}.isdisjoint(row.question for row in others)
    assert rows("chain_sum", size=1, seed=6)[0].question == made[1].question, "what the rule of overlaps rests on"
    entry = json.loads(made[0].answer)
    assert entry["question"] == made[0].question
    assert entry["metadata"]["source_dataset"] == "chain_sum"


@pytest.mark.parametrize(
    ("task", "wanted"),
    [
        ("chain_sums", "reasoning-gym has no task 'chain_sums'; there are: .*chain_sum"),
        ("composite", "cannot be made with settings of its own alone"),
        ("rearc", "does not know its own answer once it was written down"),
    ],
)
def test_a_task_that_cannot_be_is_named(task, wanted):
    with pytest.raises(ValueError, match=wanted) as error:
        rows(task, size=1)
    assert "data.train.tasks" in str(error.value)
