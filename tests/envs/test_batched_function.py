"""A user's function that takes many at a time: batched in order, and only the row at fault fails."""

import asyncio
import itertools
import sys

import pytest

from tandem.config.env import PythonVerifier
from tandem.envs.batching import Batches
from tandem.envs.verifiers import build_verifier
from tandem.types import RolloutFailed, Score
from tests.envs.asking import ask_all

numbers = itertools.count()


@pytest.fixture
def rewards(tmp_path, monkeypatch):
    """Writes a module into the current directory and gives the section that names its `score`."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])

    def write(source, batch_size=4):
        module = f"batched_rewards_{next(numbers)}"
        (tmp_path / f"{module}.py").write_text(source)
        return PythonVerifier(name="python", target=f"{module}:score", batch_size=batch_size)

    return write


@pytest.mark.parametrize("kind", ["def", "async def"])
def test_three_lists_go_in_and_a_list_comes_out(rewards, kind):
    config = rewards(
        f"{kind} score(questions, answers, responses):\n  return [float(a == r) for a, r in zip(answers, responses)]"
    )
    pairs = [(str(number), str(number % 3)) for number in range(10)]
    assert ask_all(config, pairs) == [Score(float(number < 3)) for number in range(10)]


def test_components_and_any_iterable_may_come_back(rewards):
    config = rewards("def score(q, a, r): return ({'right': 1, 'short': 0.5} for _ in r)")
    assert ask_all(config, [("1", "x")] * 2) == [Score(1.5, {"right": 1.0, "short": 0.5})] * 2


def test_what_waits_while_one_call_is_made_goes_into_the_next_one():
    calls = []

    async def ask():
        began, go_on = asyncio.Event(), asyncio.Event()

        async def call(items):
            calls.append(list(items))
            began.set()
            await go_on.wait()
            return [item * 10 for item in items]

        batches = Batches(call, 3)
        first = asyncio.ensure_future(batches.ask(0))
        await began.wait()
        others = [asyncio.ensure_future(batches.ask(number)) for number in range(1, 6)]
        await asyncio.sleep(0)
        go_on.set()
        return await asyncio.gather(first, *others)

    assert asyncio.run(ask()) == [0, 10, 20, 30, 40, 50]
    assert calls == [[0], [1, 2, 3], [4, 5]]


def test_a_caller_that_is_cancelled_in_the_middle_of_its_call_takes_nobody_with_it():
    calls = []

    async def ask():
        stuck = asyncio.Event()

        async def call(items):
            calls.append(list(items))
            if "stuck" in items:
                stuck.set()
                await asyncio.Event().wait()
            return items

        batches = Batches(call, 8)
        first = asyncio.ensure_future(batches.ask("stuck"))
        second = asyncio.ensure_future(batches.ask("good"))
        await stuck.wait()
        first.cancel()
        return await second

    assert asyncio.run(ask()) == "good"
    assert calls[0][0] == "stuck"
    assert calls[-1] == ["good"]


def test_of_a_batch_that_fails_only_the_row_at_fault_does(rewards):
    config = rewards("def score(q, a, r):\n  if 'bad' in r: raise KeyError('bad')\n  return [1.0] * len(r)")
    scores = ask_all(config, [("1", "good"), ("1", "bad"), ("1", "good"), ("1", "good")])
    assert [isinstance(score, RolloutFailed) for score in scores] == [False, True, False, False]
    assert "on prompt 'row:1' raised KeyError: 'bad'" in str(scores[1])


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("return [1.0] * (len(r) + 1)", "returned 2 results for 1 responses; wanted: a function (questions"),
        ("return 1.0", "returned 1.0 of type float; wanted: a function (questions, answers, responses), three lists"),
        ("return '1'", "returned '1' of type str"),
        ("return {'right': 1}", "of type dict"),
        ("return [None]", "returned None of type NoneType"),
        ("return [float('nan')]", "returned nan"),
        ("raise SystemExit(3)", "SystemExit: 3"),
    ],
)
def test_what_goes_wrong_fails_the_rollout(rewards, body, message):
    (failure,) = ask_all(rewards(f"def score(q, a, r):\n  {body}"), [("1", "1")])
    assert isinstance(failure, RolloutFailed)
    assert message in str(failure)


def test_a_function_that_cannot_be_called_is_refused_when_it_is_built(rewards):
    with pytest.raises(ValueError, match=r"three lists.*batch_size is set"):
        build_verifier(rewards("def score(rows): return rows"))
