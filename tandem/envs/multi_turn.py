"""Episodes of several turns: the policy writes, its partner (tools, a user's class) replies, until one of them ends it.

Ids are appended and never encoded again: a row is the prompt, what the engine wrote, the reply's ids, what the engine
wrote, and so on.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from tandem.envs.episode import EpisodeRow
from tandem.roles import Write
from tandem.types import Prompt, Reply, Sample, Score


@dataclass(frozen=True)
class Turn:
    """What the policy wrote in one turn. `text` has no special tokens; `verbatim` has all but the one that ended it.

    `last`: nothing will be said after it, whatever the partner replies.
    """

    text: str
    verbatim: str
    last: bool


class Partner(Protocol):
    """The other side of one episode."""

    async def reply(self, turn: Turn) -> Sequence[Reply] | None:
        """What the policy reads next; None when the episode is over. To a `last` turn: what is not None is not read."""
        ...

    async def score(self) -> Score:
        """Of the whole episode, once it has ended."""
        ...

    async def close(self) -> None:
        """End what the episode holds, also where it was broken off."""
        ...


class Speech(Protocol):
    """Ids to text, and replies to the ids that go behind a turn of the policy's."""

    def decode(self, tokens: Sequence[int]) -> str:
        """Without special tokens."""
        ...

    def verbatim(self, tokens: Sequence[int]) -> str:
        """With special tokens."""
        ...

    def without_stop(self, tokens: Sequence[int]) -> Sequence[int]:
        """A turn without the token that ended it."""
        ...

    def follow(self, written: Sequence[int], replies: Sequence[Reply]) -> tuple[int, ...]:
        """What goes between a turn that the policy wrote and its next one."""
        ...


class MultiTurn:
    """Plays episodes with a new partner each."""

    def __init__(
        self,
        open_partner: Callable[[Prompt], Awaitable[Partner]],
        speech: Speech,
        *,
        max_turns: int,
        max_tokens: int,
        on_close: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        """`max_tokens` bounds the whole row. An episode that runs out of turns or tokens is truncated, not failed."""
        self._open_partner = open_partner
        self._speech = speech
        self._max_turns = max_turns
        self._max_tokens = max_tokens
        self._on_close = on_close

    async def play(self, prompt: Prompt, write: Write) -> Sample:
        row = EpisodeRow(prompt)
        partner = await self._open_partner(prompt)
        try:
            truncated = await self._converse(row, partner, write)
            score = await partner.score()
        finally:
            await partner.close()
        return row.sample(score, self._speech.verbatim(row.response), truncated=truncated)

    async def close(self) -> None:
        """End what all episodes share."""
        if self._on_close is not None:
            await self._on_close()

    async def _converse(self, row: EpisodeRow, partner: Partner, write: Write) -> bool:
        """Take turns until the episode ends. Whether it was cut: by tokens, or by turns."""
        number = 0
        while True:
            number += 1
            written = await write(row.tokens, max_new_tokens=self._max_tokens - len(row.tokens))
            row.write(written)
            cut = written.finish_reason == "length"
            replies = await partner.reply(self._turn(written.tokens, last=cut or number == self._max_turns))
            if replies is None:
                return cut
            if cut or number == self._max_turns:
                return True
            ids = self._speech.follow(written.tokens, replies)
            if len(row.tokens) + len(ids) >= self._max_tokens:
                return True  # no room for another token: what would be read by none is left out
            row.give(ids)

    def _turn(self, tokens: Sequence[int], *, last: bool) -> Turn:
        return Turn(self._speech.decode(tokens), self._speech.verbatim(self._speech.without_stop(tokens)), last)
