"""`code`: does the Python of a response pass the tests of the reference answer?"""

from __future__ import annotations

import ast
import re

from pydantic import BaseModel, TypeAdapter, ValidationError

from tandem.config.env import CodeVerifier
from tandem.envs.sandbox import Sandbox
from tandem.types import Prompt, RolloutFailed, Score

FENCE = re.compile(r"[ ]{0,3}```+[ ]*(?P<language>[\w+-]*)")
PYTHON = ("python", "python3", "py", "")


class Case(BaseModel):
    """One test of a program: what it reads, and what it should print."""

    input: str
    output: str


def code_of(response: str) -> str | None:
    """The last closed block of Python in a response, or None. A block without a language counts as Python."""
    last: str | None = None
    language, lines = "", []
    inside = False
    for line in response.splitlines(keepends=True):
        fence = FENCE.match(line)
        if not inside and fence:
            inside, language, lines = True, fence["language"].casefold(), []
        elif inside and fence and not fence["language"]:
            inside = False
            last = "".join(lines) if language in PYTHON else last
        elif inside:
            lines.append(line)
    return last


def cases_of(answer: str) -> list[Case]:
    """The tests of a reference answer in JSON. ValueError when it holds none."""
    cases = TypeAdapter(list[Case]).validate_json(answer)
    if not cases:
        raise ValueError("an empty list")
    return cases


def is_test(statement: ast.stmt) -> bool:
    """An assert, or a call as in `check(solution)`."""
    called = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call)
    return called or isinstance(statement, ast.Assert)


def tests_problem(config: CodeVerifier, answer: str) -> str | None:
    """What is wrong with a reference answer, in words."""
    try:
        if config.tests == "stdio":
            cases_of(answer)
        elif not any(is_test(statement) for statement in ast.parse(answer).body):
            return "no assert and no call at the top level"
    except ValidationError as error:
        first = error.errors()[0]
        return f"{'.'.join(map(str, first['loc'])) or 'the whole'}: {first['msg']}"
    except (ValueError, SyntaxError) as error:
        return str(error)
    return None


class Code:
    """1 if all tests pass, or the share that does. What does not end, prints too much or is killed has not passed."""

    def __init__(self, config: CodeVerifier) -> None:
        """Proves that the sandbox stands: ValueError when it does not."""
        self._config = config
        self._sandbox = Sandbox(config)

    async def score(self, prompt: Prompt, response: str) -> Score:
        if problem := tests_problem(self._config, prompt.answer):
            raise RolloutFailed(f"the tests of prompt {prompt.id!r} cannot be run: {problem}")
        source = code_of(response)
        if source is None or "\x00" in source:
            return Score(0.0)
        passed, total = await (self._stdio if self._config.tests == "stdio" else self._asserts)(source, prompt.answer)
        return Score(float(passed == total) if self._config.reward == "all" else passed / total)

    async def _asserts(self, source: str, answer: str) -> tuple[int, int]:
        """The tests run against the names that the program defines, one after the other."""
        tests = [(ast.unparse(statement), is_test(statement)) for statement in ast.parse(answer).body]
        outcome = await self._sandbox.run(source, tests=tests)
        return 0 if outcome.ended else outcome.passed or 0, sum(counts for _, counts in tests)

    async def _stdio(self, source: str, answer: str) -> tuple[int, int]:
        """The program runs once a case. Spaces at the ends of lines and of the whole do not count."""
        cases, passed = cases_of(answer), 0
        for case in cases:
            outcome = await self._sandbox.run(source, stdin=case.input.encode())
            good = not outcome.ended and lines_of(outcome.output.decode(errors="replace")) == lines_of(case.output)
            passed += good
            if not good and self._config.reward == "all":
                break
        return passed, len(cases)

    async def close(self) -> None:
        """Its processes end with the scores that asked for them."""


def lines_of(output: str) -> list[str]:
    """What counts of a program's output."""
    return [line.rstrip() for line in output.strip().splitlines()]
