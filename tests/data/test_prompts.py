"""Prompts by index: the same for the same seed and index, every row once an epoch, too long ones found at the start."""

import logging

import pytest

from tandem.config.run import ArithmeticData, JsonlData
from tandem.data.jsonl import Row
from tandem.data.prompts import Prompts, rows_of
from tandem.types import Prompt

ROWS = [Row(f"row:{number}", f"{'x' * number}?", str(number)) for number in range(1, 11)]


def encode(text):
    return tuple(text.encode())


def prompts(rows=ROWS, **changes):
    settings = {"template": "{question}", "shuffle": True, "seed": 0, "max_prompt_tokens": 100, "on_too_long": "error"}
    return Prompts(rows, encode, **(settings | changes))


def test_a_prompt_is_its_row_its_place_and_its_tokens():
    assert prompts(shuffle=False).prompt(12) == Prompt(12, "row:3", "xxx?", "3", tuple(b"xxx?"))


def test_a_prompt_depends_on_seed_and_index_only():
    forwards, backwards = prompts(), prompts()
    there = [forwards.prompt(index) for index in range(60)]
    back = [backwards.prompt(index) for index in reversed(range(60))]
    assert there == back[::-1]
    assert there != [prompts(seed=1).prompt(index) for index in range(60)]


def test_the_order_never_changes_between_releases():
    # A resumed run must go on with the order it began with.
    data = prompts(seed=42)
    assert [int(data.prompt(index).answer) for index in range(10)] == [10, 6, 3, 8, 1, 9, 4, 2, 7, 5]


def test_every_epoch_has_every_row_once_in_an_order_of_its_own():
    data = prompts()
    epochs = [[data.prompt(epoch * 10 + place).id for place in range(10)] for epoch in range(4)]
    assert all(sorted(epoch) == sorted(row.id for row in ROWS) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 4
    assert [prompts(shuffle=False).prompt(index).id for index in range(20)] == [row.id for row in ROWS] * 2


def test_the_template_is_filled_in_as_it_is_written():
    data = prompts([Row("a", "{question} {0} 2?", "4")], template=r"{question} Answer in \boxed{} {x}.")
    assert bytes(data.prompt(0).tokens).decode() == r"{question} {0} 2? Answer in \boxed{} {x}."


def test_a_template_without_the_question_is_refused():
    with pytest.raises(ValueError, match=r"data\.prompt_template='Solve: {prompt}' has no {question}"):
        prompts(template="Solve: {prompt}")


def test_no_rows_are_refused():
    with pytest.raises(ValueError, match="empty"):
        prompts([])


def test_a_prompt_that_is_too_long_is_an_error_that_names_it_and_the_way_out():
    with pytest.raises(ValueError, match="3 of 10 prompts") as error:
        prompts(max_prompt_tokens=8)
    for part in (
        "'row:8' with 9",
        "longest 11",
        "the 8 tokens",
        "policy.max_total_sequence_length",
        "data.on_too_long=skip",
    ):
        assert part in str(error.value)


def test_too_long_prompts_can_be_skipped_and_are_counted(caplog):
    with caplog.at_level(logging.WARNING):
        data = prompts(max_prompt_tokens=8, on_too_long="skip")
    assert len(data) == 7
    assert {data.prompt(index).id for index in range(7)} == {f"row:{number}" for number in range(1, 8)}
    assert "3 of 10 prompts" in caplog.text
    with pytest.raises(ValueError, match="none fits"):
        prompts(max_prompt_tokens=1, on_too_long="skip")


def test_sources_become_rows(tmp_path):
    train = rows_of(ArithmeticData(name="arithmetic", size=50), seed=3)
    assert len({row.id for row in train}) == 50
    assert train == rows_of(ArithmeticData(name="arithmetic", size=50), seed=3)
    assert train != rows_of(ArithmeticData(name="arithmetic", size=50), seed=4)
    validation = rows_of(ArithmeticData(name="arithmetic", size=50, split="validation"), seed=3)
    assert not {row.question for row in train} & {row.question for row in validation}
    (tmp_path / "rows.jsonl").write_text('{"question": "q", "answer": 5}')
    assert rows_of(JsonlData(name="jsonl", path=str(tmp_path / "rows.jsonl")), seed=3) == [
        Row("rows.jsonl:1", "q", "5")
    ]
