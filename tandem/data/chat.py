"""Questions to token ids through a chat template, and the ids a tokenizer must name."""

from __future__ import annotations

import hashlib
import inspect
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from tandem.config.models import Tokenizer
from tandem.data.rows import Message

PROBE = "What is 2 + 3?"


class Chat:
    """A tokenizer with its template. Everything a recipe sets is seen to have an effect, or refused.

    `eos_token_id` ends a response. `pad_token_id` fills holes; it may equal eos, for rows are masked by their length,
    and is eos where the tokenizer has none.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        config: Tokenizer,
        *,
        system_prompt: str | None = None,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        """`tools` are JSON schemas of functions, which the template describes in every prompt."""
        name = tokenizer.name_or_path or "the tokenizer"
        self._tokenizer = tokenizer
        self._template = _template(tokenizer, config, name)
        self._arguments: dict[str, Any] = dict(config.chat_template_kwargs)  # what a template takes is its own affair
        self._system_prompt = system_prompt
        self._tools: list[Any] = [dict(tool) for tool in tools]
        self.eos_token_id = _eos(tokenizer, name)
        self.pad_token_id: int = self.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
        self._specials = _specials(tokenizer)
        self._check_arguments()
        self._check_probe()

    @property
    def fingerprint(self) -> str:
        """A digest of vocabulary and template: two runs with equal ones turn text into the same ids."""
        vocabulary = json.dumps(sorted(self._tokenizer.get_vocab().items()))
        return hashlib.blake2b((vocabulary + self._template).encode(), digest_size=8).hexdigest()

    def encode(self, chat: str | Sequence[Message]) -> tuple[int, ...]:
        """The ids of a question, or of a whole chat, up to where the assistant's answer begins."""
        messages = [Message("user", chat)] if isinstance(chat, str) else chat
        if self._system_prompt is not None and messages[0].role == "system":
            raise ValueError(
                "its messages begin with a system message, and data.system_prompt is set too: remove one of them"
            )
        return self.encode_text(self._render(messages, self._system_prompt))

    def encode_text(self, text: str) -> tuple[int, ...]:
        """The ids of a text that a template has rendered."""
        # The template writes the special tokens itself: adding them here would double the BOS.
        return tuple(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of a response, special tokens left out."""
        return text_of(self._tokenizer, tokens)

    def verbatim(self, tokens: Sequence[int]) -> str:
        """The text of ids, special tokens too."""
        return text_of(self._tokenizer, tokens, skip_special_tokens=False)

    def without_specials(self, text: str) -> str:
        """A text in which every special token's own text is broken up by a blank: encoded, it holds none of them."""
        for special in self._specials:
            text = text.replace(special, f"{special[0]} {special[1:]}")
        return text

    @property
    def template(self) -> str:
        """The Jinja text."""
        return self._template

    def render(self, messages: Sequence[Mapping[str, str]], *, opens: bool) -> str:
        """A chat as text. `opens`: up to where the assistant's next turn begins. Raises jinja2's TemplateError."""
        text = self._tokenizer.apply_chat_template(
            [dict(message) for message in messages],
            chat_template=self._template,
            add_generation_prompt=opens,
            tokenize=False,
            tools=self._tools or None,
            **self._arguments,
        )
        assert isinstance(text, str), "one chat, not tokenized"
        return text

    def _render(self, messages: Sequence[Message], system_prompt: str | None) -> str:
        system = [] if system_prompt is None else [{"role": "system", "content": system_prompt}]
        try:
            return self.render(
                [*system, *({"role": message.role, "content": message.content} for message in messages)], opens=True
            )
        except TemplateError as error:
            sets = f" with data.system_prompt={system_prompt!r}" if system else ""
            raise ValueError(
                f"the chat template failed{sets} ({type(error).__name__}: {error}): "
                + ("remove data.system_prompt, or " if system else "")
                + "give a template of your own with policy.tokenizer.chat_template=FILE"
            ) from error

    def _check_arguments(self) -> None:
        ours = {"messages", *inspect.signature(self._tokenizer.apply_chat_template).parameters}
        for name in self._arguments:
            where = f"policy.tokenizer.chat_template_kwargs.{name}"
            if name in ours:
                raise ValueError(f"{where} is set by Tandem itself: remove it")
            if not re.search(rf"\b{re.escape(name)}\b", self._template):
                raise ValueError(f"{where} has no effect: the chat template never reads {name!r}. Remove it")

    def _check_probe(self) -> None:
        probe = self._render([Message("user", PROBE)], self._system_prompt)
        if PROBE not in probe or not self.encode(PROBE):
            raise ValueError(
                f"the chat template loses the question: {PROBE!r} became {probe!r}."
                " Give a template that writes each message's content with policy.tokenizer.chat_template=FILE"
            )
        if self._system_prompt is not None and self._system_prompt.strip() not in probe:
            raise ValueError(
                f"data.system_prompt={self._system_prompt!r} has no effect: the chat template leaves it out. Remove it,"
                " put it into data.prompt_template, or give a template with policy.tokenizer.chat_template=FILE"
            )
        if unseen := [name for tool in self._tools if (name := tool["function"]["name"]) not in probe]:
            raise ValueError(
                f"the chat template leaves out the tools: {unseen[0]!r} is not in a prompt. Describe them in"
                " data.system_prompt or data.prompt_template and set env.describe_tools=false, or give a template with"
                " policy.tokenizer.chat_template=FILE"
            )


def _specials(tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """The texts that become special tokens wherever they stand, longest first."""
    added = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
    return sorted((text for text in added | set(tokenizer.all_special_tokens) if len(text) > 1), key=len, reverse=True)


def text_of(tokenizer: PreTrainedTokenizerBase, tokens: Sequence[int], *, skip_special_tokens: bool = True) -> str:
    """Ids to text, special tokens left out or not."""
    text = tokenizer.decode(list(tokens), skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False)
    assert isinstance(text, str), "one row of ids"
    return text


def _template(tokenizer: PreTrainedTokenizerBase, config: Tokenizer, name: str) -> str:
    if config.chat_template is not None:
        path = Path(config.chat_template).expanduser()
        if not path.is_file():
            raise ValueError(
                f"policy.tokenizer.chat_template={config.chat_template} is no file (looked at {path.resolve()}):"
                " set it to the path of a Jinja file, or remove it to use the tokenizer's own"
            )
        return path.read_text(encoding="utf-8")
    if tokenizer.chat_template is None:
        raise ValueError(
            f"{name} has no chat template (a base model?): set policy.tokenizer.chat_template=FILE, a Jinja file"
            " such as {% for message in messages %}{{ message.content }}\\n{% endfor %}, or use a chat model"
        )
    return tokenizer.get_chat_template()


def _eos(tokenizer: PreTrainedTokenizerBase, name: str) -> int:
    if tokenizer.eos_token_id is None:
        raise ValueError(
            f'{name} has no eos token, so a response could never end: add "eos_token" to its tokenizer_config.json,'
            " or set policy.tokenizer.name to a tokenizer of the same vocabulary that has one"
        )
    return tokenizer.eos_token_id
