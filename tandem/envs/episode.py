"""One episode as a row that grows: what was given, what the policy wrote; and a score with a deadline."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from tandem.roles import Verifier
from tandem.types import Generation, Prompt, RolloutFailed, Sample, Score

NO_VERSION = -1  # of tokens the policy did not write


class EpisodeRow:
    """The ids of an episode, in the order in which they came. What the engine wrote is kept as it wrote it."""

    def __init__(self, prompt: Prompt) -> None:
        self._prompt = prompt
        self.tokens: list[int] = []
        self._mask: list[bool] = []
        self._logprobs: list[float] = []
        self._versions: list[int] = []
        self.give(prompt.tokens)

    def give(self, tokens: Sequence[int]) -> None:
        """Append ids that the policy did not write: they are in no loss and no statistic."""
        self.tokens += tokens
        self._mask += [False] * len(tokens)
        self._logprobs += [0.0] * len(tokens)
        self._versions += [NO_VERSION] * len(tokens)

    def write(self, written: Generation) -> None:
        """Append what the policy wrote. The token that stopped it is its own, so it is trained on."""
        if not written.tokens:
            raise RolloutFailed(f"the engine wrote no token for prompt {self._prompt.id!r}", "infrastructure")
        self.tokens += written.tokens
        self._mask += [True] * len(written.tokens)
        self._logprobs += written.logprobs
        self._versions += written.versions

    @property
    def response(self) -> list[int]:
        """All ids behind the prompt."""
        return self.tokens[len(self._prompt.tokens) :]

    def sample(self, score: Score, text: str, *, truncated: bool) -> Sample:
        """The finished episode."""
        return Sample(
            tokens=tuple(self.tokens),
            mask=tuple(self._mask),
            logprobs=tuple(self._logprobs),
            versions=tuple(self._versions),
            score=score,
            truncated=truncated,
            text=text,
        )


async def score_in_time(verifier: Verifier, prompt: Prompt, response: str, timeout_s: float) -> Score:
    """The verifier's score. RolloutFailed when it does not come in time."""
    try:
        async with asyncio.timeout(timeout_s):
            return await verifier.score(prompt, response)
    except TimeoutError as error:
        raise RolloutFailed(
            f"scoring prompt {prompt.id!r} took longer than env.score_timeout_s={timeout_s:g}:"
            " raise it, or make the verifier faster",
            "infrastructure",
        ) from error
