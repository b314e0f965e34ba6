"""Verifiers: right is 1, wrong is 0, and what cannot be scored is neither."""

import asyncio
import json
import time
from pathlib import Path

import pytest

from tandem.config.env import ArithmeticVerifier, Gsm8kVerifier, PythonVerifier
from tandem.envs.verifiers import build_verifier, check_answers
from tandem.types import Prompt, RolloutFailed, Score

GSM8K_DATA = Path(__file__).parents[2].parent / "shared" / "data" / "gsm8k"
ARITHMETIC, GSM8K = ArithmeticVerifier(name="arithmetic"), Gsm8kVerifier(name="gsm8k")


def ask(config, answer, response):
    prompt = Prompt(0, "row:7", "How many?", answer, (1,))
    return asyncio.run(build_verifier(config).score(prompt, response))


ARITHMETIC_PAIRS = [
    ("13", "17-12=5. 5+8=13. The answer is 13.", 1),
    ("13", "The answer is 13.", 1),
    ("13", "The answer is 13", 1),
    ("13", "the answer is: 13", 1),
    ("13", "The answer is 13.0.", 1),
    ("13", "The answer is +13.", 1),
    ("-4", "The answer is -4.", 1),
    ("-4", "The answer is \u22124.", 1),
    ("0", "The answer is -0.", 1),
    ("13", "The answer is 12. The answer is 13.", 1),
    ("13", "The answer is 13. The answer is 12.", 0),
    ("13", "The answer is 13. The answer is", 0),
    ("13", "The answer is 3.", 0),
    ("13", "The answer is 131.", 0),
    ("13", "The answer is -13.", 0),
    ("13", "The answer is 13.5.", 0),
    ("13", "The answer is 1 3.", 0),
    ("13", "The answer is 5+8=13.", 0),
    ("5", "The answer is 5+8=13.", 0),
    ("5", "The answer is 5 - 2.", 0),
    ("13", "The answer is not 13.", 0),
    ("13", "The answer is thirteen.", 0),
    ("13", "13", 0),
    ("13", "#### 13", 0),
    ("13", "The answer 13.", 0),
    ("13", "The answer isn't 13. ", 0),
    ("13", "", 0),
    ("13", "The answer is", 0),
    ("13", "The answer is .", 0),
    ("13", "The answer is The answer is 13", 1),
]

GSM8K_PAIRS = [
    ("72", "#### 72", 1),
    ("72", "48/2 = 24\n48+24 = 72\n#### 72", 1),
    ("Natalia sold 48/2 = <<48/2=24>>24 clips.\n#### 72", "So the answer is 72.", 1),
    ("#### 72", "#### 24", 0),
    ("#### 72", "The answer is 24. #### 72", 1),
    ("#### 72", "#### 72\nNo: the answer is 24", 0),
    ("1,200", "#### 1200", 1),
    ("#### 1200", "#### 1,200", 1),
    ("1200", "#### $1,200.00", 1),
    ("1234567", "#### 1,234,567", 1),
    ("1200", "#### 1 200", 1),
    ("1200", "#### 1\u202f200", 1),
    ("1200", "#### 1,20", 0),
    ("1", "#### 1,23", 0),
    ("123", "#### 1,23", 0),
    ("12", "#### 12,34,567", 0),
    ("72", "####72", 1),
    ("72", "####\n72", 1),
    ("72", "#### **72**", 1),
    ("72", "**The answer is** 72 clips", 1),
    ("72", "The answer is: **$72**.", 1),
    ("72", r"The answer is $\boxed{72}$.", 1),
    ("72", r"The answer is \(72\).", 1),
    ("72", r"The answer is \$72", 1),
    ("72", "The answer is €72!", 1),
    ("72", "The answer is 72% of them", 1),
    ("72", "The answer is 72km", 1),
    ("72", "The answer is 72\n- 3 more to go", 1),
    ("72", "The answer is **72** 3 times over", 1),
    ("72", "The answer is 072", 1),
    ("72", "THE ANSWER IS 72", 1),
    ("-3", "#### -$3", 1),
    ("-3", "#### $-3", 1),
    ("-3", "#### - 3", 1),
    ("-3", "#### \u22123", 1),
    ("3", "#### -3", 0),
    ("3", "#### --3", 0),
    ("0.5", "#### 1/2", 1),
    ("1/2", "#### .5", 1),
    ("1/2", "#### 2/4", 1),
    ("1.5", "#### 1 1/2", 1),
    ("-1.5", "#### -1 1/2", 1),
    ("3", "#### 3/0", 0),
    ("0", "#### 0/0", 0),
    ("3", "#### 3/4/5", 0),
    ("0.1", "#### 0.1", 1),
    ("0.3", "#### 0.30000000000000004", 0),
    ("3", "#### 3.0000", 1),
    ("5000", "#### 5e3", 0),
    ("5", "#### 5e3", 0),
    ("5", "#### 5**2", 0),
    ("5", "#### 5 * 2", 0),
    ("5", "#### 5-6", 0),
    ("3", "#### 3:30", 0),
    ("1.2", "#### 1.2.3", 0),
    ("72", "#### about 72", 0),
    ("72", "#### x = 72", 0),
    ("72", "### 72", 0),
    ("72", "72", 0),
    ("72", "#### " + "9" * 5000, 0),
    ("72", "#### ", 0),
    ("72", "#### NaN", 0),
    ("72", "#### ٧٢", 0),
]


@pytest.mark.parametrize(("answer", "response", "reward"), ARITHMETIC_PAIRS)
def test_arithmetic_reads_the_number_after_the_last_the_answer_is(answer, response, reward):
    assert ask(ARITHMETIC, answer, response) == Score(float(reward))


@pytest.mark.parametrize(("answer", "response", "reward"), GSM8K_PAIRS)
def test_gsm8k_reads_the_number_after_the_last_marker(answer, response, reward):
    assert ask(GSM8K, answer, response) == Score(float(reward))


@pytest.mark.parametrize("filler", [" ", "$", "- ", "The answer is ", "1,", "1/", "1 ", "\\boxed{", "9", "#"])
def test_a_response_made_to_be_slow_is_not(filler):
    started = time.perf_counter()
    ask(GSM8K, "72", "The answer is " + filler * 200_000)
    assert time.perf_counter() - started < 2


@pytest.mark.parametrize("answer", ["", "many", "72 clips", "#### many", "1,23", "5 + 3"])
def test_a_reference_answer_without_a_number_is_found_before_the_run_and_never_scored(answer):
    with pytest.raises(RolloutFailed, match=r"row:7.*no number"):
        ask(GSM8K, answer, "#### 72")
    with pytest.raises(ValueError, match="first 'b'"):
        check_answers(GSM8K, [("a", "72"), ("b", answer)])


def test_reference_answers_are_not_read_for_a_function_of_the_user():
    check_answers(PythonVerifier(name="python", target="any:thing"), [("a", "not a number")])


@pytest.mark.skipif(not GSM8K_DATA.exists(), reason="../shared/data/gsm8k is not here")
@pytest.mark.parametrize("name", ["train.jsonl", "test.jsonl"])
def test_every_reference_answer_of_gsm8k_is_read_and_is_right_by_itself(name):
    rows = [json.loads(line) for line in (GSM8K_DATA / name).read_text(encoding="utf-8").splitlines()]
    check_answers(GSM8K, [(str(index), row["answer"]) for index, row in enumerate(rows)])
    verifier = build_verifier(GSM8K)

    async def rewards(response):
        prompts = [Prompt(index, str(index), row["question"], row["answer"], ()) for index, row in enumerate(rows)]
        return [(await verifier.score(prompt, response(prompt))).reward for prompt in prompts]

    assert set(asyncio.run(rewards(lambda prompt: prompt.answer))) == {1.0}
    assert set(asyncio.run(rewards(lambda p: f"The answer is {p.answer.split('####')[1].strip()}."))) == {1.0}
    assert set(asyncio.run(rewards(lambda prompt: prompt.answer + "9"))) == {0.0}
