"""The life of an engine that is a thread around a decoder: requests, pauses, weights, cancellation, the end.

`generate` puts a request into a queue and awaits its future; the thread fills free rows, writes a token in every one,
and sends finished rows back to the event loop they came from. Everything that touches the model runs in that thread.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Generic, Literal, TypeVar

from tandem import cores
from tandem.roles import Fingerprint, NamedTensors, Pause
from tandem.rollout.rows import Decoder, Row, check_request
from tandem.rollout.stops import Decode, StopStrings
from tandem.types import EngineDied, FinishReason, Generation, Metrics, RolloutFailed, Sampling, Sum

log = logging.getLogger(__name__)
T = TypeVar("T")
PauseKind = Literal["drain", "stand"]  # running requests end, or keep their places
Rest = Literal["none", "asleep", "no_cache"]  # no_cache: weights may come, requests may not


@dataclass(frozen=True, eq=False)
class Call(Generic[T]):
    """Work for the thread between two steps, and who waits for its result."""

    body: Callable[[], T]
    future: asyncio.Future[T]


class ThreadedEngine:
    """Plays the Engine role with a decoder, which it owns: nobody else may use it until close().

    After a pause that drains or throws away, one version writes all of a generation; else tokens before and after an
    update follow the weights of their time. Of requests that stood, resume() says what becomes of the cache; those
    that were aborted bring their text as a prompt.
    """

    def __init__(
        self, decoder: Decoder, *, name: str, decode: Decode | None = None, threads: int | None = None
    ) -> None:
        """`name` is the thread's. Without `decode`, ids to text, no request may have stop strings.

        `threads` is how many of torch's threads the engine's thread computes with; None is torch's own choice.
        """
        self._decoder = decoder
        self._stops = None if decode is None else StopStrings(decode, decoder.vocabulary)
        # All below is guarded by _changed, but for what the thread alone writes: from _running on.
        self._changed = threading.Condition()
        self._waiting: deque[tuple[Row, asyncio.Future[Generation]]] = deque()
        self._calls: deque[Call] = deque()
        self._pause: PauseKind | None = None
        self._pausing: list[asyncio.Future[None]] = []  # who waits until the pause is complete
        self._end: EngineDied | None = None  # why no call is served any more
        self._running: dict[Row, asyncio.Future[Generation]] = {}
        self._version = 0
        self._tokens_written = 0
        self._rest: Rest = "none"
        self._is_void = False  # it has slept without its weights, and none have come
        self._threads = threads
        self._is_set_up = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()
        self._is_set_up.wait()  # what it takes must not be what another thread adopts

    @property
    def running(self) -> int:
        """Requests being written."""
        return len(self._running)

    @property
    def waiting(self) -> int:
        """Requests that wait for a slot or for resume()."""
        return sum(not future.cancelled() for _, future in tuple(self._waiting))

    @property
    def tokens_written(self) -> int:
        """Since construction, those of cancelled requests and those thrown away included."""
        return self._tokens_written

    async def generate(self, tokens: Sequence[int], sampling: Sampling) -> Generation:
        """Waits for a free row, then for its last token; the engine's thread wakes it. Cancelling frees the row."""
        check_request(tokens, sampling, self._decoder)
        if sampling.stop_strings and self._stops is None:
            raise ValueError(f"stop strings {sampling.stop_strings} need an engine that was given `decode`")
        future: asyncio.Future[Generation] = asyncio.get_running_loop().create_future()
        with self._serving():
            self._waiting.append((Row(tuple(tokens), sampling), future))
        return await future

    async def pause(self, kind: Pause = "drain") -> Metrics:
        """Starts no more requests. Returns when the running ones have ended, stand still or wait; the thread wakes it.

        The latest call says which. A cancelled request that stands leaves with the next step.
        """
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._enter("drain" if kind == "drain" else "stand", future)
        await future
        if kind in ("drain", "stand"):
            return {}
        return await self._call(partial(self._put_back, keep=kind == "reissue"))

    def _put_back(self, *, keep: bool) -> Metrics:
        """Requests that stand wait again, before all others: with what they wrote, or without."""
        if self._pause != "stand":
            raise RuntimeError("another pause() or resume() came before the pause was complete")
        rows = list(self._running.items())
        tokens = sum(len(row.tokens) for row, _ in rows)
        for row, _ in rows:
            self._decoder.remove(row)
            if keep:
                row.sign(self._version)
            else:
                row.clear()
        with self._changed:
            self._running.clear()
            self._waiting.extendleft(reversed(rows))
        kept = "weights/kept_tokens" if keep else "weights/discarded_tokens"
        return {"weights/reissued_requests": Sum(len(rows)), kept: Sum(tokens)}

    async def resume(self, *, recompute_kv: bool = False) -> None:
        """Starts waiting requests again. A pause() that still waits fails: it would never be true.

        `recompute_kv` returns when the cache is new. When that fails, the error comes here and the engine stays paused.
        """
        if self._rest != "none":
            await self._call(self._rise)
        if recompute_kv:
            await self._call(self._decoder.recompute)
        self._enter(None)

    async def sleep(self, *, keep_weights: bool) -> Metrics:
        """RuntimeError where a request has begun, or nothing is paused."""

        def body() -> Metrics:
            if self._pause is None or self._running or self._rest != "none":
                raise RuntimeError("sleep() needs an engine that is awake, paused and drained: await pause() first")
            self._rest = "asleep"
            self._is_void = not keep_weights
            return self._decoder.sleep(keep_weights=keep_weights)

        return await self._call(body)

    async def wake(self) -> Metrics:
        """RuntimeError when it is awake."""

        def body() -> Metrics:
            if self._rest != "asleep":
                raise RuntimeError("wake() needs an engine that sleeps: await sleep() first")
            self._rest = "no_cache"
            return self._decoder.wake()

        return await self._call(body)

    def _rise(self) -> None:
        if self._rest == "asleep" or self._is_void:
            missing = "wake()" if self._rest == "asleep" else "load_weights()"
            raise RuntimeError(f"resume() of an engine that has slept needs {missing} first")
        self._rest = "none"
        self._decoder.wake_cache()

    async def load_weights(self, version: int, weights: NamedTensors) -> None:
        """ValueError names a wrong weight, and nothing has changed."""

        def body() -> None:
            if self._pause is None or (self._running and self._pause == "drain"):
                raise RuntimeError(f"load_weights({version}) needs a paused engine: await pause() first")
            if self._rest == "asleep":
                raise RuntimeError(f"load_weights({version}) needs an engine that is awake: await wake() first")
            self._decoder.load_weights(weights)
            for row in self._running:  # what was written so far, the old weights wrote
                row.sign(self._version)
            self._version = version
            self._is_void = False

        await self._call(body)

    async def fingerprint(self) -> Fingerprint:
        return await self._call(self._decoder.fingerprint)

    async def close(self) -> None:
        """Ends the thread after its present step. Whoever still waits gets EngineDied."""
        with self._changed:
            self._end = self._end or EngineDied("the engine was closed")
            self._changed.notify()
        await asyncio.to_thread(self._thread.join)

    def _enter(self, pause: PauseKind | None, *waiter: asyncio.Future[None]) -> None:
        """Pause or go on. Whoever waits for another kind of pause fails: it would never be complete."""
        with self._serving():
            left: list[asyncio.Future[None]] = []
            if pause != self._pause:
                left, self._pausing = self._pausing, []
            self._pause = pause
            self._pausing += waiter
        name = "resume()" if pause is None else "another kind of pause()"
        for future in left:
            settle(future, RuntimeError(f"{name} came before the pause was complete"))

    async def _call(self, body: Callable[[], T]) -> T:
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        with self._serving():
            self._calls.append(Call(body, future))
        return await future

    @contextmanager
    def _serving(self) -> Generator[None]:
        """Leave something for the thread and wake it. EngineDied once the engine has ended."""
        with self._changed:
            if self._end is not None:
                raise EngineDied(f"the engine has ended: {self._end}") from self._end.__cause__
            yield
            self._changed.notify()

    def _run(self) -> None:
        """The thread: serve until close() or an error, then fail whoever still waits with the reason."""
        if self._threads is not None:
            cores.take(self._threads)
        self._is_set_up.set()
        try:
            while self._serve():
                pass
        except BaseException as error:  # it reaches every caller, now and later
            log.exception("the engine's thread ends with an error")
            self._end = EngineDied(f"the engine's thread ended with {type(error).__name__}: {error}")
            self._end.__cause__ = error
        self._tell_the_end()
        self._decoder.close()

    def _tell_the_end(self) -> None:
        with self._changed:
            assert self._end is not None
            futures: list[asyncio.Future] = [
                *self._running.values(),
                *(future for _, future in self._waiting),
                *self._pausing,
            ]
            futures += [call.future for call in self._calls]
            self._running.clear()
            self._waiting.clear()
        for future in futures:
            settle(future, self._end)

    def _serve(self) -> bool:
        """Wait for work, do one round of it. False after close()."""
        with self._changed:
            self._changed.wait_for(self._has_work)  # woken by _serving() and close()
            if self._end is not None:
                return False
            self._leave_cancelled()
            started = self._start_waiting()
            calls, self._calls = self._calls, deque()
            is_standing = self._pause == "stand"
        if started:
            self._decoder.admit(started)
        for call in calls:
            answer(call)
        if self._running and not is_standing:
            self._step()
        self._report_paused(is_standing)
        return True

    def _has_work(self) -> bool:
        is_writing = bool(self._running) and self._pause != "stand"
        is_startable = bool(self._waiting) and self._pause is None
        return bool(is_writing or is_startable or self._calls or self._pausing or self._end)

    def _leave_cancelled(self) -> None:
        for row in [row for row, future in self._running.items() if future.cancelled()]:
            self._decoder.remove(row)
            del self._running[row]

    def _start_waiting(self) -> list[Row]:
        """Requests for the free slots, first come first served."""
        started: list[Row] = []
        while self._waiting and self._pause is None and len(started) < self._decoder.free:
            row, future = self._waiting.popleft()
            if not future.cancelled():
                started.append(row)
                self._running[row] = future
        return started

    def _step(self) -> None:
        self._tokens_written += len(self._running)
        finished = self._decoder.step()
        for row, outcome in finished:
            self._finish(row, outcome, self._stop_of(row))
        for row in list(self._running):
            length = self._stop_of(row)
            if length is not None:
                self._decoder.remove(row)
                self._finish(row, "stop", length)

    def _stop_of(self, row: Row) -> int | None:
        return self._stops.length(row) if self._stops is not None and row.sampling.stop_strings else None

    def _finish(self, row: Row, outcome: FinishReason | RolloutFailed, length: int | None) -> None:
        """`length`: tokens up to a stop string, whatever else ended the row behind it."""
        future = self._running.pop(row)
        if length is not None:
            row.cut(length)
            outcome = "stop"
        if isinstance(outcome, RolloutFailed):
            settle(future, outcome)
            return
        row.sign(self._version)
        settle(future, Generation(tuple(row.tokens), tuple(row.logprobs), tuple(row.versions), outcome))

    def _report_paused(self, is_standing: bool) -> None:
        """`is_standing`: this round has written nothing; another kind of pause may have come since it began."""
        with self._changed:
            if self._running and not (is_standing and self._pause == "stand"):
                return
            waiters, self._pausing = self._pausing, []
        for future in waiters:
            settle(future, None)


def answer(call: Call) -> None:
    """Run a call's body; its result or its error goes to whoever waits."""
    try:
        result = call.body()
    except Exception as error:
        settle(call.future, error)
    else:
        settle(call.future, result)


def settle(future: asyncio.Future[T], outcome: T | BaseException) -> None:
    """Resolve a future in its own event loop, unless it was cancelled meanwhile."""

    def resolve() -> None:
        if future.done():
            return
        if isinstance(outcome, BaseException):
            future.set_exception(outcome)
        else:
            future.set_result(outcome)

    with suppress(RuntimeError):  # the loop is closed: nobody waits there any more
        future.get_loop().call_soon_threadsafe(resolve)
