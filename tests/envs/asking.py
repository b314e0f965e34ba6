"""Asks a verifier in an event loop of its own, and closes it: no process is left behind by a test."""

from __future__ import annotations

import asyncio
import ctypes
import sys
from collections.abc import Sequence

from pydantic import TypeAdapter

from tandem.config.env import Verifier
from tandem.envs.verifiers import build_verifier
from tandem.types import Prompt, RolloutFailed, Score


def verifier_config(**options: object) -> Verifier:
    """A verifier's section, as a recipe would hold it."""
    return TypeAdapter(Verifier).validate_python(options)


def landlock_is_here() -> bool:
    """Whether the kernel, and the container around this process, let Landlock through."""
    create_ruleset, ask_for_version = 444, 1
    return sys.platform == "linux" and ctypes.CDLL(None).syscall(create_ruleset, None, 0, ask_for_version) > 0


def ask_all(config: Verifier, pairs: Sequence[tuple[str, str]]) -> list[Score | RolloutFailed]:
    """The score of each (reference answer, response), or why there is none, all asked at one time."""

    async def ask() -> list[Score | RolloutFailed]:
        verifier = build_verifier(config)

        async def one(number: int, answer: str, response: str) -> Score | RolloutFailed:
            try:
                return await verifier.score(Prompt(number, f"row:{number}", "How many?", answer, (1,)), response)
            except RolloutFailed as failure:
                return failure

        try:
            return await asyncio.gather(*(one(number, *pair) for number, pair in enumerate(pairs)))
        finally:
            await verifier.close()

    return asyncio.run(ask())
