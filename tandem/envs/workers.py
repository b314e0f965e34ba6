"""Worker processes for what may hang or crash: each request has a deadline, and what goes wrong costs one worker."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from asyncio.subprocess import Process
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

from tandem.types import RolloutFailed

TaskName = Literal["math", "search", "reasoning"]
START_TIMEOUT_S = 120.0  # until a worker has imported what it needs, on a machine that is busy
LONGEST_REPLY = 1 << 28  # bytes of a line


class RequestLost(Exception):
    """A request found no answer within its limits, and its worker is gone: why, in words."""


class Unreadable(ValueError):
    """The reference answer cannot be compared with."""


def command(task: TaskName, memory_bytes: int) -> list[str]:
    """-P: a file of the user's that is called like a library's module is not taken for it."""
    return [sys.executable, "-P", str(Path(__file__).with_name("worker.py")), task, str(memory_bytes)]


class Workers:
    """At most `count` processes that serve one task. They start when they are needed and end with close().

    Should this process be killed, they end too: an idle one with its input, a busy one by its own alarm.
    """

    def __init__(self, task: TaskName, *, count: int, memory_bytes: int = 0) -> None:
        """`memory_bytes` bounds each one's address space; 0: no bound."""
        self._command = command(task, memory_bytes)
        self._turns = asyncio.Semaphore(count)
        self._idle: list[Process] = []
        self._ended: list[Process] = []

    async def ask(self, request: Mapping[str, object], timeout_s: float) -> object:
        """The result of one request, which waits for a free worker first. RequestLost when it is past a limit."""
        async with self._turns:
            worker = self._idle.pop() if self._idle else await self._start()
            try:
                async with asyncio.timeout(timeout_s):
                    reply = await _exchange(worker, {**request, "timeout_s": timeout_s})
            except TimeoutError:
                self._end(worker)
                raise RequestLost(f"took longer than {timeout_s:g} s") from None
            except (EOFError, ConnectionError):
                self._end(worker)
                raise RequestLost(f"ended its worker, exit code {await worker.wait()}") from None
            except BaseException:  # cancelled in the middle: what the worker is at belongs to nobody
                self._end(worker)
                raise
            if reply["retires"]:
                self._end(worker)
            else:
                self._idle.append(worker)
        return result_of(reply)

    async def _start(self) -> Process:
        worker = await asyncio.create_subprocess_exec(
            *self._command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            limit=LONGEST_REPLY,
            start_new_session=True,  # Ctrl-C is for the run, which ends its workers
        )
        assert worker.stdout is not None, "a pipe"
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                if await worker.stdout.readline():
                    return worker
        except TimeoutError:
            pass
        except BaseException:
            self._end(worker)
            raise
        self._end(worker)
        raise RolloutFailed(f"a worker process did not start: {' '.join(self._command)}", "infrastructure")

    def _end(self, worker: Process) -> None:
        if worker.returncode is None:
            worker.kill()
        self._ended = [ended for ended in (*self._ended, worker) if ended.returncode is None]

    async def close(self) -> None:
        """End all workers and wait until they are gone."""
        for worker in self._idle:
            self._end(worker)
        self._idle.clear()
        for worker in self._ended:
            await worker.wait()
        self._ended.clear()


async def _exchange(worker: Process, request: Mapping[str, object]) -> dict[str, Any]:
    assert worker.stdin is not None, "a pipe"
    assert worker.stdout is not None, "a pipe"
    worker.stdin.write(json.dumps(request).encode() + b"\n")
    await worker.stdin.drain()
    reply = await worker.stdout.readline()
    if not reply.endswith(b"\n"):
        raise EOFError
    return json.loads(reply)


def result_of(reply: Mapping[str, Any]) -> object:
    """What a worker found. RequestLost: it was past a limit of its own; Unreadable: see there."""
    if "limit" in reply:
        raise RequestLost(f"needs too much memory or depth ({reply['limit']})")
    if "unreadable" in reply:
        raise Unreadable(reply["unreadable"])
    return reply["result"]


def first_lost(task: TaskName, requests: Iterable[Mapping[str, object]], memory_bytes: int) -> tuple[int, str] | None:
    """The first of these requests that finds no result, and why; None when all do. Waits for all, one after the other.

    For what is asked before a run begins, outside its event loop.
    """
    lines = [json.dumps(request) for request in requests]
    done = subprocess.run(
        command(task, memory_bytes),
        input="\n".join(lines),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    replies = done.stdout.splitlines()[1:]
    for number, reply in enumerate(replies):
        try:
            result_of(json.loads(reply))
        except (RequestLost, Unreadable) as error:
            return number, str(error)
    return None if len(replies) == len(lines) else (len(replies), "took too long")
