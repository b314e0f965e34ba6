"""Tools: Python functions that a policy calls. What goes wrong in one is told to the policy, and fails nothing."""

from __future__ import annotations

import asyncio
import inspect
import json
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import ConfigDict, PydanticUserError, ValidationError, validate_call
from transformers.utils import get_json_schema
from transformers.utils.chat_template_utils import DocstringParsingException, TypeHintParsingException

from tandem.config.env import ToolCallFormat, ToolsEnv
from tandem.envs.calculator import calculator
from tandem.envs.episode import score_in_time
from tandem.envs.multi_turn import Turn
from tandem.envs.tool_calls import Call, Malformed, calls_in
from tandem.envs.user_code import in_thread, load_named
from tandem.roles import Verifier
from tandem.types import Prompt, Reply, RolloutFailed, Score

BUILT_IN: Mapping[str, Callable[..., object]] = {"calculator": calculator}
MOST_HUNG = 64  # threads of calls past their deadline; a thread cannot be ended, so there must be a bound
THREAD = "tool"


@dataclass(frozen=True)
class Tool:
    """A function with what the policy is told about it. `function` checks its arguments."""

    name: str
    schema: Mapping[str, Any]
    function: Callable[..., object]


def load_tools(config: ToolsEnv) -> list[Tool]:
    """The tools of `env.tools`. ValueError for one that cannot be had, or of which no schema can be made."""
    tools = [load_tool(target) for target in config.tools]
    names = [tool.name for tool in tools]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise ValueError(
            f"env.tools={list(config.tools)} has two tools that are called {twice!r}: rename or remove one"
        )
    return tools


def load_tool(target: str) -> Tool:
    """A built-in tool by its name, or a function `module:name`."""
    where = f"env.tools: {target!r}"
    if target in BUILT_IN:
        function = BUILT_IN[target]
    elif ":" in target:
        function = load_named(target, "env.tools", example="my_tools:search", wanted="a function")
    else:
        known = ", ".join(BUILT_IN)
        raise ValueError(f"{where} is neither built in ({known}) nor written module:name, such as my_tools:search")
    try:
        schema = get_json_schema(function)
        checked = validate_call(config=ConfigDict(coerce_numbers_to_str=True))(function)
    except (DocstringParsingException, TypeHintParsingException, TypeError, PydanticUserError) as error:
        raise ValueError(f"{where}: no description can be made of it: {error}. {WANTED}") from error
    return Tool(schema["function"]["name"], schema, checked)


WANTED = (
    "Wanted: a function whose arguments have types, with a docstring that begins with what it does and has a line for"
    " each argument under `Args:`, such as `    city: the name of a city`"
)


class Toolbox:
    """Calls tools, each within its deadline."""

    def __init__(self, tools: Sequence[Tool], config: ToolsEnv) -> None:
        self._tools = {tool.name: tool for tool in tools}
        self._config = config
        self._hung: set[threading.Event] = set()  # of calls for which nobody waits, and whose threads are at work

    async def answer(self, calls: Sequence[Call | Malformed]) -> list[Reply]:
        """A result for each call, in order; they run side by side. RolloutFailed when a tool raised that."""
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self._result(number, call)) for number, call in enumerate(calls)]
        replies: list[Reply] = []
        for call, task in zip(calls, tasks, strict=True):
            if isinstance(result := task.result(), RolloutFailed):
                raise result
            name = call.name if isinstance(call, Call) else None
            replies.append(Reply(self._config.result_role, self._cut(result), name))
        return replies

    async def _result(self, number: int, call: Call | Malformed) -> str | RolloutFailed:
        if number >= self._config.max_calls_per_turn:
            return f"error: not called, a turn may call {self._config.max_calls_per_turn} times"
        if isinstance(call, Malformed):
            return f"error: {call.why}"
        if call.name not in self._tools:
            return f"error: there is no tool {call.name!r}; there are: {', '.join(self._tools)}"
        try:
            return _text(await self._call(self._tools[call.name], call.arguments))
        except RolloutFailed as failure:
            return failure
        except ValidationError as error:
            return f"error: {'; '.join(map(_wrong_argument, error.errors(include_url=False)))}"
        except (Exception, SystemExit) as error:
            return f"error: {type(error).__name__}: {error}"

    async def _call(self, tool: Tool, arguments: Mapping[str, Any]) -> object:
        """Run in a thread, an async function in an event loop of its own there. Past the deadline it is left alone."""
        if len(self._hung) >= MOST_HUNG:
            raise RolloutFailed(
                f"{MOST_HUNG} calls of tools are still at work past env.tool_timeout_s={self._config.tool_timeout_s:g}:"
                " give the tools limits of their own",
                "infrastructure",
            )
        cancel, ended = Cancel(), threading.Event()

        def work() -> object:
            try:
                result = tool.function(**arguments)
                return cancel.run(result) if inspect.isawaitable(result) else result
            except (StopIteration, asyncio.CancelledError) as error:  # these would not pass through a future
                raise RuntimeError(type(error).__name__) from error
            finally:
                ended.set()
                self._hung.discard(ended)

        limit = asyncio.timeout(self._config.tool_timeout_s)
        try:
            async with limit:
                return await in_thread(work, THREAD)
        except asyncio.CancelledError:
            self._leave(cancel, ended)
            raise
        except TimeoutError as error:
            if not limit.expired():
                raise  # the tool's own
            self._leave(cancel, ended)
            raise TimeoutError(f"{tool.name} took longer than {self._config.tool_timeout_s:g} s") from error

    def _leave(self, cancel: Cancel, ended: threading.Event) -> None:
        """Nobody waits for this call any more."""
        cancel()
        self._hung.add(ended)
        if ended.is_set():  # it ended while it was added
            self._hung.discard(ended)

    def _cut(self, result: str) -> str:
        limit = self._config.max_result_chars
        return (
            result if len(result) <= limit else f"{result[:limit]}... ({len(result) - limit} characters were cut off)"
        )


class Cancel:
    """Ends the async function that runs in a thread's own event loop, from another thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._is_called = False
        self._stop: Callable[[], object] | None = None

    def run(self, awaitable: Any) -> object:
        """Run it to its end, in this thread."""

        async def main() -> object:
            task, loop = asyncio.current_task(), asyncio.get_running_loop()
            assert task is not None, "inside a loop"
            with self._lock:
                if self._is_called:
                    task.cancel()
                self._stop = lambda: loop.call_soon_threadsafe(task.cancel)
            try:
                return await awaitable
            finally:
                with self._lock:
                    self._stop = None

        return asyncio.run(main())

    def __call__(self) -> None:
        with self._lock:
            self._is_called = True
            if self._stop is not None:
                self._stop()


class ToolPartner:
    """One episode with tools: each turn's calls are answered, the turn that calls nothing is the answer."""

    def __init__(
        self, prompt: Prompt, toolbox: Toolbox, verifier: Verifier, convention: ToolCallFormat, score_timeout_s: float
    ) -> None:
        self._prompt = prompt
        self._toolbox = toolbox
        self._verifier = verifier
        self._convention: ToolCallFormat = convention
        self._score_timeout_s = score_timeout_s
        self._last = ""

    async def reply(self, turn: Turn) -> list[Reply] | None:
        self._last = turn.text
        calls = calls_in(turn.verbatim, self._convention)
        if not calls:
            return None
        return [] if turn.last else await self._toolbox.answer(calls)

    async def score(self) -> Score:
        return await score_in_time(self._verifier, self._prompt, self._last, self._score_timeout_s)

    async def close(self) -> None:
        """It holds nothing."""


def _text(result: object) -> str:
    if isinstance(result, str):
        return result
    return json.dumps(result, ensure_ascii=False, default=str)


def _wrong_argument(error: Any) -> str:
    return f"argument {'.'.join(map(str, error['loc']))}: {error['msg']}"
