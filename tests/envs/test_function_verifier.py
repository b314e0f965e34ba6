"""A user's reward function: found or refused before the run, and its failures are never a reward."""

import asyncio
import itertools
import sys
import threading

import pytest

from tandem.config.env import PythonVerifier
from tandem.envs.verifiers import build_verifier
from tandem.types import Prompt, RolloutFailed, Score

PROMPT = Prompt(0, "row:7", "How many?", "72", (1,))
numbers = itertools.count()


@pytest.fixture
def rewards(tmp_path, monkeypatch):
    """Writes a module into the current directory and gives the verifier of one of its names."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])

    def build(source, name="score"):
        module = f"rewards_{next(numbers)}"
        (tmp_path / f"{module}.py").write_text(source)
        return build_verifier(PythonVerifier(name="python", target=f"{module}:{name}"))

    return build


def score(verifier, response="#### 72"):
    return asyncio.run(verifier.score(PROMPT, response))


@pytest.mark.parametrize(
    ("source", "wanted"),
    [
        ("def score(question, answer, response): return float(answer in response)", Score(1.0)),
        ("def score(question, answer, response): return answer in response", Score(1.0)),
        ("def score(q, a, r, strict=False): return -3", Score(-3.0)),
        ("async def score(question, answer, response): return .25", Score(0.25)),
        ("def score(*texts): return len(texts)", Score(3.0)),
        ("def score(q, a, r): return {'right': 1, 'short': .5}", Score(1.5, {"right": 1.0, "short": 0.5})),
        ("class Score:\n  async def __call__(self, q, a, r): return 2\nscore = Score()", Score(2.0)),
        ("class Score:\n  def __call__(self, q, a, r): return 2\nscore = Score()", Score(2.0)),
        ("import numpy\ndef score(q, a, r): return numpy.float32(.5)", Score(0.5)),
    ],
)
def test_a_function_may_be_sync_or_async_and_give_a_number_or_components(rewards, source, wanted):
    assert score(rewards(source)) == wanted


def test_a_sync_function_runs_in_a_thread_and_the_loop_goes_on(rewards):
    verifier = rewards(
        "import threading\nbarrier = threading.Barrier(3)\n"
        "def score(q, a, r):\n  barrier.wait(5)\n  return threading.get_ident()"
    )

    async def three():
        return await asyncio.gather(*(verifier.score(PROMPT, "") for _ in range(3)))

    threads = {one.reward for one in asyncio.run(three())}
    assert len(threads) == 3
    assert threading.get_ident() not in threads


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("raise KeyError('lost')", "raised KeyError: 'lost'"),
        ("raise TimeoutError('slow service')", "raised TimeoutError: slow service"),
        ("raise SystemExit(3)", "raised SystemExit: 3"),
        ("return 1 / 0", "raised ZeroDivisionError"),
        ("return float('nan')", "returned nan: a reward must be finite"),
        ("return float('inf')", "returned inf"),
        ("return {'right': 1, 'style': float('nan')}", "returned nan"),
        ("return 10 ** 400", "too large"),
        ("return {'a': 1e308, 'b': 1e308}", "returned inf"),
        ("return None", "returned None of type NoneType; wanted"),
        ("return '1'", "returned '1' of type str"),
        ("return [1.0]", "type list"),
        ("return 1j", "type complex"),
        ("return {}", "empty mapping"),
        ("return {1: 1.0}", "component named 1"),
        ("return {'right': None}", "returned None"),
    ],
)
@pytest.mark.parametrize("kind", ["def", "async def"])
def test_what_goes_wrong_fails_the_rollout_and_names_function_and_prompt(rewards, kind, body, message):
    with pytest.raises(RolloutFailed, match=r"rewards_\d+:score on prompt 'row:7'") as failure:
        score(rewards(f"{kind} score(question, answer, response):\n  {body}"))
    assert message in str(failure.value)


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("json", "must be written module:name"),
        (":score", "must be written module:name"),
        ("json:", "must be written module:name"),
        ("no_such_module:score", "cannot be imported (ModuleNotFoundError: No module named 'no_such_module')"),
        ("json:score", "has no 'score'; what can be called there: JSONDecoder"),
        ("math:pi", "is a float, not a function"),
        ("json:loads", "a function (question, answer, response)"),
    ],
)
def test_a_target_that_cannot_be_called_is_refused_when_it_is_built(target, message):
    with pytest.raises(ValueError, match=r"env\.verifier\.target") as error:
        build_verifier(PythonVerifier(name="python", target=target))
    assert message in str(error.value)


@pytest.mark.parametrize("source", ["def score(q, a: return 1", "import no_such_package"])
def test_a_module_that_does_not_load_is_refused_when_it_is_built(rewards, source):
    with pytest.raises(ValueError, match="cannot be imported"):
        rewards(source)
