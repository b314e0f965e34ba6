"""A user's own code, `module:name`: found before the run, and called so that one that hangs holds up nothing."""

from __future__ import annotations

import asyncio
import importlib
import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")


def load_named(target: str, key: str, *, example: str, wanted: str) -> Callable[..., Any]:
    """Import what `key` of the recipe names, something that can be called.

    The current directory is searched last, so that a file beside the recipe can be named.
    """
    where = f"{key}={target!r}"
    module_name, _, name = target.partition(":")
    if not module_name or not name.isidentifier():
        raise ValueError(f"{where} must be written module:name, such as {example}")
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except (ImportError, SyntaxError) as error:
        raise ValueError(
            f"{where}: module {module_name!r} cannot be imported ({type(error).__name__}: {error}):"
            f" put it into {os.getcwd()}, on PYTHONPATH, or install it"
        ) from error
    if name not in vars(module):
        there = ", ".join(known for known, one in vars(module).items() if callable(one) and known[0] != "_") or "none"
        raise ValueError(f"{where}: the module has no {name!r}; what can be called there: {there}")
    found = vars(module)[name]
    if not callable(found):
        raise ValueError(f"{where} is a {type(found).__name__}, not {wanted}")
    return found


async def in_thread(work: Callable[[], T], name: str) -> T:
    """Run `work` in a daemon thread of its own.

    Not in an executor: what never returns would hold a worker for good, and hold up the end of the process.
    """
    done: Future[T] = Future()
    done.set_running_or_notify_cancel()  # from here a cancelled wait does not cancel it: the thread may still set it

    def run() -> None:
        try:
            done.set_result(work())
        except BaseException as error:  # handed on to the waiter, whatever it is
            done.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return await asyncio.wrap_future(done)
