"""A user's own reward function, `module:name`: found and checked before the run, called with care during it."""

from __future__ import annotations

import inspect
import math
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from numbers import Real

from tandem.config.env import PythonVerifier
from tandem.envs.batching import Batches
from tandem.envs.user_code import in_thread, load_named
from tandem.types import Prompt, RolloutFailed, Score

UserFunction = Callable[..., object]  # of three texts, or of three lists of them
Texts = tuple[str, str, str]  # question, answer, response
Ask = Callable[[Texts], Awaitable[object]]
WANTED = "a function (question, answer, response) that returns a number or {component: number}"
WANTED_BATCHED = (
    "a function (questions, answers, responses), three lists, that returns a list with a number or {component: number}"
    " for each (env.verifier.batch_size is set)"
)


def load_function(target: str, *, wanted: str = WANTED) -> UserFunction:
    """Import `module:name` and see that it takes what it will be given."""
    where = f"env.verifier.target={target!r}"
    function = load_named(target, "env.verifier.target", example="my_rewards:score", wanted=wanted)
    try:
        inspect.signature(function).bind("question", "answer", "response")
    except TypeError as error:
        raise ValueError(f"{where} takes {inspect.signature(function)}: {error}; wanted: {wanted}") from error
    return function


def build_function_verifier(config: PythonVerifier) -> FunctionVerifier:
    """One response a call, or several where the recipe gives a batch_size."""
    if config.batch_size is None:
        return FunctionVerifier(config.target, one_by_one(load_function(config.target)))
    function = load_function(config.target, wanted=WANTED_BATCHED)
    return FunctionVerifier(config.target, Batches(many_at_once(function), config.batch_size).ask)


def one_by_one(function: UserFunction) -> Ask:
    """A call for each response."""

    async def ask(row: Texts) -> object:
        return await _call(function, *row)

    return ask


def many_at_once(function: UserFunction) -> Callable[[Sequence[Texts]], Awaitable[Sequence[object]]]:
    """A call for several responses. What comes back is one result each, or an error."""

    async def ask(rows: Sequence[Texts]) -> Sequence[object]:
        try:
            results = await _call(function, *(list(column) for column in zip(*rows, strict=True)))
        except SystemExit as error:
            raise RuntimeError(f"SystemExit: {error}") from error  # to be told to each of the batch
        if isinstance(results, str | Mapping) or not isinstance(results, Iterable):
            raise TypeError(f"returned {results!r:.60} of type {type(results).__name__}; wanted: {WANTED_BATCHED}")
        if len(listed := list(results)) != len(rows):
            raise ValueError(f"returned {len(listed)} results for {len(rows)} responses; wanted: {WANTED_BATCHED}")
        return listed

    return ask


class FunctionVerifier:
    """Asks a user's function. Whatever goes wrong in it fails the rollout and is never taken for a reward of 0."""

    def __init__(self, target: str, ask: Ask) -> None:
        """`ask` gives the function's result for one response; `target` is its name in messages."""
        self._target = target
        self._ask = ask

    async def score(self, prompt: Prompt, response: str) -> Score:
        what = f"reward function {self._target} on prompt {prompt.id!r}"
        try:
            result = await self._ask((prompt.question, prompt.answer, response))
        except (Exception, SystemExit) as error:
            raise RolloutFailed(f"{what} raised {type(error).__name__}: {error}") from error
        return _score(result, what)

    async def close(self) -> None:
        """It holds nothing."""


async def _call(function: UserFunction, *arguments: str | list[str]) -> object:
    """Await an async function; run any other in a thread of its own."""
    if inspect.iscoroutinefunction(function):
        return await function(*arguments)
    result = await in_thread(lambda: function(*arguments), "score")
    return await result if inspect.isawaitable(result) else result


def _score(result: object, what: str) -> Score:
    if isinstance(result, Mapping):
        if not result:
            raise RolloutFailed(f"{what} returned an empty mapping; wanted: {WANTED}")
        components = {_component(name, what): _number(part, what) for name, part in result.items()}
        return Score(_number(sum(components.values()), what), components)
    return Score(_number(result, what))


def _component(name: object, what: str) -> str:
    if not isinstance(name, str):
        raise RolloutFailed(f"{what} returned a component named {name!r}, not by a text; wanted: {WANTED}")
    return name


def _number(value: object, what: str) -> float:
    if not isinstance(value, Real):
        raise RolloutFailed(f"{what} returned {value!r:.60} of type {type(value).__name__}; wanted: {WANTED}")
    try:
        number = float(value)
    except OverflowError as error:
        raise RolloutFailed(f"{what} returned a number too large for a float") from error
    if not math.isfinite(number):
        raise RolloutFailed(f"{what} returned {number}: a reward must be finite")
    return number
