"""An event loop in a thread of its own, for clients that would hold up the caller's loop or never answer it."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

Result = TypeVar("Result")
CHECK_S = 1.0  # a call that takes longer than this is worth asking whether anyone will answer it
CLOSE_S = 5.0


class LoopThread:
    """Runs coroutines for callers in other loops. What is past its deadline is cancelled: no thread stays behind."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    async def run(
        self, work: Coroutine[Any, Any, Result], what: str, *, deadline_s: float, check: Callable[[], None]
    ) -> Result:
        """The result of `work`. RuntimeError at the deadline; `check` may raise one before, and runs in a thread."""
        future = asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._loop))
        end = time.monotonic() + deadline_s
        try:
            while not future.done():
                if time.monotonic() >= end:
                    raise RuntimeError(f"no answer to {what} within data_plane.deadline_s={deadline_s:g}")
                await asyncio.wait({future}, timeout=min(CHECK_S, end - time.monotonic()))
                if not future.done():
                    await asyncio.to_thread(check)
            return future.result()
        finally:
            future.cancel()

    def close(self) -> None:
        """Cancel what runs, then end the thread."""
        if self._loop.is_closed():
            return
        asyncio.run_coroutine_threadsafe(cancel_others(), self._loop).result(CLOSE_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(CLOSE_S)
        self._loop.close()


async def cancel_others() -> None:
    """Cancel every other task of this loop and wait until they have ended."""
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    if others:
        await asyncio.wait(others)
