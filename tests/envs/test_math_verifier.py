"""math_verify: whatever an expression does, it costs one worker; the fuzz test neither crashes nor hangs."""

import asyncio
import os
import random
import sys
import time

import pytest

from tandem.envs.verifiers import build_verifier, check_answers
from tandem.envs.worker import MOST_SERVED
from tandem.envs.workers import RequestLost, Workers
from tandem.types import Prompt, RolloutFailed, Score
from tests.envs.asking import ask_all, verifier_config

MATH = verifier_config(name="math_verify")
TOWER = r"\boxed{9^{9^{9^{9}}}}"  # has more digits than memory has bits
SEED, ROUNDS = 20240817, 120
PIECES = [
    *(r"\frac{", r"\boxed{", r"\sqrt[", r"\left(", r"\right)", r"\begin{pmatrix}", r"\end{pmatrix}", r"\int_0^", "\\"),
    *(
        "}",
        "{",
        "$",
        "$$",
        "^",
        "_",
        "&",
        r"\\",
        "9",
        "1e999",
        "0",
        "x",
        "!",
        "=",
        "<",
        ",",
        " ",
        "\n",
        "\x00",
        "\udcff",
    ),
    *("٣", "∞", "½", "√", r"\text{", "%", "#", "(", ")", "[", "]", "|", "+", "-", "/", r"\sum_{n=1}^{\infty}", "'"),
]
PATHOLOGICAL = [
    TOWER,
    r"\boxed{9^{9^{9^9}}}",
    r"\boxed{(10^{10^{10}})!}",
    r"\boxed{" + "9" * 30_000 + "}",
    r"\boxed{" + "{" * 3_000 + "1" + "}" * 3_000 + "}",
    r"\boxed{" + r"\frac{1}{" * 400 + "2" + "}" * 400 + "}",
    r"\boxed{" + r"\sqrt{" * 300 + "2" + "}" * 300 + "}",
    "{" * 20_000,
    "$" * 20_000,
    r"\boxed{" * 5_000,
    "(" * 5_000 + "1" + ")" * 5_000,
    r"\boxed{" + "+".join(f"x^{{{power}}}" for power in range(400)) + "}",
    r"\boxed{(x+y+z+w+1)^{300}}",
    r"\boxed{\sum_{n=1}^{10^{12}} \frac{1}{n^2}}",
    r"\boxed{\frac{0}{0}}",
    r"\boxed{1" + "0" * 4_500 + "}",
    "The answer is " * 4_000,
    "1/" * 10_000,
    "\x00" * 100,
    "",
]


def noise(draw):
    """Random bytes as text, or LaTeX put together blindly."""
    if draw.random() < 0.5:
        return draw.randbytes(draw.randrange(200)).decode("utf-8", "surrogateescape")
    return "".join(draw.choice(PIECES) for _ in range(draw.randrange(60)))


def test_noise_and_pathological_latex_end_in_a_score_within_their_time():
    draw = random.Random(SEED)
    config = verifier_config(name="math_verify", timeout_s=1, num_workers=2)
    pairs = [("72", response) for response in PATHOLOGICAL + [noise(draw) for _ in range(ROUNDS)]]
    started = time.monotonic()
    scores = ask_all(config, [*pairs, ("72", r"\boxed{72}")])
    assert time.monotonic() - started < 120
    assert all(isinstance(score, Score) for score in scores)
    assert scores[-1] == Score(1.0)
    assert {score.reward for score in scores[: len(PATHOLOGICAL)]} == {0.0}


@pytest.mark.parametrize("name", ["gsm8k", "dapo_math", "exact"])
def test_noise_ends_in_a_score_of_the_verifiers_without_processes_too(name):
    draw = random.Random(SEED)
    responses = PATHOLOGICAL + [lead + noise(draw) for _ in range(ROUNDS) for lead in ("#### ", "Answer: ")]
    started = time.monotonic()
    scores = ask_all(verifier_config(name=name), [("72", response) for response in responses])
    assert {score.reward for score in scores} == {0.0}
    assert time.monotonic() - started < 20


def test_a_hung_expression_costs_one_worker_and_others_go_on():
    config = verifier_config(name="math_verify", timeout_s=2, num_workers=1)
    assert ask_all(config, [("2", r"\boxed{2}"), ("2", TOWER), ("2", r"\boxed{2}")]) == [Score(1), Score(0), Score(1)]


def test_a_hung_expression_may_fail_the_rollout_instead():
    config = verifier_config(name="math_verify", timeout_s=1, on_timeout="drop")
    (failure,) = ask_all(config, [("2", TOWER)])
    assert isinstance(failure, RolloutFailed)
    assert failure.kind == "data"
    assert "'row:0'" in str(failure)
    assert "on_timeout=drop" in str(failure)


def test_a_reference_answer_that_cannot_be_read_is_refused_before_the_run_and_never_scored():
    with pytest.raises(ValueError, match=r"name=math_verify compares expressions.*first 'b' with '\}\{'"):
        check_answers(MATH, [("a", r"\frac{1}{2}"), ("b", "}{")])
    (failure,) = ask_all(MATH, [("}{", r"\boxed{1}")])
    assert isinstance(failure, RolloutFailed)
    assert "cannot read the reference answer of prompt 'row:0'" in str(failure)


def test_a_reference_answer_that_hangs_is_refused_before_the_run():
    config = verifier_config(name="math_verify", timeout_s=0.5)
    with pytest.raises(ValueError, match="first 'b'"):
        check_answers(config, [("a", r"\frac{1}{2}"), ("b", TOWER)])


def alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_no_process_is_left_behind_by_close_or_by_a_cancelled_score():
    async def cancelled_then_closed():
        verifier = build_verifier(MATH)
        prompt = Prompt(0, "row:0", "", "2", (1,))
        assert (await verifier.score(prompt, r"\boxed{2}")).reward == 1
        (worker,) = verifier._workers._idle
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await verifier.score(prompt, TOWER)
        assert verifier._workers._idle == []
        await verifier.close()
        return worker.pid

    assert not alive(asyncio.run(cancelled_then_closed()))


def test_a_worker_that_has_grown_or_served_long_is_replaced_before_it_fails_a_later_request():
    async def is_kept(memory_bytes, requests):
        workers = Workers("search", count=1, memory_bytes=memory_bytes)
        first = await workers._start()
        workers._idle.append(first)
        for _ in range(requests):
            assert await workers.ask({"pattern": "a*", "flags": 0, "text": "a", "whole": True}, 30) is True
        kept = workers._idle == [first]
        await workers.close()
        return kept

    assert asyncio.run(is_kept(1 << 30, MOST_SERVED - 1))
    assert not asyncio.run(is_kept(1 << 30, MOST_SERVED))
    if sys.platform == "linux":
        assert not asyncio.run(is_kept(20 << 20, 1))  # Python alone is more than half of that


def test_a_worker_ends_by_itself_when_nobody_is_there_to_end_it():
    async def abandoned():
        workers = Workers("search", count=1)
        trap = {"pattern": "(a*)*b", "flags": 0, "text": "a" * 60, "whole": False}
        worker = await workers._start()
        worker.stdin.write(
            b'{"pattern": "(a*)*b", "flags": 0, "text": "' + b"a" * 60 + b'", "whole": false, "timeout_s": 0}\n'
        )
        async with asyncio.timeout(30):
            assert await worker.wait() < 0  # by its alarm
        with pytest.raises(RequestLost, match=r"took longer than 0\.2 s"):
            await workers.ask(trap, 0.2)
        idle = await workers._start()
        idle.stdin.close()
        async with asyncio.timeout(30):
            assert await idle.wait() == 0  # with its input
        await workers.close()

    asyncio.run(abandoned())
