"""JSON-lines files: what a row may be, and one clear message for each way a file can be wrong."""

import json

import pytest

from tandem.config.run import JsonlData
from tandem.data.jsonl import Row, read_jsonl


@pytest.fixture
def read(tmp_path):
    def write_and_read(content, **fields):
        path = tmp_path / "rows.jsonl"
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return read_jsonl(JsonlData(name="jsonl", path=str(path), **fields))

    return write_and_read


GOOD = '{"question": "2 + 3?", "answer": "5"}\n'


def test_rows_are_named_by_their_file_and_line(read):
    assert read(GOOD + "\n" + GOOD) == [Row("rows.jsonl:1", "2 + 3?", "5"), Row("rows.jsonl:3", "2 + 3?", "5")]


def test_rows_are_named_by_their_own_id(read):
    assert read('{"id": "a", "question": "q", "answer": ""}\n{"id": 7, "question": "q", "answer": "5"}') == [
        Row("a", "q", ""),
        Row("7", "q", "5"),
    ]


@pytest.mark.parametrize(("value", "answer"), [(5, "5"), (-0.5, "-0.5"), ("5", "5"), ("é\u2028", "é\u2028")])
def test_an_answer_may_be_a_text_or_a_number(read, value, answer):
    assert read(json.dumps({"question": "q", "answer": value}, ensure_ascii=False))[0].answer == answer


def test_fields_can_have_other_names_and_other_fields_are_left_alone(read):
    rows = read(
        '{"problem": "q", "solution": "5", "question": null, "level": [1]}',
        prompt_field="problem",
        answer_field="solution",
    )
    assert rows == [Row("rows.jsonl:1", "q", "5")]


def test_windows_files_are_read(read):
    assert read(b"\xef\xbb\xbf" + GOOD.replace("\n", "\r\n").encode())[0].question == "2 + 3?"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "is empty: it needs one JSON object a line"),
        ("\n  \n", "is empty"),
        (GOOD + "not json", "rows.jsonl:2: is not JSON"),
        (GOOD + '{"question": "q", "answer": "5"', "rows.jsonl:2: is not JSON"),
        ('{"question": "q", "answer": "5"} {"question": "r", "answer": "6"}', "rows.jsonl:1: is not JSON"),
        ('["q", "5"]', "rows.jsonl:1: is a list, not a JSON object"),
        ("null", "rows.jsonl:1: is null, not a JSON object"),
        ('{"question": "q"}', "has no field 'answer'; its fields: 'question'. Set `answer_field`"),
        (
            '{"prompt": "q", "answer": "5"}',
            "has no field 'question'; its fields: 'prompt', 'answer'. Set `prompt_field`",
        ),
        ("{}", "its fields: none"),
        ('{"question": ["q"], "answer": "5"}', "field 'question' is a list"),
        ('{"question": 3, "answer": "5"}', "field 'question' is a number"),
        ('{"question": " ", "answer": "5"}', "field 'question' is empty"),
        ('{"question": "q", "answer": null}', "field 'answer' is null"),
        ('{"question": "q", "answer": true}', "field 'answer' is true or false"),
        ('{"question": "q", "answer": {"a": 1}}', "field 'answer' is an object"),
        ('{"id": null, "question": "q", "answer": "5"}', "field 'id' is null"),
        (b'{"question": "caf\xe9", "answer": "5"}', "rows.jsonl:1: is not UTF-8"),
        (
            '{"id": 1, "question": "q", "answer": "5"}\n\n{"id": "1", "question": "q", "answer": "5"}',
            "rows.jsonl:3: id '1' was already used in line 1",
        ),
    ],
)
def test_a_bad_file_is_refused_with_its_place(read, content, message):
    with pytest.raises(ValueError, match=r"rows\.jsonl") as error:
        read(content)
    assert message in str(error.value)


def test_a_missing_file_and_a_directory_are_refused(tmp_path):
    with pytest.raises(ValueError, match="does not exist"):
        read_jsonl(JsonlData(name="jsonl", path=str(tmp_path / "missing.jsonl")))
    with pytest.raises(ValueError, match="is a directory"):
        read_jsonl(JsonlData(name="jsonl", path=str(tmp_path)))
