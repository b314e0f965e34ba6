"""The program of a worker process: it does what may hang or crash, one request a line. Run as a script.

A line of JSON comes in, a line of JSON goes out. The worker ends with its input, and by its own alarm soon after the
deadline of a request, should the one who asked no longer be there to end it.
"""

from __future__ import annotations

import ast
import functools
import inspect
import json
import logging
import os
import re
import resource
import signal
import sys
import textwrap
from collections.abc import Callable, Mapping
from typing import Any

GRACE_S = 2.0  # the parent ends a worker at the deadline; the alarm is for a worker whose parent is gone
MOST_SERVED = 5_000  # then a fresh worker takes its place: the parser's tables grow with what it has read
Task = Callable[[Mapping[str, Any]], object]


class Unreadable(Exception):
    """A reference answer that nothing can be compared with."""


def main(task: str, memory_bytes: int) -> None:
    """Serve requests until the input ends. First line out: ready."""
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what a library prints is no reply
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's affair
    do = {"math": math_task, "search": lambda: search, "reasoning": reasoning_task}[task]()
    if memory_bytes:
        resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    replies.write('{"ready": true}\n')
    replies.flush()
    for served, line in enumerate(sys.stdin, start=1):
        request = json.loads(line)
        signal.setitimer(signal.ITIMER_REAL, request["timeout_s"] + GRACE_S)
        reply = answer(do, request)
        replies.write(json.dumps(reply | {"retires": served >= MOST_SERVED or is_swollen(memory_bytes)}) + "\n")
        replies.flush()
        signal.setitimer(signal.ITIMER_REAL, 0)


def is_swollen(memory_bytes: int) -> bool:
    """Whether what earlier requests left behind could fail a later one: the libraries take that for a wrong answer."""
    # Not ru_maxrss: it starts at what the parent held when it forked.
    if not memory_bytes or not os.path.exists("/proc/self/statm"):
        return False
    with open("/proc/self/statm", encoding="ascii") as sizes:
        return 2 * int(sizes.read().split()[0]) * resource.getpagesize() > memory_bytes


def answer(do: Task, request: Mapping[str, Any]) -> dict[str, object]:
    """The reply to one request."""
    try:
        return {"result": do(request)}
    except Unreadable as error:
        return {"unreadable": str(error)}
    except (MemoryError, RecursionError) as error:
        return {"limit": type(error).__name__}


def search(request: Mapping[str, Any]) -> str | bool | None:
    """`whole`: whether the text has the form of the pattern. Else the last match's first group (or all), or None."""
    pattern = re.compile(request["pattern"], request["flags"])
    if request["whole"]:
        return pattern.fullmatch(request["text"]) is not None
    group = 1 if pattern.groups else 0
    last: str | None = None
    for found in pattern.finditer(request["text"]):
        last = found[group]
    return last


def math_task() -> Task:
    """math-verify: is the response's final expression equal to the reference answer's?"""
    from math_verify import parse, verify

    logging.disable(logging.CRITICAL)  # it warns that its own time limits are off: ours are on
    sys.set_int_max_str_digits(20_000)

    @functools.lru_cache(maxsize=4096)
    def reference(text: str) -> list[Any]:
        final = text.rsplit("####", 1)[-1].strip()
        marked = "$" in final or "\\boxed" in final
        found = parse(final if marked else f"\\boxed{{{final}}}", parsing_timeout=0)
        if not found:
            raise Unreadable(text)
        return found

    def compare(request: Mapping[str, Any]) -> bool:
        wanted = reference(request["answer"])
        return verify(wanted, parse(request["response"], parsing_timeout=0), timeout_seconds=None)

    compare({"answer": r"\frac{1}{2}", "response": r"\boxed{0.5}"})  # the first one builds the parser's tables
    return compare


RUNS_TEXT = frozenset({"eval", "exec", "sympify", "parse_expr"})


def reasoning_task() -> Task:
    """reasoning-gym: the score of a response by the scorer of its problem's task."""
    from reasoning_gym.factory import DATASETS, get_score_answer_fn

    @functools.cache
    def scorer(task: str) -> Callable[..., float]:
        if task not in DATASETS:
            raise Unreadable(f"reasoning-gym has no task {task!r}")
        if found := called_by(DATASETS[task][0], "score_answer") & RUNS_TEXT:
            raise Unreadable(
                f"the scorer of reasoning-gym's task {task} calls {', '.join(sorted(found))}, which may run what a"
                " model wrote as code: leave the task out"
            )
        return get_score_answer_fn(task)

    def score(request: Mapping[str, Any]) -> float:
        entry = json.loads(request["answer"])
        score_answer = scorer(entry["metadata"]["source_dataset"])
        try:
            return float(score_answer(request["response"], entry))
        except (MemoryError, RecursionError):
            raise
        except Exception:  # a scorer that a response breaks has not shown it to be right
            return 0.0

    return score


def called_by(of: type, method: str) -> set[str]:
    """The names of all that a method calls, and of what the library's functions that it calls do, so far as seen."""
    names: set[str] = set()
    waiting = [getattr(of, method), *(vars(base)[method] for base in of.__mro__ if method in vars(base))]
    seen = set()
    while waiting:
        function = waiting.pop()
        if function in seen:
            continue
        seen.add(function)
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
        called = [node.func for node in ast.walk(tree) if isinstance(node, ast.Call)]
        found = {call.attr if isinstance(call, ast.Attribute) else ast.unparse(call) for call in called}
        names |= found
        module = sys.modules[function.__module__]
        near = [getattr(place, name, None) for name in found for place in (of, module)]
        waiting += [one for one in near if inspect.isfunction(one) and one.__module__.startswith("reasoning_gym")]
    return names


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
