"""Replies to token ids: what a chat template puts between one turn of the assistant's and the next."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from jinja2 import TemplateError

from tandem.data.chat import PROBE, Chat
from tandem.types import Reply

SAID = "SAID0RESPONSE"  # stands for what the policy wrote, which is never rendered
HEARD = "HEARD0RESULT"
CALL_ID = "call00000"  # Mistral's templates want nine letters or digits

TEMPLATE = "Give a template of your own with policy.tokenizer.chat_template=FILE"


class Dialogue:
    """Appends replies to a conversation without encoding again what is there.

    The template is rendered around a stand-in for the assistant's turn; what comes behind the stand-in is encoded. The
    token that ends a turn was written by the policy where it is one of `stop_token_ids`: then the template's own is
    left out. Where the policy's turn ended without one, as at a stop string, the template's ends it.
    """

    def __init__(self, chat: Chat, stop_token_ids: Sequence[int], role: Literal["tool", "user"]) -> None:
        """`role` is that of all replies. ValueError when the template does not carry it."""
        self._chat = chat
        self._stops = {token: chat.verbatim([token]) for token in stop_token_ids}
        self._end = self._closing(role)

    def decode(self, tokens: Sequence[int]) -> str:
        """Ids to text, without special tokens."""
        return self._chat.decode(tokens)

    def verbatim(self, tokens: Sequence[int]) -> str:
        """Ids to text, special tokens too."""
        return self._chat.verbatim(tokens)

    def without_stop(self, tokens: Sequence[int]) -> Sequence[int]:
        """A turn without the token that ended it."""
        return tokens[:-1] if tokens and tokens[-1] in self._stops else tokens

    def follow(self, written: Sequence[int], replies: Sequence[Reply]) -> tuple[int, ...]:
        """The ids behind a turn: its end where the policy did not write it, the replies, the head of the next turn.

        A special token's text in a reply, which would end it or begin a turn of another's, is broken up by a blank.
        """
        behind = self._behind(replies)
        if self._end is None or not written or written[-1] not in self._stops:
            return self._chat.encode_text(behind)
        closing, stop = self._end
        assert behind.startswith(closing), "what closes a turn does not depend on what follows"
        # Encoded behind the stop, as it will be read: some tokenizers put a blank before the first word of a text.
        rest = behind[len(closing) :]
        ids = self._chat.encode_text(self._chat.verbatim([stop]) + rest)
        return ids[1:] if ids[:1] == (stop,) else self._chat.encode_text(rest)

    def _behind(self, replies: Sequence[Reply]) -> str:
        """What the template writes behind the assistant's turn, up to its next one."""
        asked: list[dict[str, str]] = [{"role": "user", "content": PROBE}, {"role": "assistant", "content": SAID}]
        _, said, behind = self._chat.render([*asked, *map(self._message, replies)], opens=True).partition(SAID)
        if not said:
            raise ValueError(f"the chat template leaves out what the assistant said. {TEMPLATE}")
        return behind

    def _message(self, reply: Reply) -> dict[str, str]:
        message = {"role": reply.role, "content": self._chat.without_specials(reply.content)}
        if reply.role == "tool":
            message |= {"name": reply.name or "", "tool_call_id": CALL_ID}
        return message

    def _closing(self, role: Literal["tool", "user"]) -> tuple[str, int] | None:
        """What closes the assistant's turn before a reply, up to its first stop token, and that; None without one."""
        other = "Set env.result_role=user, or else: " if role == "tool" else ""
        try:
            head, heard, _ = self._behind([Reply(role, HEARD, "probe")]).partition(HEARD)
        except TemplateError as error:
            what = f"the chat template takes no message of the role {role} ({type(error).__name__}: {error})"
            raise ValueError(f"{what}. {other}{TEMPLATE}") from error
        if not heard:
            raise ValueError(f"the chat template leaves out messages of the role {role}. {other}{TEMPLATE}")
        found = [(head.find(text), token) for token, text in self._stops.items() if text and text in head]
        if not found:
            return None
        place, stop = min(found)
        return head[: place + len(self._stops[stop])], stop
