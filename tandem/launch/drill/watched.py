"""Players of roles that do something else at a moment, and otherwise what is built: where a fault enters a run."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path

from tandem.roles import Engine, Fingerprint, NamedTensors, Pause, Trainer, Verifier, WriteFiles
from tandem.types import Batch, Generation, Metrics, Prompt, Sampling, Score


class WatchedEngine:
    """Before each request something may happen: it is told the request's number and the slowest response's seconds."""

    def __init__(self, engine: Engine, before: Callable[[int, float], Awaitable[None]]) -> None:
        self._engine = engine
        self._before = before
        self._requests = 0
        self._slowest_s = 0.0

    async def generate(self, tokens: Sequence[int], sampling: Sampling) -> Generation:
        self._requests += 1
        await self._before(self._requests, self._slowest_s)
        begin = time.perf_counter()
        written = await self._engine.generate(tokens, sampling)
        self._slowest_s = max(self._slowest_s, time.perf_counter() - begin)
        return written

    async def pause(self, kind: Pause = "drain") -> Metrics:
        return await self._engine.pause(kind)

    async def resume(self, *, recompute_kv: bool = False) -> None:
        await self._engine.resume(recompute_kv=recompute_kv)

    async def load_weights(self, version: int, weights: NamedTensors) -> None:
        await self._engine.load_weights(version, weights)

    async def sleep(self, *, keep_weights: bool) -> Metrics:
        return await self._engine.sleep(keep_weights=keep_weights)

    async def wake(self) -> Metrics:
        return await self._engine.wake()

    async def fingerprint(self) -> Fingerprint:
        return await self._engine.fingerprint()

    async def close(self) -> None:
        await self._engine.close()


class WatchedVerifier:
    """Before each score something may happen."""

    def __init__(self, verifier: Verifier, before: Callable[[Prompt], Awaitable[None]]) -> None:
        self._verifier = verifier
        self._before = before

    async def score(self, prompt: Prompt, response: str) -> Score:
        await self._before(prompt)
        return await self._verifier.score(prompt, response)

    async def close(self) -> None:
        await self._verifier.close()


class WatchedTrainer:
    """Before it learns, and before it is saved, something may happen."""

    def __init__(
        self, trainer: Trainer, before_learning: Callable[[], None], before_saving: Callable[[], None]
    ) -> None:
        self._trainer = trainer
        self._before_learning = before_learning
        self._before_saving = before_saving

    async def infer(self, batch: Batch, out: str) -> Metrics:
        return await self._trainer.infer(batch, out)

    async def forward_backward(self, batch: Batch, scale: Mapping[str, float]) -> Metrics:
        self._before_learning()
        return await self._trainer.forward_backward(batch, scale)

    async def optim_step(self, divisor: float) -> Metrics:
        return await self._trainer.optim_step(divisor)

    async def park(self) -> None:
        await self._trainer.park()

    async def snapshot(self, *, copy: bool) -> WriteFiles:
        self._before_saving()
        return await self._trainer.snapshot(copy=copy)

    async def load(self, directory: Path) -> None:
        await self._trainer.load(directory)

    async def load_weights(self, directory: Path) -> None:
        await self._trainer.load_weights(directory)

    async def close(self) -> None:
        await self._trainer.close()
