"""Verifiers: is the response right? The built-in ones compare numbers exactly, `python` asks the user's function."""

from __future__ import annotations

import re
from collections.abc import Iterable

from tandem import roles
from tandem.config.run import ArithmeticVerifier, Gsm8kVerifier, PythonVerifier, Verifier
from tandem.envs.function_verifier import FunctionVerifier, load_function
from tandem.envs.numerals import GSM8K_MARKER, SENTENCE_MARKER, number_after_last, reference_number
from tandem.types import Prompt, RolloutFailed, Score


def build_verifier(config: Verifier) -> roles.Verifier:
    """The verifier of `env.verifier`. A user's function is imported and checked here, before anything is generated."""
    match config:
        case ArithmeticVerifier():
            return NumberVerifier(SENTENCE_MARKER)
        case Gsm8kVerifier():
            return NumberVerifier(GSM8K_MARKER)
        case PythonVerifier():
            return FunctionVerifier(config.target, load_function(config.target))


def check_answers(config: Verifier, answers: Iterable[tuple[str, str]]) -> None:
    """Refuse (id, reference answer) pairs that the verifier cannot compare with, before anything is generated."""
    if isinstance(config, PythonVerifier):
        return
    unreadable = [(name, answer) for name, answer in answers if reference_number(answer) is None]
    if unreadable:
        name, answer = unreadable[0]
        raise ValueError(
            f"env.verifier.name={config.name} compares numbers, but {len(unreadable)} reference answers hold none:"
            f" first {name!r} with {answer[-60:]!r}. Wanted: a number, or a text with the number after `####`;"
            " else score with your own function (env.verifier.name=python)"
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
