"""The simplest environment: one question, one response, one score."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from tandem.roles import Verifier, Write
from tandem.types import Generation, Prompt, RolloutFailed, Sample, Score

NO_VERSION = -1  # of tokens the policy did not write


class SingleTurn:
    """The policy answers once, the verifier scores. `decode` turns response ids to text, without special tokens."""

    def __init__(self, verifier: Verifier, decode: Callable[[Sequence[int]], str], *, score_timeout_s: float) -> None:
        self._verifier = verifier
        self._decode = decode
        self._score_timeout_s = score_timeout_s

    async def play(self, prompt: Prompt, write: Write) -> Sample:
        written = await write(prompt.tokens)
        if not written.tokens:
            raise RolloutFailed(f"the engine wrote no token for prompt {prompt.id!r}", "infrastructure")
        text = self._decode(written.tokens)
        return _sample(prompt, written, await self._score(prompt, text), text)

    async def close(self) -> None:
        """End what the verifier holds."""
        await self._verifier.close()

    async def _score(self, prompt: Prompt, response: str) -> Score:
        try:
            async with asyncio.timeout(self._score_timeout_s):
                return await self._verifier.score(prompt, response)
        except TimeoutError as error:
            raise RolloutFailed(
                f"scoring prompt {prompt.id!r} took longer than env.score_timeout_s={self._score_timeout_s:g}:"
                " raise it, or make the verifier faster",
                "infrastructure",
            ) from error


def _sample(prompt: Prompt, written: Generation, score: Score, text: str) -> Sample:
    """Prompt and response as one row. The stop token is the policy's own, so it is trained on."""
    given, count = len(prompt.tokens), len(written.tokens)
    return Sample(
        tokens=prompt.tokens + written.tokens,
        mask=(False,) * given + (True,) * count,
        logprobs=(0.0,) * given + written.logprobs,
        versions=(NO_VERSION,) * given + written.versions,
        score=score,
        truncated=written.finish_reason == "length",
        text=text,
    )
