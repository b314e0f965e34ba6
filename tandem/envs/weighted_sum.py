"""A reward of several named parts, each with a verifier and a weight of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from tandem.roles import Verifier
from tandem.types import Prompt, RolloutFailed, Score


class Sum:
    """reward = sum over parts of weight x part. The parts themselves, unweighted, are the score's components.

    All parts are asked at one time; where one cannot be scored the whole is not.
    """

    def __init__(self, parts: Mapping[str, tuple[float, Verifier]]) -> None:
        """`parts`: name -> weight and verifier."""
        self._parts = parts

    async def score(self, prompt: Prompt, response: str) -> Score:
        try:
            async with asyncio.TaskGroup() as asked:
                tasks = {
                    name: asked.create_task(self._part(name, verifier, prompt, response))
                    for name, (_, verifier) in self._parts.items()
                }
        except* RolloutFailed as failures:
            first = failures.exceptions[0]
            assert isinstance(first, RolloutFailed), "parts are flat"
            raise first from failures
        components = {name: task.result() for name, task in tasks.items()}
        return Score(sum(self._parts[name][0] * part for name, part in components.items()), components)

    async def _part(self, name: str, verifier: Verifier, prompt: Prompt, response: str) -> float:
        try:
            score = await verifier.score(prompt, response)
        except RolloutFailed as failure:
            raise RolloutFailed(f"env.verifier.components.{name}: {failure}", failure.kind) from failure
        if score.components:
            raise RolloutFailed(
                f"env.verifier.components.{name} gave parts of its own ({', '.join(score.components)}): let its"
                " function return one number, or name it as env.verifier itself"
            )
        return score.reward

    async def close(self) -> None:
        """End what the parts hold."""
        for _, verifier in self._parts.values():
            await verifier.close()
