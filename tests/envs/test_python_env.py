"""A user's own environment: turns, rewards that add up, limits, and every way it can be wrong."""

import asyncio
import threading

import pytest

from tandem.config.env import PythonEnv
from tandem.data.dialogue import Dialogue
from tandem.envs.multi_turn import MultiTurn
from tandem.envs.python_env import PythonPartner, load_environment
from tandem.types import RolloutFailed, Score
from tests.envs.talking import HERMES, Says, chat_of, pieces, prompt_of

CLOSED: list[str] = []
GATE = threading.Event()


class Guess:
    """Says higher or lower."""

    def __init__(self, prize: float = 1.0, parts: bool = False) -> None:
        self._prize, self._parts, self._wanted = prize, parts, 0

    def reset(self, question, answer):
        self._wanted = int(answer)

    def step(self, response):
        right = int(response) == self._wanted
        reward = self._prize if right else -0.25
        said = "right" if right else ("higher" if int(response) < self._wanted else "lower")
        return said, ({"hit": float(right), "cost": reward} if self._parts else reward), right

    def close(self):
        CLOSED.append("guess")


class Awaited(Guess):
    """The same, awaited in the run's own loop."""

    async def reset(self, question, answer):
        super().reset(question, answer)
        self._loop = asyncio.get_running_loop()

    async def step(self, response):
        assert self._loop is asyncio.get_running_loop()
        return super().step(response)


class Odd:
    """Returns what it is told to."""

    RESULT: object = None
    RESET: object = None

    def reset(self, question, answer):
        return self.RESET

    def step(self, response):
        if self.RESULT == "hang":
            GATE.wait()
        if isinstance(self.RESULT, Exception):
            raise self.RESULT
        return self.RESULT


class Endless(Guess):
    """A step that does not end."""

    STARTED = threading.Event()

    async def step(self, response):
        self.STARTED.set()
        await asyncio.Event().wait()


class NoStep:
    def reset(self, question, answer): ...


class OneArgument:
    def reset(self, question): ...

    def step(self, response): ...


@pytest.fixture(autouse=True)
def _fresh():
    CLOSED.clear()
    GATE.clear()
    yield
    GATE.set()


def play(name, texts, **settings):
    chat = chat_of(HERMES)
    engine = Says([(*chat.encode_text(text), chat.eos_token_id) for text in texts])
    return asyncio.run(environment(chat, name, **settings).play(prompt_of(chat), engine)), engine, chat


def environment(chat, name, *, max_turns=8, max_tokens=1000, timeout_s=20.0, **arguments):
    config = PythonEnv(
        name="python", target=f"{__name__}:{name}", arguments=arguments, timeout_s=timeout_s, max_turns=max_turns
    )
    make = load_environment(config)

    async def open_partner(prompt):
        return await PythonPartner(prompt, make, config).open()

    speech = Dialogue(chat, [chat.eos_token_id], "user")
    return MultiTurn(open_partner, speech, max_turns=max_turns, max_tokens=max_tokens)


@pytest.mark.parametrize("name", ["Guess", "Awaited"])
def test_it_answers_each_turn_until_it_is_done_and_rewards_add_up(name):
    sample, engine, chat = play(name, ["9", "2", "5"])
    assert sample.score == Score(0.5)
    assert not sample.truncated
    kinds = [wrote for wrote, _ in pieces(sample)]
    assert kinds == [False, True, False, True, False, True]
    assert chat.verbatim(pieces(sample)[2][1]) == "\n<|im_start|>user\nlower<|im_end|>\n<|im_start|>assistant\n"
    assert [ids for wrote, ids in pieces(sample) if wrote] == [written.tokens for written in engine.written]
    assert CLOSED == ["guess"]


def test_parts_of_rewards_add_up_by_name():
    sample, _, _ = play("Guess", ["9", "5"], parts=True, prize=2.0)
    assert sample.score == Score(2.75, {"hit": 1.0, "cost": 1.75})


def test_a_turn_limit_truncates_and_keeps_the_rewards_so_far():
    sample, engine, _ = play("Guess", ["9", "8", "7"], max_turns=2)
    assert sample.truncated
    assert sample.score == Score(-0.5)
    assert len(engine.written) == 2
    assert CLOSED == ["guess"]


def test_a_token_budget_truncates():
    whole, _, _ = play("Guess", ["9", "5"])
    sample, _, _ = play("Guess", ["9", "5"], max_tokens=len(whole.tokens) - 2)
    assert sample.truncated
    assert sample.score == Score(-0.25)


@pytest.mark.parametrize(
    ("result", "wanted"),
    [
        ("text", "returned 'text'; wanted"),
        (("hi", "much", False), "returned a reward of 'much'"),
        (("hi", float("nan"), False), "returned a reward of nan"),
        (("hi", {}, False), "returned a reward of {}"),
        (("hi", 1.0, "yes"), "done 'yes'"),
        ((None, 1.0, False), "observation None"),
        ((3, 1.0, False), "observation 3"),
        (OSError("gone"), "raised OSError: gone"),
        (ValueError("no"), "raised ValueError: no"),
    ],
)
def test_a_wrong_step_fails_the_rollout_and_is_no_reward(monkeypatch, result, wanted):
    monkeypatch.setattr(Odd, "RESULT", result)
    with pytest.raises(RolloutFailed) as failed:
        play("Odd", ["5", "5"])
    assert wanted in str(failed.value)
    assert "'row:7'" in str(failed.value)


def test_a_step_that_hangs_fails_the_rollout_as_the_machinerys_fault(monkeypatch):
    monkeypatch.setattr(Odd, "RESULT", "hang")
    with pytest.raises(RolloutFailed, match=r"longer than env\.timeout_s=0\.05") as failed:
        play("Odd", ["5"], timeout_s=0.05)
    assert failed.value.kind == "infrastructure"


def test_a_reset_that_says_something_is_refused(monkeypatch):
    monkeypatch.setattr(Odd, "RESET", "Welcome!")
    with pytest.raises(RolloutFailed, match="must return None"):
        play("Odd", ["5"])


def test_rewards_with_other_parts_in_other_turns_fail(monkeypatch):
    results = iter([("a", {"x": 1.0}, False), ("b", 1.0, True)])
    monkeypatch.setattr(Odd, "step", lambda self, response: next(results))
    with pytest.raises(RolloutFailed, match="other components"):
        play("Odd", ["5", "5"])


def test_an_episode_that_is_broken_off_is_closed():
    with pytest.raises(RolloutFailed, match="raised ValueError"):
        play("Guess", ["no number"])
    assert CLOSED == ["guess"]


def test_an_episode_that_is_cancelled_in_the_middle_is_closed():
    chat = chat_of(HERMES)

    async def run():
        engine = Says([(*chat.encode_text("5"), chat.eos_token_id)])
        task = asyncio.ensure_future(environment(chat, "Endless").play(prompt_of(chat), engine))
        await asyncio.to_thread(Endless.STARTED.wait, 20)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(run())
    assert CLOSED == ["guess"]


@pytest.mark.parametrize(
    ("target", "arguments", "wanted"),
    [
        ("NoStep", {}, "has no method step"),
        ("OneArgument", {}, "does not take ('question', 'answer')"),
        ("Guess", {"price": 1.0}, "unexpected keyword argument 'price'"),
        ("Gone", {}, "has no 'Gone'"),
        ("GATE", {}, "not a class"),
    ],
)
def test_a_class_that_does_not_fit_is_refused_before_the_run(target, arguments, wanted):
    with pytest.raises(ValueError, match=r"env\.target") as error:
        load_environment(PythonEnv(name="python", target=f"{__name__}:{target}", arguments=arguments))
    assert wanted in str(error.value)
