"""Checks of a reward: a verifier, or a function (question, answer, response) as `env.verifier.name=python` takes it."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence

from tandem.envs.batching import Batches
from tandem.envs.function_verifier import FunctionVerifier, UserFunction, many_at_once, one_by_one
from tandem.roles import Verifier
from tandem.testing.tensors import disturb
from tandem.types import Prompt, RolloutFailed, Score

Example = tuple[str, str, str]  # question, answer, response


def check_reward(function: UserFunction, examples: Sequence[Example], *, batch_size: int | None = None) -> list[Score]:
    """Check a function as a run calls it. Returns the scores of the examples. See `check_verifier`.

    `batch_size` is `env.verifier.batch_size`: with it, the function takes three lists and gives a list.
    """
    if batch_size is None:
        return check_verifier(FunctionVerifier("the function", one_by_one(function)), examples)
    return check_verifier(FunctionVerifier("the function", Batches(many_at_once(function), batch_size).ask), examples)


def check_verifier(verifier: Verifier, examples: Sequence[Example]) -> list[Score]:
    """One score an example, the same alone, all at one time and in any order; an empty response has one too.

    Every reward and component is finite, and all scores name the same components: a step has columns of them.
    """
    if not examples:
        raise ValueError("no examples: give some (question, answer, response), right ones and wrong ones")
    prompts = [Prompt(i, f"example {i}", question, answer, ()) for i, (question, answer, _) in enumerate(examples)]
    asked = [(prompt, example[2]) for prompt, example in zip(prompts, examples, strict=True)]
    disturb(1)
    alone = asyncio.run(_one_by_one(verifier, asked))
    disturb(2)
    together = asyncio.run(_together(verifier, asked[::-1]))[::-1]
    for (prompt, response), found, wanted in zip(asked, together, alone, strict=True):
        if found != wanted:
            raise AssertionError(
                f"{prompt.id}, response {response!r:.60}: scored {wanted} alone and {found} beside others: "
                "a score must depend on its question, answer and response only"
            )
    empty = asyncio.run(_one_by_one(verifier, [(prompt, "") for prompt in prompts]))
    for prompt, score in zip([*prompts, *prompts], [*alone, *empty], strict=True):
        _must_be_sound(prompt, score, alone[0])
    return alone


def _must_be_sound(prompt: Prompt, score: Score, first: Score) -> None:
    values = {"the reward": score.reward, **score.components}
    if wrong := {name: value for name, value in values.items() if not math.isfinite(value)}:
        raise AssertionError(f"{prompt.id}: a reward must be finite, got {wrong}")
    if score.components.keys() != first.components.keys():
        raise AssertionError(
            f"{prompt.id}: components {sorted(score.components)}, but {sorted(first.components)} of the first example: "
            "every score must name the same ones"
        )


async def _one_by_one(verifier: Verifier, asked: Sequence[tuple[Prompt, str]]) -> list[Score]:
    return [await _score(verifier, prompt, response) for prompt, response in asked]


async def _together(verifier: Verifier, asked: Sequence[tuple[Prompt, str]]) -> list[Score]:
    return list(await asyncio.gather(*(_score(verifier, prompt, response) for prompt, response in asked)))


async def _score(verifier: Verifier, prompt: Prompt, response: str) -> Score:
    try:
        return await verifier.score(prompt, response)
    except RolloutFailed as failure:
        raise AssertionError(f"{prompt.id}, response {response!r:.60}: {failure}") from failure
