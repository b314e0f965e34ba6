"""Local files: JSON lines, JSON lists, CSV and parquet by their ending, folders, and what is said of wrong ones."""

import json

import pytest

from tandem.config.data import FileData
from tandem.data.rows import Row
from tandem.data.sources import rows_of

GOOD = '{"question": "2 + 3?", "answer": "5"}\n'


@pytest.fixture
def read(tmp_path):
    def write_and_read(content, name="rows.jsonl", on_bad_row="error", **fields):
        path = tmp_path / name
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return rows_of(FileData(name="file", path=str(path), **fields), 0, on_bad_row=on_bad_row)

    return write_and_read


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


def test_windows_files_are_read(read):
    assert read(b"\xef\xbb\xbf" + GOOD.replace("\n", "\r\n").encode())[0].question == "2 + 3?"
    assert read(b"\xef\xbb\xbfquestion,answer\r\n2 + 3?,5\r\n", "rows.csv")[0] == Row("rows.csv:2", "2 + 3?", "5")


@pytest.mark.parametrize("content", [GOOD + GOOD, "\n [" + GOOD + "," + GOOD + "]"])
def test_json_may_be_lines_or_a_list(read, content):
    assert [(row.question, row.answer) for row in read(content, "rows.json")] == [("2 + 3?", "5")] * 2


def test_a_csv_has_a_header_quotes_and_lines_within_quotes(read):
    rows = read('level,question,answer\n1,"a ""b"",\nc",5\n\n2,d,"1,000"\n', "rows.CSV")
    assert rows == [Row("rows.CSV:2", 'a "b",\nc', "5"), Row("rows.CSV:5", "d", "1,000")]


def test_a_csv_may_hold_cells_longer_than_the_csv_modules_limit(read):
    assert len(read(f"question,answer\n{'x' * 200_000},5\n", "rows.csv")[0].question) == 200_000


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("rows.jsonl", "", "is empty: it needs rows, such as"),
        ("rows.jsonl", "\n  \n", "is empty"),
        ("rows.jsonl", GOOD + "not json", "rows.jsonl:2: is not JSON"),
        ("rows.jsonl", GOOD + '{"question": "q", "answer": "5"', "rows.jsonl:2: is not JSON"),
        ("rows.jsonl", '{"question": "q", "answer": "5"} {"question": "r"}', "rows.jsonl:1: is not JSON"),
        ("rows.jsonl", '["q", "5"]', "rows.jsonl:1: is a list, not a JSON object"),
        ("rows.jsonl", "null", "rows.jsonl:1: is null, not a JSON object"),
        ("rows.jsonl", '{"question": "q"}', "has no field 'answer'; its fields: 'question'. Set `answer_field`"),
        ("rows.jsonl", b'{"question": "caf\xe9", "answer": "5"}', "rows.jsonl:1: is not UTF-8"),
        ("rows.jsonl", '{"question": "q", "answer": ' + "9" * 5000 + "}", "rows.jsonl:1: is not JSON (Exceeds"),
        ("rows.jsonl", "[" * 100_000, "rows.jsonl:1: is not JSON (maximum recursion"),
        ("rows.json", "[1, 2", "rows.json:1: is not JSON"),
        ("rows.json", "[" * 100_000, "rows.json: is not JSON (maximum recursion"),
        ("rows.json", "[3]", "rows.json, entry 1: is a number, not a JSON object"),
        ("rows.csv", "", "is empty"),
        ("rows.csv", "question,answer\n", "is empty"),
        ("rows.csv", "question,answer\nq,5\nq\n", "rows.csv:3: has 1 cells, but the header names 2 columns"),
        ("rows.csv", 'question,answer\nq,5\n"q', "is not CSV"),
        ("rows.csv", "question,question\nq,5\n", "rows.csv:1: the header names the column 'question' twice"),
        ("rows.csv", "q,a\nx,5\n", "rows.csv:2: has no field 'question'; its fields: 'q', 'a'"),
        ("rows.csv", b"question,answer\nq,5\ncaf\xe9,5\n", "rows.csv:3: is not UTF-8"),
        ("rows.parquet", b"PAR1 but torn", "cannot be read as parquet"),
        ("rows.txt", GOOD, "the ending '.txt', which is no known format: wanted one of .jsonl"),
    ],
)
def test_a_bad_file_is_refused_with_its_place(read, name, content, message):
    if name.endswith(".parquet"):
        pytest.importorskip("pyarrow")
    with pytest.raises(ValueError, match="rows") as error:
        read(content, name)
    assert message in str(error.value)


def test_a_bad_line_is_a_row_that_can_be_skipped(read, caplog):
    torn = b'{"question": "caf\xe9", "answer": 1}\n'
    rows = read(GOOD.encode() + b"not json\n" + GOOD.encode() + torn + b"{}\n", on_bad_row="skip")
    assert [row.id for row in rows] == ["rows.jsonl:1", "rows.jsonl:3"]
    assert "3 of 5 rows skipped" in caplog.text
    assert "rows.jsonl:2: is not JSON" in caplog.text


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(ValueError, match="does not exist"):
        rows_of(FileData(name="file", path=str(tmp_path / "missing.jsonl")), 0)


def test_a_folder_stands_for_its_files_in_the_order_of_their_names(tmp_path):
    for name in ("b", "a", ".hidden"):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"question": name, "answer": 1}))
    (tmp_path / "README.md").write_text("about")
    source = FileData(name="file", path=str(tmp_path))
    assert [row.id for row in rows_of(source, 0)] == ["a.jsonl:1", "b.jsonl:1"]
    (tmp_path / "c.csv").write_text("question,answer\nq,5\n")
    with pytest.raises(ValueError, match=r"several kinds \(\.csv, \.jsonl\)"):
        rows_of(source, 0)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="holds no data files"):
        rows_of(FileData(name="file", path=str(tmp_path / "empty")), 0)


def test_parquet_rows_keep_their_nested_fields(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    records = [
        {
            "prompt": [{"role": "user", "content": f"What is {number} + 1?"}],
            "reward_model": {"ground_truth": str(number + 1), "style": "rule"},
            "extra_info": {"index": number},
            "unread": "x" * 10,
        }
        for number in range(3000)  # more than one batch
    ]
    parquet.write_table(pyarrow.Table.from_pylist(records), tmp_path / "train.parquet")
    source = FileData(
        name="file",
        path=str(tmp_path / "train.parquet"),
        prompt_field="prompt",
        answer_field="reward_model.ground_truth",
    )
    rows = rows_of(source, 0)
    assert len(rows) == 3000
    assert rows[2500] == Row("train.parquet:2501", "What is 2500 + 1?", "2501")
    assert rows_of(source.model_copy(update={"id_field": "extra_info.index"}), 0)[7].id == "7"
    with pytest.raises(ValueError, match=r"row 1: has no field 'answer'; its fields: 'prompt', 'reward_model', 'extra"):
        rows_of(source.model_copy(update={"answer_field": "answer"}), 0)
