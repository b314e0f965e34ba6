"""Verifiers that read text alone: equal to the reference answer, found by a pattern, of a form, of a length."""

from __future__ import annotations

import re

from tandem.config.env import ExactVerifier, FormatReward, LengthReward, RegexVerifier
from tandem.envs.workers import RequestLost, Workers
from tandem.types import Prompt, RolloutFailed, Score

SEARCHERS = 2  # processes; a search takes well under a millisecond unless its pattern is a trap


def plain(text: str, *, ignore_case: bool) -> str:
    """Without space around it, with one space for any between words, and in one case if asked."""
    words = " ".join(text.split())
    return words.casefold() if ignore_case else words


class Exact:
    """1 if the whole response is the reference answer."""

    def __init__(self, config: ExactVerifier) -> None:
        self._ignore_case = config.ignore_case

    async def score(self, prompt: Prompt, response: str) -> Score:
        wanted = plain(prompt.answer, ignore_case=self._ignore_case)
        return Score(float(plain(response, ignore_case=self._ignore_case) == wanted))

    async def close(self) -> None:
        """It holds nothing."""


class Length:
    """1 within the bounds, 0 from `falloff_chars` beyond, a straight line between. Characters of the decoded text."""

    def __init__(self, config: LengthReward) -> None:
        self._config = config

    async def score(self, prompt: Prompt, response: str) -> Score:
        config = self._config
        beyond = max(config.min_chars - len(response), len(response) - config.max_chars, 0)
        return Score(max(0.0, 1 - beyond / (config.falloff_chars + 1)))

    async def close(self) -> None:
        """It holds nothing."""


class Search:
    """What a pattern finds is the reference answer (regex), or the whole response has its form (format).

    It searches in a worker process: a pattern that backtracks for ever on some response would stop the whole run.
    """

    def __init__(self, config: RegexVerifier | FormatReward) -> None:
        self._config = config
        self._ignore_case = isinstance(config, RegexVerifier) and config.ignore_case
        self._flags = int(re.DOTALL if isinstance(config, FormatReward) else re.IGNORECASE * self._ignore_case)
        self._workers = Workers("search", count=SEARCHERS)

    async def score(self, prompt: Prompt, response: str) -> Score:
        whole = isinstance(self._config, FormatReward)
        request = {"pattern": self._config.pattern, "flags": self._flags, "text": response, "whole": whole}
        try:
            found = await self._workers.ask(request, self._config.timeout_s)
        except RequestLost as lost:
            raise RolloutFailed(
                f"searching the response to prompt {prompt.id!r} {lost}: write env.verifier.pattern="
                f"{self._config.pattern!r} so that it need not try every way to match, or raise timeout_s"
            ) from lost
        if not isinstance(found, str):
            return Score(float(found is True))
        same = plain(found, ignore_case=self._ignore_case) == plain(prompt.answer, ignore_case=self._ignore_case)
        return Score(float(same))

    async def close(self) -> None:
        """End its processes."""
        await self._workers.close()
