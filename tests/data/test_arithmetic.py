"""The built-in word problems: pure, in range, right, and split without overlap."""

import re
import subprocess
import sys

import pytest

from tandem.data.arithmetic import LARGEST, SMALLEST, Problem, problem, split_of

DRAWS = 2000


def test_a_problem_depends_on_its_seed_split_and_index_only():
    backwards = {index: problem(3, index) for index in reversed(range(50))}
    assert [problem(3, index) for index in range(50)] == [backwards[index] for index in range(50)]
    assert problem(3, 7) != problem(4, 7)
    assert problem(3, 7) != problem(3, 7, "validation")


def test_the_stream_never_changes_between_releases():
    # The shipped model and every published curve were made with these draws.
    assert problem(0, 0) == Problem(
        question="Ben has 17 books, wins 12 more, loses 7. How many books?",
        answer=22,
        worked="17+12=29. 29-7=22. The answer is 22.",
    )


@pytest.mark.parametrize("split", ["train", "validation"])
def test_the_worked_answer_is_right_and_never_below_zero(split):
    for index in range(DRAWS):
        drawn = problem(1, index, split)
        left, sign, right, total = re.findall(r"(\d+)([+-])(\d+)=(\d+)\.", drawn.worked)[0]
        again, second_sign, third, answer = re.findall(r"(\d+)([+-])(\d+)=(\d+)\.", drawn.worked)[1]
        assert int(total) == int(left) + int(sign + right)
        assert int(answer) == int(again) + int(second_sign + third)
        assert again == total
        assert drawn.worked.endswith(f" {drawn.bare}")
        assert drawn.bare == f"The answer is {drawn.answer}."
        assert drawn.answer == int(answer)
        assert re.findall(r"\d+", drawn.question) == [left, right, third]
        assert all(SMALLEST <= int(number) <= LARGEST for number in (left, right, third))


def test_the_question_tells_the_signs_of_the_sums():
    for index in range(DRAWS):
        drawn = problem(2, index)
        told = ["+" if part.endswith("more") else "-" for part in drawn.question.split(". ")[0].split(", ")[1:]]
        assert told == re.findall(r"\d([+-])\d", drawn.worked)


def test_train_and_validation_share_no_question_and_no_sums_whatever_the_seeds():
    train = [problem(seed, index) for seed in (0, 1) for index in range(DRAWS)]
    validation = [problem(seed, index, "validation") for seed in (0, 5) for index in range(DRAWS)]
    assert not {drawn.question for drawn in train} & {drawn.question for drawn in validation}
    assert not {drawn.worked for drawn in train} & {drawn.worked for drawn in validation}
    assert {split_of(drawn) for drawn in train} == {"train"}
    assert {split_of(drawn) for drawn in validation} == {"validation"}


def test_questions_rarely_repeat():
    assert len({problem(0, index).question for index in range(DRAWS)}) > 0.99 * DRAWS


def test_the_task_needs_no_torch():
    code = "import sys, tandem.data.arithmetic; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
