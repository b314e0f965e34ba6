"""Records to rows: fields by dotted names, prompts that are lists of messages, ids, repeats, and what is wrong."""

import logging

import pytest

from tandem.data.rows import BadRow, Fields, Message, Reading, Record, Row, read_rows

FIELDS = Fields("question", "answer")


def records(*values):
    return [Record(f"rows.jsonl:{number}", f"rows:{number}", value) for number, value in enumerate(values, start=1)]


def read(*values, fields=FIELDS, on_bad_row="error", **settings):
    return read_rows(records(*values), Reading(fields, on_bad_row, **settings), "the set")


def one(question="q", answer="5", **more):
    return {"question": question, "answer": answer, **more}


def test_fields_can_have_other_names_and_other_fields_are_left_alone():
    value = {"problem": "q", "solution": "5", "question": None, "level": [1]}
    assert read(value, fields=Fields("problem", "solution")) == [Row("rows:1", "q", "5")]


def test_a_dotted_name_goes_into_objects_unless_it_is_a_fields_own():
    nested = {"a": {"b": {"c": "5"}}, "a.q": "own", "id": 1}
    assert read(nested, fields=Fields("a.q", "a.b.c")) == [Row("1", "own", "5")]
    with pytest.raises(BadRow, match=r"rows\.jsonl:1: has no field 'a\.x\.c'; its fields: 'a', 'a\.q', 'id'"):
        read(nested, fields=Fields("a.q", "a.x.c"))


def test_a_prompt_may_be_a_list_of_messages_whose_last_is_the_question():
    chat = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "1 + 1?", "name": None},
        {"role": "assistant", "content": "2"},
        {"role": "user", "content": "2 + 3?"},
    ]
    (row,) = read(one(chat))
    assert (row.question, row.answer) == ("2 + 3?", "5")
    assert row.before == (Message("system", "Be brief."), Message("user", "1 + 1?"), Message("assistant", "2"))


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"prompt": "q", "answer": "5"}, "has no field 'question'; its fields: 'prompt', 'answer'. Set `prompt_field`"),
        ({}, "its fields: none"),
        (one(3), "field 'question' is a number"),
        (one(" "), "field 'question' is empty"),
        (one([]), "field 'question' is empty"),
        (one(["q"]), "field 'question', message 1 is a text"),
        (one([{"role": "robot", "content": "q"}]), "message 1 has the role 'robot'"),
        (one([{"role": "user", "content": [{"type": "text"}]}]), "message 1: its content is a list"),
        (one([{"role": "user", "content": ""}]), "message 1: its content is empty"),
        (one([{"role": "user", "content": "q", "tool_calls": [1]}]), "message 1 has 'tool_calls' beside"),
        (one([{"role": "assistant", "content": "q"}]), "ends with a message of 'assistant'"),
        (one(answer=None), "field 'answer' is null"),
        (one(answer=True), "field 'answer' is true or false"),
        (one(answer={"a": 1}), "field 'answer' is an object"),
        (one(answer=b"5"), "field 'answer' is a bytes"),
        (one(id=None), "field 'id' is null"),
        (one("caf\ud83d"), "holds half of a surrogate pair"),
        (one(answer="\udc80"), "holds half of a surrogate pair"),
    ],
)
def test_a_bad_record_is_refused_with_its_place_or_skipped_and_counted(value, message, caplog):
    with pytest.raises(ValueError, match=r"rows\.jsonl:2: ") as error:
        read(one(), value)
    assert message in str(error.value)
    assert "data.on_bad_row=skip" in str(error.value)
    assert read(one(), value, on_bad_row="skip") == [Row("rows:1", "q", "5")]
    assert "1 of 2 rows skipped" in caplog.text
    assert message in caplog.text


def test_two_rows_of_one_id_are_a_mistake():
    with pytest.raises(BadRow, match=r"rows\.jsonl:2: id '1' was already used at rows\.jsonl:1"):
        read(one(id=1), one(id="1"))
    assert len(read(one(id=1), one(id="1"), one(id=2), on_bad_row="skip")) == 2


def test_an_id_field_that_is_named_must_be_there():
    with pytest.raises(BadRow, match="has no field 'uuid'"):
        read(one(), fields=Fields("question", "answer", "uuid"))
    assert read(one(uuid=4), fields=Fields("question", "answer", "uuid"))[0].id == "4"
    assert read(one(), fields=Fields("question", "answer", "uuid", needs_id=False))[0].id == "rows:1"


def test_repeats_are_taken_once_and_counted(caplog):
    values = [one(id=1), one(id=1), one(id=2), one(answer="6", id=3), one("r", id=4)]
    with caplog.at_level(logging.INFO):
        assert [row.id for row in read(*values, drop_repeats=True)] == ["1", "3", "4"]
    assert "2 of 5 rows are repeats" in caplog.text
    assert len(read(one(), one())) == 2  # without an id of their own they are two questions, unless told


def test_a_table_is_read_by_the_columns_that_are_wanted():
    there = ["question", "answer", "solution", "id", "meta", "a.b"]
    assert FIELDS.columns(there) == ["answer", "id", "question"]
    assert FIELDS.columns(["question", "answer", "solution"]) == ["answer", "question"]
    assert Fields("question", "meta.answer", "a.b").columns(there) == ["a.b", "meta", "question"]
    assert Fields("question", "answer", "uuid", needs_id=False).columns(there) == ["answer", "question"]
    assert Fields("question", "answer", "uuid").columns(there) is None
    assert Fields("problem", "answer").columns(there) is None


def test_max_rows_reads_no_further():
    def endless():
        yield from records(one(), {}, one("r"))
        raise AssertionError("read on")

    rows = read_rows(endless(), Reading(FIELDS, "skip", max_rows=2), "the set")
    assert [row.question for row in rows] == ["q", "r"]


def test_no_rows_and_only_bad_rows_are_refused():
    with pytest.raises(ValueError, match=r'the set is empty: it needs rows, such as \{"question": '):
        read()
    with pytest.raises(ValueError, match=r"none of its 2 rows can be used: first rows\.jsonl:1"):
        read({}, {}, on_bad_row="skip")
