"""A real tokenizer with templates of several conventions, and an engine that says what a test wants."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

from transformers import AutoTokenizer

import tandem
from tandem.config.env import ToolsEnv
from tandem.config.models import Tokenizer
from tandem.data.chat import Chat
from tandem.data.dialogue import Dialogue
from tandem.envs.multi_turn import MultiTurn
from tandem.envs.tools import Tool, Toolbox, ToolPartner
from tandem.types import Generation, Prompt, Sample, Score

QUICKSTART = Path(tandem.__file__).parent / "assets" / "quickstart"
SPECIALS = ["<|im_start|>", "<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|head|>", "[TOOL_CALLS]", "[RESULTS]", "</s>"]
# ChatML as Qwen has it: results of one turn are one user's turn.
HERMES = (
    "{% if tools %}<|im_start|>system\nTools:{% for tool in tools %}\n{{ tool | tojson }}{% endfor %}\n"
    'Call as <tool_call>\n{"name": ..., "arguments": ...}\n</tool_call><|im_end|>\n{% endif %}'
    "{% for m in messages %}{% if m.role == 'tool' %}"
    "{% if loop.first or messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user{% endif %}"
    "{{ '\\n' }}<tool_response>\n{{ m.content }}\n</tool_response>"
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>\n{% endif %}"
    "{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# As Llama 3.1 has it: results are quoted, and a turn may end in one of two tokens.
LLAMA3 = (
    "{% if tools %}<|head|>system\nEnvironment: ipython\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}"
    "<|eot_id|>{% endif %}{% for m in messages %}{% if m.role == 'tool' %}"
    "<|head|>ipython\n{{ m.content | tojson }}<|eot_id|>"
    "{% else %}<|head|>{{ m.role }}\n{{ m.content | trim }}<|eot_id|>"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}<|head|>assistant\n{% endif %}"
)
# As Mistral has it: no head of the assistant's turn, and names of nine signs for calls.
MISTRAL = (
    "{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }}[/INST]{% elif m.role == 'tool' %}"
    "{% if m.tool_call_id | length != 9 %}{{ raise_exception('ids have nine signs') }}{% endif %}"
    "[RESULTS] {{ m.content }}[/RESULTS]{% else %} {{ m.content }}</s>{% endif %}{% endfor %}{# [TOOL_CALLS] #}"
)
ENDS = {HERMES: "<|im_end|>", LLAMA3: "<|eot_id|>", MISTRAL: "</s>"}


def tokenizer(template: str | None = HERMES):
    """The quickstart's tokenizer, with markers of other models; None: as it ships."""
    made = AutoTokenizer.from_pretrained(QUICKSTART)
    if template is not None:
        made.add_special_tokens({"additional_special_tokens": SPECIALS})
        made.chat_template = template
        made.eos_token = ENDS.get(template, "<|im_end|>")
    return made


def chat_of(template: str | None = HERMES, **made) -> Chat:
    return Chat(tokenizer(template), Tokenizer(), **made)


def prompt_of(chat: Chat, question: str = "What is 2 + 3?") -> Prompt:
    return Prompt(3, "row:7", question, "5", chat.encode(question))


class Says:
    """An engine that writes given ids, turn by turn, and keeps what it was asked with."""

    def __init__(self, turns: Sequence[tuple[int, ...]], *, cut: Sequence[int] = ()) -> None:
        self._turns = list(turns)
        self._cut = cut
        self.asked: list[tuple[int, ...]] = []
        self.written: list[Generation] = []
        self.limits: list[int | None] = []

    async def __call__(self, tokens: Sequence[int], *, max_new_tokens: int | None = None) -> Generation:
        number = len(self.asked)
        ids = self._turns[number][:max_new_tokens]
        whole = len(ids) == len(self._turns[number]) and number not in self._cut
        self.asked.append(tuple(tokens))
        self.limits.append(max_new_tokens)
        logprobs = tuple(-(number + 1) - index / 100 for index in range(len(ids)))
        self.written.append(Generation(ids, logprobs, (number,) * len(ids), "stop" if whole else "length"))
        return self.written[-1]


class LastWord:
    """1 if the last turn is the answer."""

    def __init__(self) -> None:
        self.read: list[str] = []

    async def score(self, prompt: Prompt, response: str) -> Score:
        self.read.append(response)
        return Score(float(response == prompt.answer))

    async def close(self) -> None:
        """It holds nothing."""


def tools_config(**changes) -> ToolsEnv:
    given = {"name": "tools", "verifier": {"name": "exact"}, "tools": ("calculator",), **changes}
    return ToolsEnv.model_validate(given)


def play(
    chat: Chat,
    engine: Says,
    tools: Sequence[Tool],
    *,
    convention="hermes",
    verifier: LastWord | None = None,
    stops: Sequence[int] | None = None,
    max_tokens: int = 1000,
    **config,
) -> Sample:
    """One episode with tools."""
    settings = tools_config(**config)
    toolbox, judge = Toolbox(tools, settings), verifier or LastWord()

    async def open_partner(prompt: Prompt) -> ToolPartner:
        return ToolPartner(prompt, toolbox, judge, convention, settings.score_timeout_s)

    speech = Dialogue(chat, stops or [chat.eos_token_id], settings.result_role)
    env = MultiTurn(open_partner, speech, max_turns=settings.max_turns, max_tokens=max_tokens)
    return asyncio.run(env.play(prompt_of(chat), engine))


def pieces(sample: Sample) -> list[tuple[bool, tuple[int, ...]]]:
    """The row cut where the mask changes."""
    found: list[tuple[bool, list[int]]] = []
    for token, wrote in zip(sample.tokens, sample.mask, strict=True):
        if not found or found[-1][0] != wrote:
            found.append((wrote, []))
        found[-1][1].append(token)
    return [(wrote, tuple(ids)) for wrote, ids in found]
