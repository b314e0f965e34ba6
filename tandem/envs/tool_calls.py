"""How a policy writes tool calls: the conventions of chat templates, read from text that is not to be trusted."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tandem.config.env import ToolCallFormat

HERMES = re.compile(r"<tool_call>(.*?)(</tool_call>|(?=<tool_call>)|\Z)", re.DOTALL)
PYTHON_TAG, TOOL_CALLS = "<|python_tag|>", "[TOOL_CALLS]"
DECODER = json.JSONDecoder()
# What a template must hold for its convention to be taken, first match first.
SHOWN: tuple[tuple[ToolCallFormat, re.Pattern[str]], ...] = (
    ("mistral", re.compile(r"\[TOOL_CALLS\]")),
    ("llama3_json", re.compile(r"<\|python_tag\|>|Environment: ipython")),
    ("hermes", re.compile(r"<tool_call>(?!\s*\\?n?\s*<function)")),
)


@dataclass(frozen=True)
class Call:
    """A tool by its name, and what it is called with."""

    name: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True)
class Malformed:
    """What was meant as a call and cannot be read: why, in words for the policy."""

    why: str


def format_shown(template: str) -> ToolCallFormat | None:
    """The convention that a chat template shows; None when it shows none that is known."""
    return next((name for name, shape in SHOWN if shape.search(template)), None)


def calls_in(text: str, convention: ToolCallFormat) -> list[Call | Malformed]:
    """The calls of a turn, in its order; none: the turn calls nothing.

    hermes (Hermes, Qwen2.5, Qwen3)    <tool_call>{"name": ..., "arguments": {...}}</tool_call>, any number, text around
    llama3_json (Llama 3.1 to 3.3)     the whole turn is {"name": ..., "parameters": {...}}; several with `;` between
    mistral (Mistral, tokenizer v3)    [TOOL_CALLS] [{"name": ..., "arguments": {...}}, ...]
    """
    match convention:
        case "hermes":
            return list(_hermes(text))
        case "llama3_json":
            begins = text.strip().removeprefix(PYTHON_TAG).lstrip()
            meant = PYTHON_TAG in text or begins.startswith("{")
            return list(_llama3(begins)) if meant else []
        case "mistral":
            _, meant, listed = text.partition(TOOL_CALLS)
            return _mistral(listed.strip()) if meant else []


def _hermes(text: str) -> Iterator[Call | Malformed]:
    for found in HERMES.finditer(text):
        if found[2]:
            yield _call(_loaded(found[1].strip()))
        else:
            yield Malformed("a <tool_call> has no </tool_call>")


def _llama3(text: str) -> Iterator[Call | Malformed]:
    """Objects one after the other. What comes behind the last that can be read is malformed."""
    while text:
        value, text = _first(text)
        yield _call(value)
        if isinstance(value, Malformed):
            return
        text = text.lstrip("; \n")


def _mistral(text: str) -> list[Call | Malformed]:
    value, rest = _first(text)
    if isinstance(value, Malformed):
        return [value]
    if not isinstance(value, list) or not value or rest.strip():
        return [Malformed(f"behind {TOOL_CALLS} stands no list of calls, and nothing else")]
    return [_call(entry) for entry in value]


def _loaded(text: str) -> object:
    value, rest = _first(text)
    return Malformed("a call is one JSON object, and nothing else") if rest.strip() else value


def _first(text: str) -> tuple[object, str]:
    """The first JSON value of a text, and what follows it."""
    try:
        value, end = DECODER.raw_decode(text)
    except RecursionError:
        return Malformed("a call is nested too deeply"), ""
    except ValueError as error:  # a number of too many digits is one, too
        return Malformed(f"a call is no JSON: {error}"), ""
    return value, text[end:]


def _call(value: object) -> Call | Malformed:
    if isinstance(value, Malformed):
        return value
    if not isinstance(value, Mapping):
        return Malformed(f"a call is a {type(value).__name__}, not an object")
    if not isinstance(name := value.get("name"), str) or not name:
        return Malformed('a call has no "name"')
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):  # as OpenAI's messages have them
        arguments = _loaded(arguments)
    if isinstance(arguments, Malformed):
        return arguments
    if not isinstance(arguments, Mapping):
        return Malformed(f'the "arguments" of {name!r} are a {type(arguments).__name__}, not an object')
    return Call(name, arguments)
