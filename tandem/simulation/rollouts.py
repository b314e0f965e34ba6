"""Prompts and their rollouts: what GroupRollOut does, with times for tokens, and a fate that tests may decide."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch

from tandem.roles import DataPlane
from tandem.simulation.engines import SimulatedEngines, Written
from tandem.simulation.lengths import uniform
from tandem.types import Group, Prompt, RolloutFailed

Fate = Literal["well", "no_signal", "slow", "hang", "score_hang", "infrastructure", "data", "nan", "lost_row"]
STRETCH: dict[Fate, int] = {"slow": 10, "hang": 10**9}  # how many times as long these rollouts' responses take


class SimulatedPrompts:
    """An endless stream of epochs, in order."""

    def __init__(self, per_epoch: int) -> None:
        self._per_epoch = per_epoch

    def __len__(self) -> int:
        return self._per_epoch

    def prompt(self, index: int) -> Prompt:
        return Prompt(index, f"p{index % self._per_epoch}", "?", "!", (0,))


@dataclass(frozen=True)
class RolloutTimes:
    """What a group costs. `length` names a response's tokens by (prompt, sample, attempt); None: no deadline."""

    samples: int
    prompt_tokens: int
    length: Callable[[int, int, int], int]
    score_s: float = 0.0
    timeout_s: float | None = None


class SimulatedRollOut:
    """Prompt -> group with one tiny row a sample. `fate(prompt, attempt)` is asked once when a rollout starts."""

    def __init__(
        self,
        times: RolloutTimes,
        *,
        engines: SimulatedEngines,
        plane: DataPlane,
        fate: Callable[[int, int], Fate] = lambda index, attempt: "well",
    ) -> None:
        self._times = times
        self._engines = engines
        self._plane = plane
        self._fate = fate

    async def __call__(self, prompt: Prompt, *, attempt: int) -> Group | None:
        fate = self._fate(prompt.index, attempt)
        lengths = [self._times.length(prompt.index, sample, attempt) for sample in range(self._times.samples)]
        try:
            async with asyncio.timeout(self._times.timeout_s):
                written = await self._write(lengths, fate)
        except TimeoutError as error:
            raise RolloutFailed(f"no response within {self._times.timeout_s} s", "infrastructure") from error
        return await self._group(prompt, lengths, written, fate)

    async def _write(self, lengths: list[int], fate: Fate) -> list[Written]:
        try:
            async with asyncio.TaskGroup() as samples:
                tasks = [samples.create_task(self._sample(tokens, fate)) for tokens in lengths]
        except* RolloutFailed as failures:
            raise RolloutFailed(str(failures.exceptions[0]), "infrastructure") from failures
        return [task.result() for task in tasks]

    async def _sample(self, tokens: int, fate: Fate) -> Written:
        written = await self._engines.write(tokens * STRETCH.get(fate, 1))
        if fate == "score_hang":
            await asyncio.get_running_loop().create_future()  # nobody ever wakes it: a deadline or the watchdog must
        if self._times.score_s:
            await asyncio.sleep(self._times.score_s)
        return written

    async def _group(self, prompt: Prompt, lengths: list[int], written: list[Written], fate: Fate) -> Group | None:
        if fate == "infrastructure":
            raise RolloutFailed("the engine broke", "infrastructure")
        if fate in ("data", "nan"):
            raise RolloutFailed("the score is NaN" if fate == "nan" else "the verifier broke", "data")
        if fate == "no_signal":
            return None
        keys = tuple(prompt.index * self._times.samples + sample for sample in range(self._times.samples))
        await self._plane.put(keys, {"key": [torch.tensor([key]) for key in keys]})
        if fate == "lost_row":
            await self._plane.drop(keys[:1])
        return Group(
            index=prompt.index,
            prompt_id=prompt.id,
            keys=keys,
            lengths=tuple(self._times.prompt_tokens + tokens for tokens in lengths),
            written=tuple(lengths),
            rewards=tuple(float(uniform(key) < 0.5) for key in keys),
            truncated=(False,) * len(keys),
            components={},
            oldest_version=min(each.oldest_version for each in written),
            newest_version=max(each.newest_version for each in written),
        )
