"""Who may use the accelerators, and when."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager


class OwnDevices:
    """Trainers and engines both stay where they are: on one CPU, or on one GPU that holds both."""

    @asynccontextmanager
    async def training(self) -> AsyncGenerator[None]:
        yield
