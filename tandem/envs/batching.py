"""Requests that come one by one, answered many at a time: what waits while one call is made goes into the next."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Generic, TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


class Batches(Generic[Item, Result]):
    """Makes one call at a time, with up to `size` items in the order they came. Nothing waits for a batch to fill.

    Bound: the items of those who wait in ask(). Whoever is first in line makes the call for all that it takes; when it
    is cancelled in the middle, the others go back to their places and the next one makes the call.
    """

    def __init__(self, call: Callable[[Sequence[Item]], Awaitable[Sequence[Result]]], size: int) -> None:
        """`call` gives one result an item."""
        self._call = call
        self._size = size
        self._line = asyncio.Lock()  # first come, first served
        self._waiting: list[tuple[Item, asyncio.Future[Result]]] = []

    async def ask(self, item: Item) -> Result:
        """The result of one item. What the call raises for it is raised here."""
        mine: asyncio.Future[Result] = asyncio.get_running_loop().create_future()
        entry = (item, mine)
        self._waiting.append(entry)
        try:
            async with self._line:
                if not mine.done():
                    await self._answer([entry, *(other for other in self._waiting if other is not entry)][: self._size])
            return mine.result()
        finally:
            if entry in self._waiting:
                self._waiting.remove(entry)

    async def _answer(self, batch: list[tuple[Item, asyncio.Future[Result]]]) -> None:
        """A call that fails for several is made again for each of them: only the one at fault is to fail."""
        try:
            results = await self._call([item for item, _ in batch])
        except Exception as error:
            if len(batch) == 1:
                if batch[0] in self._waiting:  # else cancelled meanwhile: nobody would hear it
                    batch[0][1].set_exception(error)
                return
            for entry in batch:
                await self._answer([entry])
            return
        for (_, future), result in zip(batch, results, strict=True):
            future.set_result(result)
