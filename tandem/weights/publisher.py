"""Weight sync: pause the engines, let a carrier bring the trainer's weights, see that all hold them, resume."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from time import perf_counter

from tandem.fingerprint import first_difference
from tandem.roles import Carrier, Engine, Pause
from tandem.types import Max, Metrics, Sum, merge

log = logging.getLogger(__name__)


class Publisher:
    """Publishes the actor's weights to every engine, by whichever way its carrier goes."""

    def __init__(self, carrier: Carrier, engines: Sequence[Engine], *, pause: Pause, recompute_kv: bool) -> None:
        """`pause`: what becomes of running requests; those that stand go on, on a cache that `recompute_kv` renews."""
        self._carrier = carrier
        self._engines = engines
        self._pause: Pause = pause
        self._recompute_kv = recompute_kv

    async def publish(self, version: int) -> Metrics:
        """Pause the engines, hand over the weights, compare fingerprints, resume. Nothing may train meanwhile.

        Raises RuntimeError naming the first tensor that differs: sampling from weights that are not the trainer's
        would spoil every later step in silence. After any error the engines stay paused: the run must end.
        """
        await self._carrier.prepare()  # before the pause: it takes no part of it
        began_s = perf_counter()
        try:
            aborted = await asyncio.gather(*(engine.pause(self._pause) for engine in self._engines))
            delivery = await self._carrier.deliver(version)
            for number, engine in enumerate(self._engines):
                different = first_difference(delivery.fingerprint, await engine.fingerprint())
                if different:
                    raise RuntimeError(
                        f"after the sync to version {version} engine {number} holds other weights: {different}"
                    )
            await asyncio.gather(*(engine.resume(recompute_kv=self._recompute_kv) for engine in self._engines))
        except BaseException:
            log.error("publishing version %d failed: the engines stay paused, for their weights are unproven", version)
            raise
        pause_s = Max(perf_counter() - began_s)
        return merge(*aborted, {"weights/bytes": Sum(delivery.bytes), "weights/pause_s": pause_s})
