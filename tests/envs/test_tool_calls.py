"""Each convention's calls, those that are meant and wrong, and text that calls nothing."""

import random

import pytest

from tandem.envs.tool_calls import Call, Malformed, calls_in, format_shown
from tests.envs.talking import HERMES, LLAMA3, MISTRAL

ONE = '{"name": "f", "arguments": {"a": 1}}'


@pytest.mark.parametrize(
    ("convention", "text", "calls"),
    [
        ("hermes", "The answer is 5.", []),
        ("hermes", f"<tool_call>\n{ONE}\n</tool_call>", [Call("f", {"a": 1})]),
        ("hermes", f"I call {ONE}", []),
        ("hermes", f"so<tool_call>{ONE}</tool_call> and <tool_call>{ONE}</tool_call>.", [Call("f", {"a": 1})] * 2),
        ("hermes", '<tool_call>{"name": "f"}</tool_call>', [Call("f", {})]),
        ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', [Call("f", {"a": 1})]),
        ("hermes", f"<tool_call>{ONE}<tool_call>{ONE}</tool_call>", [None, Call("f", {"a": 1})]),
        ("hermes", f"<tool_call>{ONE} {ONE}</tool_call>", [None]),
        ("hermes", "<tool_call></tool_call>", [None]),
        ("hermes", "<tool_call>[1]</tool_call>", [None]),
        ("hermes", '<tool_call>{"name": 5}</tool_call>', [None]),
        ("hermes", '<tool_call>{"name": "f", "arguments": [1]}</tool_call>', [None]),
        ("hermes", '<tool_call>{"name": "f", "arguments": "x"}</tool_call>', [None]),
        ("llama3_json", "The answer is 5.", []),
        ("llama3_json", '{"name": "f", "parameters": {"a": 1}}', [Call("f", {"a": 1})]),
        ("llama3_json", '<|python_tag|>{"name": "f", "parameters": {"a": 1}}', [Call("f", {"a": 1})]),
        (
            "llama3_json",
            '{"name": "f", "parameters": {}}; {"name": "g", "parameters": {}}',
            [Call("f", {}), Call("g", {})],
        ),
        ("llama3_json", '{"name": "f", "parameters": {}} I think', [Call("f", {}), None]),
        ("llama3_json", "{x}", [None]),
        ("llama3_json", '{"answer": 5}', [None]),
        ("mistral", "The answer is 5.", []),
        ("mistral", f"[TOOL_CALLS] [{ONE}, {ONE}]", [Call("f", {"a": 1})] * 2),
        ("mistral", f"[TOOL_CALLS]{ONE}", [None]),
        ("mistral", "[TOOL_CALLS] []", [None]),
        ("mistral", f"[TOOL_CALLS] [{ONE}, 3]", [Call("f", {"a": 1}), None]),
        ("mistral", f"[TOOL_CALLS] [{ONE}] and more", [None]),
    ],
)
def test_calls_are_read_as_the_convention_has_them(convention, text, calls):
    found = calls_in(text, convention)
    assert [None if isinstance(one, Malformed) else one for one in found] == calls


@pytest.mark.parametrize("convention", ["hermes", "llama3_json", "mistral"])
def test_no_text_of_a_model_breaks_the_reader(convention):
    draw = random.Random(3)
    parts = [
        "<tool_call>",
        "</tool_call>",
        "[TOOL_CALLS]",
        "<|python_tag|>",
        "{",
        "}",
        "[",
        "]",
        '"name"',
        '"f"',
        ":",
        ",",
    ]
    parts += ["NaN", "9" * 5000, "1e999", "\\u0000", "\ud800", '"arguments"', ONE, ";", "[" * 3000]
    for _ in range(500):
        text = "".join(draw.choice(parts) for _ in range(draw.randrange(12)))
        assert all(isinstance(one, Call | Malformed) for one in calls_in(text, convention))


@pytest.mark.parametrize(
    ("template", "shown"),
    [
        (HERMES, "hermes"),
        (LLAMA3, "llama3_json"),
        (MISTRAL, "mistral"),
        ("{{ messages }}", None),
        ("<tool_call>\n<function=f>\n<parameter=a>", None),
    ],
)
def test_the_convention_is_what_the_template_shows(template, shown):
    assert format_shown(template) == shown
