"""Processes of a run that do nothing but what a test asks. Ray imports this in each of them: without torch, quickly."""

from __future__ import annotations

import asyncio
import logging
import os
import threading

from tandem.launch.ray.workers import Member


class Known(Member):
    """A process that says which it is."""

    async def pid(self) -> int:
        return os.getpid()


class Stuck(Known):
    """A process that is there and answers nothing: a thread of it waits for what never comes."""

    async def generate(self) -> None:
        await asyncio.to_thread(self.wait_for_what_never_comes)

    def wait_for_what_never_comes(self) -> None:
        threading.Event().wait()


class Deaf(Known):
    """A process whose loop stands still: it cannot even say where."""

    async def generate(self) -> None:
        threading.Event().wait()


class Shivers(Member):
    """A process that warns."""

    async def shiver(self) -> None:
        logging.getLogger("tandem.engine").warning("it is cold")
