"""Prompts by index: the same for the same seed and index, every row once an epoch, too long ones found at the start."""

import logging

import pytest

from tandem.config.data import ArithmeticData, FileData, MixtureData
from tandem.data.prompts import Prompts
from tandem.data.rows import Message, Row
from tandem.data.sources import rows_of
from tandem.types import Prompt

ROWS = [Row(f"row:{number}", f"{'x' * number}?", str(number)) for number in range(1, 11)]


def encode(chat):
    return tuple("|".join(message.content for message in chat).encode())


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
    with pytest.raises(ValueError, match=r"prompt_template='Solve: {prompt}' has no {question}"):
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


def test_a_prompt_that_is_too_long_is_named_by_file_and_line_too():
    row = Row("17", "x" * 20, "1", place="rows.jsonl:3")
    with pytest.raises(ValueError, match=r"first '17' \(rows\.jsonl:3\) with 20"):
        prompts([*ROWS, row], max_prompt_tokens=15)


def test_sources_become_rows(tmp_path):
    train = rows_of(ArithmeticData(name="arithmetic", size=50), seed=3)
    assert len({row.id for row in train}) == 50
    assert train == rows_of(ArithmeticData(name="arithmetic", size=50), seed=3)
    assert train != rows_of(ArithmeticData(name="arithmetic", size=50), seed=4)
    validation = rows_of(ArithmeticData(name="arithmetic", size=50, split="validation"), seed=3)
    assert not {row.question for row in train} & {row.question for row in validation}


def test_the_sources_of_a_mixture_keep_their_templates_and_name_their_ids(tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"question": "q", "answer": 5}')
    mine = FileData(name="file", path=str(tmp_path / "rows.jsonl"), prompt_template="Mine: {question}")
    sums = ArithmeticData(name="arithmetic", size=3)
    rows = rows_of(MixtureData(name="mixture", sources={"mine": mine, "sums": sums}), seed=3)
    assert [row.id for row in rows] == ["mine/rows.jsonl:1", "sums/train:0", "sums/train:1", "sums/train:2"]
    data = prompts(rows, shuffle=False, template="All: {question}")
    assert bytes(data.prompt(0).tokens).decode() == "Mine: q"
    assert bytes(data.prompt(1).tokens).decode() == f"All: {rows[1].question}"
    assert len(data) == 4


def test_weights_deal_the_rows_of_each_source_as_often_as_they_say():
    rows = [Row(f"{source}/{number}", "q?", "1", source=source) for source in "ab" for number in range(10)]
    data = prompts(rows, weights={"a": 3, "b": 1})
    dealt = [data.prompt(index).id[0] for index in range(40)]
    assert [dealt[:20].count("a"), dealt[20:].count("a")] == [15, 15]
    long = [*rows[:10], *(Row(f"b/{number}", "q" * 99 + "?", "1", source="b") for number in range(3))]
    with pytest.raises(ValueError, match=r"none of the prompts of data\.train\.sources\.b fits"):
        prompts(long, weights={"a": 3, "b": 1}, max_prompt_tokens=50, on_too_long="skip")


def test_messages_before_the_question_stay_as_they_are():
    row = Row("a", "2 + 3?", "5", before=(Message("user", "{question}"), Message("assistant", "no")))
    assert bytes(prompts([row], template="So: {question}").prompt(0).tokens).decode() == "{question}|no|So: 2 + 3?"
