"""Verifiers: is the response right? The built-in ones compare numbers exactly; `python` asks the user's own function."""

from __future__ import annotations

import asyncio
import importlib
import inspect
import math
import numbers
import os
import sys
import threading
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass

from tandem import roles
from tandem.config.run import ArithmeticVerifier, Gsm8kVerifier, PythonVerifier, Verifier
from tandem.envs.numbers import GSM8K_MARKER, SENTENCE_MARKER, number_after_last, whole_number
from tandem.types import Prompt, RolloutFailed, Score

UserFunction = Callable[[str, str, str], object]


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
    """Refuse (id, reference answer) pairs that the verifier could not compare with, before anything is generated."""
    if isinstance(config, PythonVerifier):
        return
    ids = [id for id, answer in answers if reference_number(answer) is None]
    if ids:
        raise ValueError(
            f"env.verifier.name={config.name} compares numbers, but {len(ids)} reference answers hold none, first"
            f" {ids[0]!r}. Wanted: a number, or a text with the number after `####` or `The answer is`"
        )
