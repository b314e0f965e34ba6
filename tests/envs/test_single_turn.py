"""One question, one answer: whose token is whose, what is decoded, and a deadline for the score."""

import asyncio
import threading

import pytest

from tandem.envs.single_turn import SingleTurn
from tandem.types import Generation, Prompt, RolloutFailed, Sample, Score

PROMPT = Prompt(3, "row:7", "How many?", "72", (5, 6, 7))
STOP = 2
WRITTEN = Generation((8, 9, STOP), (-0.1, -0.2, -0.3), (4, 4, 5), "stop")


class Exact:
    """Right if the response is the text of ids 8 and 9."""

    async def score(self, prompt, response):
        return Score(float(response == "8 9"), {"length": float(len(response))})


def decode(tokens):
    return " ".join(str(token) for token in tokens if token != STOP)


def play(written=WRITTEN, verifier=None, timeout_s=5.0):
    asked = []

    async def write(tokens):
        asked.append(tuple(tokens))
        return written

    sample = asyncio.run(SingleTurn(verifier or Exact(), decode, score_timeout_s=timeout_s).play(PROMPT, write))
    assert asked == [PROMPT.tokens]
    return sample


def test_the_prompt_is_given_and_every_written_token_is_the_policys_the_stop_token_too():
    assert play() == Sample(
        tokens=(5, 6, 7, 8, 9, STOP),
        mask=(False, False, False, True, True, True),
        logprobs=(0.0, 0.0, 0.0, -0.1, -0.2, -0.3),
        versions=(-1, -1, -1, 4, 4, 5),
        score=Score(1.0, {"length": 3.0}),
        truncated=False,
        text="8 9",
    )


def test_a_response_that_ran_out_of_room_is_truncated():
    assert play(Generation((8,), (-0.1,), (0,), "length")).truncated


def test_a_score_that_does_not_come_in_time_fails_the_rollout():
    class Never:
        async def score(self, prompt, response):
            await asyncio.Event().wait()

    with pytest.raises(RolloutFailed, match=r"'row:7'.*env\.score_timeout_s=0\.01"):
        play(verifier=Never(), timeout_s=0.01)


def test_a_failed_rollout_stays_one_with_its_cause():
    class Broken:
        async def score(self, prompt, response):
            raise RolloutFailed("the judge is down")

    with pytest.raises(RolloutFailed, match="the judge is down"):
        play(verifier=Broken())


def test_an_engine_that_writes_nothing_fails_the_rollout():
    with pytest.raises(RolloutFailed, match="wrote no token"):
        play(Generation((), (), (), "stop"))


def test_closing_the_environment_closes_its_verifier():
    closed = []

    class Held(Exact):
        async def close(self):
            closed.append(True)

    asyncio.run(SingleTurn(Held(), decode, score_timeout_s=1).close())
    assert closed == [True]


def test_a_reward_function_that_hangs_holds_up_neither_the_run_nor_its_end(tmp_path, monkeypatch):
    from tandem.envs.function_verifier import FunctionVerifier, one_by_one

    gate = threading.Event()
    verifier = FunctionVerifier("mine:hangs", one_by_one(lambda question, answer, response: gate.wait()))
    with pytest.raises(RolloutFailed, match="score_timeout_s"):
        play(verifier=verifier, timeout_s=0.01)
    assert all(thread.daemon for thread in threading.enumerate() if thread.name == "score")
    gate.set()
