"""A user's own environment, a class `module:Class`: it answers each turn, rewards it, and ends the episode."""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import Callable, Mapping
from numbers import Real
from typing import Any

from tandem.config.env import PythonEnv
from tandem.envs.multi_turn import Turn
from tandem.envs.user_code import in_thread, load_named
from tandem.types import Prompt, Reply, RolloutFailed, Score

WANTED = "(observation, reward, done): a text or None, a number or {component: number}, true or false"
METHODS = {"reset": ("question", "answer"), "step": ("response",)}


def load_environment(config: PythonEnv) -> Callable[[], Any]:
    """What makes the object of an episode. ValueError when the class, or what it is given, does not fit."""
    found = load_named(config.target, "env.target", example="my_envs:Guess", wanted="a class")
    where = f"env.target={config.target!r}"
    for name, arguments in METHODS.items():
        method = vars(found).get(name) if not isinstance(found, type) else inspect.getattr_static(found, name, None)
        if not callable(method):
            raise ValueError(
                f"{where} has no method {name}: wanted a class with reset(question, answer), and step(response), which"
                f" returns {WANTED}"
            )
        try:
            inspect.signature(method).bind("self", *arguments)
        except TypeError as error:
            raise ValueError(
                f"{where}: {name}{inspect.signature(method)} does not take {arguments}: {error}"
            ) from error
    try:
        inspect.signature(found).bind(**config.arguments)
    except TypeError as error:
        raise ValueError(
            f"{where} takes {inspect.signature(found)}, not env.arguments={config.arguments}: {error}"
        ) from error
    return lambda: found(**config.arguments)


class PythonPartner:
    """One episode with an object of the user's. Whatever goes wrong in it fails the rollout."""

    def __init__(self, prompt: Prompt, make: Callable[[], Any], config: PythonEnv) -> None:
        self._prompt = prompt
        self._make = make
        self._config = config
        self._object: Any = None
        self._rewards: list[Mapping[str, float] | float] = []

    async def open(self) -> PythonPartner:
        """Begin the episode."""
        try:
            self._object = await self._call("making it", self._make)
            said = await self._call("reset", lambda: self._object.reset(self._prompt.question, self._prompt.answer))
        except BaseException:
            await self.close()
            raise
        if said is not None:
            await self.close()
            raise RolloutFailed(
                f"{self._what('reset')} returned {said!r:.60}: it must return None. The episode begins with the prompt:"
                " what is to be in it belongs into the data"
            )
        return self

    async def reply(self, turn: Turn) -> list[Reply] | None:
        result = await self._call("step", lambda: self._object.step(turn.text))
        if not isinstance(result, tuple) or len(result) != 3:
            raise RolloutFailed(f"{self._what('step')} returned {result!r:.60}; wanted: {WANTED}")
        observation, reward, done = result
        self._rewards.append(self._reward(reward))
        if not isinstance(done, bool) or not isinstance(observation, str | None) or (observation is None and not done):
            raise RolloutFailed(
                f"{self._what('step')} returned observation {observation!r:.60} and done {done!r}; wanted: {WANTED},"
                " and a text unless done"
            )
        return None if done or observation is None else [Reply("user", observation)]

    async def score(self) -> Score:
        """The sum of the rewards of all turns, part by part where they have parts."""
        parts = [reward for reward in self._rewards if isinstance(reward, Mapping)]
        if not parts:
            return Score(sum(reward for reward in self._rewards if not isinstance(reward, Mapping)))
        if len(parts) < len(self._rewards) or any(part.keys() != parts[0].keys() for part in parts):
            raise RolloutFailed(f"{self._what('step')} returned rewards with other components in other turns")
        components = {name: sum(part[name] for part in parts) for name in parts[0]}
        return Score(sum(components.values()), components)

    async def close(self) -> None:
        """Call the object's own close(), where it has one."""
        made, self._object = self._object, None
        if made is not None and callable(inspect.getattr_static(made, "close", None)):
            await self._call("close", lambda: made.close())

    async def _call(self, method: str, work: Callable[[], Any]) -> Any:
        """In a thread; what it returns is awaited here, where other awaits of the same object run."""
        limit = asyncio.timeout(self._config.timeout_s)
        try:
            async with limit:
                result = await in_thread(work, "environment")
                return await result if inspect.isawaitable(result) else result
        except RolloutFailed:
            raise
        except (Exception, SystemExit) as error:
            if isinstance(error, TimeoutError) and limit.expired():
                late = f"{self._what(method)} took longer than env.timeout_s={self._config.timeout_s:g}"
                raise RolloutFailed(f"{late}: raise it, or make it faster", "infrastructure") from error
            raise RolloutFailed(f"{self._what(method)} raised {type(error).__name__}: {error}") from error

    def _what(self, method: str) -> str:
        return f"{method} of {self._config.target} on prompt {self._prompt.id!r}"

    def _reward(self, reward: object) -> Mapping[str, float] | float:
        if isinstance(reward, Mapping) and reward:
            return {str(name): self._number(part) for name, part in reward.items()}
        return self._number(reward)

    def _number(self, value: object) -> float:
        if not isinstance(value, Real) or not math.isfinite(value):
            raise RolloutFailed(f"{self._what('step')} returned a reward of {value!r:.60}; wanted: {WANTED}")
        return float(value)
