"""Which implementation is the verifier of a recipe, and which reference answers it can compare with."""

from __future__ import annotations

import re
from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager

from tandem import roles
from tandem.config.env import (
    ArithmeticVerifier,
    CodeVerifier,
    DapoMathVerifier,
    ExactVerifier,
    FormatReward,
    Gsm8kVerifier,
    LengthReward,
    LlmJudgeVerifier,
    MathVerifyVerifier,
    PythonVerifier,
    ReasoningGymVerifier,
    RegexVerifier,
    RewardModelVerifier,
    Verifier,
    WeightedSum,
)
from tandem.envs.code_verifier import Code, tests_problem
from tandem.envs.dapo import DapoMath, normalised
from tandem.envs.function_verifier import build_function_verifier
from tandem.envs.math_verifier import MathVerify, first_unreadable
from tandem.envs.numerals import GSM8K_MARKER, SENTENCE_MARKER, number_after_last, reference_number
from tandem.envs.reasoning_gym import ReasoningGym, first_unscorable
from tandem.envs.text_verifiers import Exact, Length, Search
from tandem.envs.weighted_sum import Sum
from tandem.types import Prompt, RolloutFailed, Score

OWN_FUNCTION = "else score with your own function (env.verifier.name=python)"
Answers = Sequence[tuple[str, str]]


def build_verifier(config: Verifier) -> roles.Verifier:
    """The verifier of `env.verifier`. What it needs is loaded and checked here, before anything is generated."""
    match config:
        case ArithmeticVerifier():
            return NumberVerifier(SENTENCE_MARKER)
        case Gsm8kVerifier():
            return NumberVerifier(GSM8K_MARKER)
        case DapoMathVerifier():
            return DapoMath()
        case MathVerifyVerifier():
            return MathVerify(config)
        case ExactVerifier():
            return Exact(config)
        case RegexVerifier() | FormatReward():
            return Search(config)
        case LengthReward():
            return Length(config)
        case PythonVerifier():
            return build_function_verifier(config)
        case WeightedSum():
            parts = {}
            for name, part in config.components.items():
                with naming_the_part(name):
                    parts[name] = (part.weight, build_verifier(part.verifier))
            return Sum(parts)
        case CodeVerifier():
            return Code(config)
        case ReasoningGymVerifier():
            return ReasoningGym(config)
        case RewardModelVerifier():
            from tandem.envs.reward_model import RewardModel  # heavy: only where it is asked for

            return RewardModel(config)
        case LlmJudgeVerifier():
            from tandem.envs.llm_judge import LlmJudge  # as above

            return LlmJudge(config)


@contextmanager
def naming_the_part(name: str) -> Generator[None]:
    """A ValueError inside says of which component it is."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"env.verifier.components.{name}: {error}") from error


def check_answers(config: Verifier, answers: Iterable[tuple[str, str]]) -> None:
    """Refuse (id, reference answer) pairs that the verifier cannot compare with, before anything is generated."""
    _check(config, list(answers))


def _check(config: Verifier, answers: Answers) -> None:
    match config:
        case WeightedSum():
            for name, part in config.components.items():
                with naming_the_part(name):
                    _check(part.verifier, answers)
        case ArithmeticVerifier() | Gsm8kVerifier():
            wrong = [pair for pair in answers if reference_number(pair[1]) is None]
            _refuse(config.name, "compares numbers, but", wrong, "a number, or a text with the number after `####`")
        case DapoMathVerifier():
            wrong = [pair for pair in answers if not normalised(pair[1])]
            _refuse(config.name, "compares final answers, but", wrong, "a number or a short expression")
        case MathVerifyVerifier():
            wrong = [pair] if (pair := first_unreadable(config, answers)) else []
            _refuse(config.name, "compares expressions, but", wrong, "a number or an expression in LaTeX")
        case ReasoningGymVerifier():
            wrong = [pair] if (pair := first_unscorable(config, answers)) else []
            _refuse(config.name, "scores by its entry, but", wrong, "what data.train.name=reasoning_gym gives")
        case ExactVerifier() | RegexVerifier():
            wrong = [pair for pair in answers if not pair[1].strip()]
            _refuse(config.name, "compares texts, but", wrong, "a text that says something")
        case CodeVerifier():
            wrong = [(name, problem) for name, answer in answers if (problem := tests_problem(config, answer))]
            wanted = '[{"input": "1 2", "output": "3"}]' if config.tests == "stdio" else "assert f(1) == 2"
            _refuse(
                config.name,
                "runs the tests of the answer, but",
                wrong,
                f"as {wanted} (env.verifier.tests={config.tests})",
            )


def _refuse(name: str, compares: str, wrong: Answers, wanted: str) -> None:
    if not wrong:
        return
    first, answer = wrong[0]
    count = f"{len(wrong)} reference answers" if len(wrong) > 1 else "a reference answer"
    raise ValueError(
        f"env.verifier.name={name} {compares} {count} cannot be read: first {first!r} with {answer[-160:]!r}. "
        f"Wanted: {wanted}; {OWN_FUNCTION}"
    )


class NumberVerifier:
    """1 if the number after the response's last marker equals the reference answer's, else 0."""

    def __init__(self, marker: re.Pattern[str]) -> None:
        self._marker = marker

    async def score(self, prompt: Prompt, response: str) -> Score:
        wanted = reference_number(prompt.answer)
        if wanted is None:
            raise RolloutFailed(
                f"the reference answer of prompt {prompt.id!r} holds no number: {prompt.answer[-60:]!r}"
            )
        return Score(float(number_after_last(self._marker, response) == wanted))

    async def close(self) -> None:
        """It holds nothing."""
