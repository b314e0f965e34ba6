"""Public data sets by name: their fields and answers, read from local copies that these tests write."""

import json

import pytest

from tandem.config.data import (
    Aime2024Data,
    DapoMath17kData,
    Gsm8kData,
    Math500Data,
    OpenMathInstruct2Data,
)
from tandem.data.presets import public_set
from tandem.data.rows import Row
from tandem.data.sources import rows_of


def read(preset, tmp_path, *records, on_bad_row="error"):
    path = tmp_path / "copy.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return rows_of(preset.model_copy(update={"path": str(path)}), 0, on_bad_row=on_bad_row)


def test_gsm8k_answers_are_the_number_after_the_mark(tmp_path):
    worked = "Ana sells 2*600 = <<2*600=1200>>1,200 pens.\n#### 1,200"
    (row,) = read(Gsm8kData(name="gsm8k"), tmp_path, {"question": "How many pens?", "answer": worked})
    assert row == Row("copy.jsonl:1", "How many pens?", "1200")
    with pytest.raises(ValueError, match=r"copy\.jsonl:1: field 'answer' ends in '1,200 pens'; an answer of GSM8K"):
        read(Gsm8kData(name="gsm8k"), tmp_path, {"question": "q", "answer": "1,200 pens"})


def test_dapo_prompts_are_messages_and_each_problem_is_taken_once(tmp_path):
    record = {
        "data_source": "math_dapo",
        "prompt": [{"role": "user", "content": "Solve. The last line is Answer: $Answer.\n\nWhat is 17 + 17?"}],
        "ability": "MATH",
        "reward_model": {"ground_truth": "34", "style": "rule-lighteval/MATH_v2"},
        "extra_info": {"index": "9a9b6eb4-a1cb-49d1-8c1e-62eaf2f74079"},
    }
    other = record | {"extra_info": {"index": "b"}, "reward_model": {"ground_truth": "35"}}
    rows = read(DapoMath17kData(name="dapo_math_17k"), tmp_path, *[record] * 100, other, *[record] * 3)
    assert [(row.id, row.answer) for row in rows] == [("9a9b6eb4-a1cb-49d1-8c1e-62eaf2f74079", "34"), ("b", "35")]
    assert rows[0].question == record["prompt"][0]["content"]


def test_aime_answers_are_whole_numbers(tmp_path):
    record = {"id": 60, "problem": "Find $x$.", "solution": "...", "answer": "025", "url": "u", "year": "2024"}
    assert read(Aime2024Data(name="aime_2024"), tmp_path, record) == [Row("60", "Find $x$.", "25")]
    with pytest.raises(ValueError, match=r"field 'answer' is 'x'; an answer of the AIME is a whole number"):
        read(Aime2024Data(name="aime_2024"), tmp_path, record | {"answer": "x"})


def test_math_500_answers_stay_latex(tmp_path):
    answer = r"\left( 3, \frac{\pi}{2} \right)"
    record = {"problem": "Convert.", "solution": "...", "answer": answer, "unique_id": "test/precalculus/807.json"}
    assert read(Math500Data(name="math_500"), tmp_path, record) == [
        Row("test/precalculus/807.json", "Convert.", answer)
    ]


def test_openmathinstruct2_has_several_solutions_of_a_problem_and_each_is_taken_once(tmp_path):
    solved = [{"problem": "p", "generated_solution": f"way {n}", "expected_answer": "7"} for n in range(3)]
    rows = read(
        OpenMathInstruct2Data(name="openmathinstruct2"), tmp_path, *solved, {"problem": "q"} | {"expected_answer": "8"}
    )
    assert [(row.question, row.answer) for row in rows] == [("p", "7"), ("q", "8")]


def test_the_hub_names_and_splits_are_those_of_the_hub():
    known = {
        preset.name: (hub.dataset, hub.subset, hub.split)
        for preset in (
            Gsm8kData(name="gsm8k", split="test"),
            DapoMath17kData(name="dapo_math_17k"),
            Aime2024Data(name="aime_2024"),
            Math500Data(name="math_500"),
            OpenMathInstruct2Data(name="openmathinstruct2"),
        )
        for hub in [public_set(preset).on_hub(None)]
    }
    assert known == {
        "gsm8k": ("openai/gsm8k", "main", "test"),
        "dapo_math_17k": ("BytedTsinghua-SIA/DAPO-Math-17k", None, "train"),
        "aime_2024": ("HuggingFaceH4/aime_2024", None, "train"),
        "math_500": ("HuggingFaceH4/MATH-500", None, "test"),
        "openmathinstruct2": ("nvidia/OpenMathInstruct-2", None, "train_1M"),
    }


def test_templates_and_row_limits_reach_the_rows(tmp_path):
    preset = Math500Data(name="math_500", prompt_template="Solve: {question}", max_rows=2)
    rows = read(preset, tmp_path, *({"problem": f"p{n}", "answer": "1"} for n in range(5)))
    assert [(row.question, row.template) for row in rows] == [("p0", "Solve: {question}"), ("p1", "Solve: {question}")]
    bad = {"problem": "p", "answer": None}
    assert len(read(preset, tmp_path, bad, {"problem": "p", "answer": "1"}, on_bad_row="skip")) == 1
