"""Code against its tests: what passes, what does not, and what is never run."""

import json
import time

import pytest

from tandem.envs.code_verifier import code_of
from tandem.envs.verifiers import check_answers
from tandem.types import RolloutFailed, Score
from tests.envs.asking import ask_all, landlock_is_here, verifier_config

pytestmark = pytest.mark.skipif(not landlock_is_here(), reason="the sandbox needs Linux with Landlock")
CODE = verifier_config(name="code", cpu_s=1)
TESTS = "assert double(1) == 2\nassert double(5) == 10\nfor n in range(3):\n    pass\ncheck(double)\n"
CHECK = "def check(f):\n    assert f(7) == 14\n" + TESTS


def block(source, language="python"):
    return f"Here it is:\n```{language}\n{source}\n```\nDone."


RIGHT = "def double(x):\n    return 2 * x"


@pytest.mark.parametrize(
    ("response", "share"),
    [
        (block(RIGHT), 1.0),
        (block(RIGHT, "py"), 1.0),
        (block(RIGHT, ""), 1.0),
        (block("def double(x): return 0") + block(RIGHT), 1.0),
        (block(RIGHT) + block("def double(x): return 0"), 0.0),
        (block(RIGHT) + block("ls", "bash"), 1.0),
        (block("def double(x): return 2 if x == 1 else 0"), 1 / 3),
        (block("def double(x): return x + x if x < 6 else 0"), 2 / 3),
        (RIGHT, 0.0),
        (f"```python\n{RIGHT}", 0.0),
        ("", 0.0),
        (block("def double(x) return 2"), 0.0),
        (block("raise ValueError"), 0.0),
        (block("import sys\nsys.exit(0)"), 0.0),
        (block("import os\nos._exit(0)"), 0.0),
        (block("print('3 3')\nimport os\nos._exit(0)"), 0.0),
        (block("import atexit\nwhile True: pass"), 0.0),
        (block(RIGHT + "\nimport os\nos.fork()"), 0.0),
        (block(RIGHT + "\nimport atexit\natexit.register(print, 'late')"), 1.0),
        (block("def double(x):\n    while x == 5: pass\n    return 2 * x"), 0.0),
        (block(RIGHT + "\nimport threading\nthreading.Thread(target=threading.Event().wait).start()"), 1.0),
        (block(RIGHT + "\nx = '\x00'"), 0.0),
    ],
)
def test_the_share_of_asserts_and_calls_that_pass(response, share):
    fraction = CODE.model_copy(update={"reward": "fraction"})
    assert ask_all(fraction, [(CHECK, response)]) == [Score(pytest.approx(share))]
    assert ask_all(CODE, [(CHECK, response)]) == [Score(float(share == 1))]


CASES = json.dumps([{"input": "1 2\n", "output": "3\n"}, {"input": "5 5", "output": "10"}])


@pytest.mark.parametrize(
    ("source", "share"),
    [
        ("print(sum(map(int, input().split())))", 1.0),
        ("import sys\nprint(sum(map(int, sys.stdin.read().split())), end='  \\n\\n')\nsys.exit()", 1.0),
        ("print(3)", 0.5),
        ("print('3' if '1' in input() else 10 / 0)", 0.5),
        ("print(4)", 0.0),
        ("print(sum(map(int, input().split())))\nraise SystemExit(1)", 0.0),
        ("import time\ntime.sleep(100)", 0.0),
    ],
)
def test_the_share_of_inputs_that_give_the_wanted_output(source, share):
    config = CODE.model_copy(update={"tests": "stdio", "reward": "fraction", "timeout_s": 2.0})
    assert ask_all(config, [(CASES, block(source))]) == [Score(share)]
    assert ask_all(config.model_copy(update={"reward": "all"}), [(CASES, block(source))]) == [Score(float(share == 1))]


@pytest.mark.parametrize(
    ("tests", "answer", "said"),
    [
        ("asserts", "assert f(1 == 2", "was never closed"),
        ("asserts", "x = 1", "no assert and no call at the top level"),
        ("asserts", "", "no assert"),
        ("stdio", "72", "the whole: Input should be a valid"),
        ("stdio", "assert f(1) == 2", "Invalid JSON"),
        ("stdio", "[]", "an empty list"),
        ("stdio", '[{"input": "1"}]', "0.output: Field required"),
        ("stdio", '[{"input": 1, "output": "1"}]', "0.input"),
    ],
)
def test_tests_that_cannot_be_run_are_refused_before_the_run_and_never_scored(tests, answer, said):
    config = CODE.model_copy(update={"tests": tests})
    with pytest.raises(ValueError, match=r"name=code runs the tests.*first 'b'") as error:
        check_answers(config, [("a", CASES if tests == "stdio" else TESTS), ("b", answer)])
    assert said in str(error.value)
    (failure,) = ask_all(config, [(answer, block(RIGHT))])
    assert isinstance(failure, RolloutFailed)
    assert said in str(failure)


@pytest.mark.parametrize("filler", ["```", "`", "```python\n", "   ", "\n"])
def test_a_response_made_to_be_slow_to_read_is_not(filler):
    started = time.perf_counter()
    code_of(filler * 30_000)
    assert time.perf_counter() - started < 2
