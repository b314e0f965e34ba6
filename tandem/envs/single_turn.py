"""The simplest environment: one question, one response, one score."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tandem.envs.episode import EpisodeRow, score_in_time
from tandem.roles import Verifier, Write
from tandem.types import Prompt, Sample


class SingleTurn:
    """The policy answers once, the verifier scores. `decode` turns response ids to text, without special tokens."""

    def __init__(self, verifier: Verifier, decode: Callable[[Sequence[int]], str], *, score_timeout_s: float) -> None:
        self._verifier = verifier
        self._decode = decode
        self._score_timeout_s = score_timeout_s

    async def play(self, prompt: Prompt, write: Write) -> Sample:
        row = EpisodeRow(prompt)
        written = await write(prompt.tokens)
        row.write(written)
        text = self._decode(written.tokens)
        score = await score_in_time(self._verifier, prompt, text, self._score_timeout_s)
        return row.sample(score, text, truncated=written.finish_reason == "length")

    async def close(self) -> None:
        """End what the verifier holds."""
        await self._verifier.close()
