"""Prompt -> finished group: plays the samples of a prompt, puts their rows into the data plane, returns handles."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar

import torch

from tandem.roles import DataPlane, Engine, Environment, Write
from tandem.types import EngineDied, Generation, Group, Prompt, RolloutFailed, Sample, Sampling

E = TypeVar("E", bound=Exception)


def request_seed(run_seed: int, index: int, sample: int, attempt: int, turn: int) -> int:
    """A seed of 63 bits for one request: the same wherever, whenever and beside whatever it runs."""
    name = f"{run_seed}/{index}/{sample}/{attempt}/{turn}".encode()
    return int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "big") >> 1


class GroupRollOut:
    """Plays `samples` episodes of a prompt at one time. A group is whole or it is not there."""

    def __init__(
        self,
        *,
        env: Environment,
        engine: Engine,
        plane: DataPlane,
        samples: int,
        sampling: Sampling,
        timeout_s: float,
        need_spread: bool,
        traced: bool = False,
    ) -> None:
        """`sampling.seed` is the run's seed; `timeout_s` is for one response, its wait for a free slot included.

        `need_spread` gives up groups whose rewards are all equal. `traced` writes down the attempt and the engine.
        """
        self._env = env
        self._engine = engine
        self._plane = plane
        self._samples = samples
        self._sampling = sampling
        self._timeout_s = timeout_s
        self._need_spread = need_spread
        self._traced = traced
        self._parts: tuple[str, ...] | None = None  # of a reward, as the first sample has them

    async def __call__(self, prompt: Prompt, *, attempt: int) -> Group | None:
        """The finished group, or None when it gives no learning signal. Raises RolloutFailed when a sample fails.

        EngineDied: there is no engine left.
        """
        engines: dict[int, int] = {}
        samples = await self.play(prompt, attempt=attempt, engines=engines)
        if self._need_spread and len({sample.score.reward for sample in samples}) == 1:
            return None
        keys = tuple(prompt.index * self._samples + number for number in range(self._samples))
        traces = traces_of(attempt, [engines[number] for number in range(self._samples)]) if self._traced else {}
        await self._plane.put(keys, columns_of(samples) | traces)
        return group_of(prompt, keys, samples)

    async def play(self, prompt: Prompt, *, attempt: int, engines: dict[int, int] | None = None) -> list[Sample]:
        """All samples of the prompt. The first failure cancels the others.

        `engines` takes, by the sample's number, the number of the engine that wrote its last turn.
        """
        engines = {} if engines is None else engines
        try:
            async with asyncio.TaskGroup() as episodes:
                tasks = [
                    episodes.create_task(self._env.play(prompt, self._writer(prompt.index, number, attempt, engines)))
                    for number in range(self._samples)
                ]
        except* (RolloutFailed, EngineDied) as errors:
            if (deaths := errors.subgroup(EngineDied)) is not None:
                raise EngineDied(str(first_of(deaths))) from errors
            failure = first_of(errors)
            assert isinstance(failure, RolloutFailed), "the other kind"
            raise RolloutFailed(f"prompt {prompt.id!r}: {failure}", failure.kind) from errors
        samples = [task.result() for task in tasks]
        for sample in samples:
            self._check_parts(prompt, sample)
        return samples

    def _check_parts(self, prompt: Prompt, sample: Sample) -> None:
        """RolloutFailed where a reward has other parts than those before it: they are columns and metrics by name."""
        parts = tuple(sorted(sample.score.components))
        self._parts = parts if self._parts is None else self._parts
        if parts != self._parts:
            raise RolloutFailed(
                f"prompt {prompt.id!r}: a reward has {shown(parts)}, those before it {shown(self._parts)}: give every "
                "response the same parts, 0 where one has no say"
            )

    def _writer(self, index: int, number: int, attempt: int, engines: dict[int, int]) -> Write:
        turn = 0

        async def write(tokens: Sequence[int], *, max_new_tokens: int | None = None) -> Generation:
            nonlocal turn
            seed = request_seed(self._sampling.seed, index, number, attempt, turn)
            turn += 1
            most = self._sampling.max_new_tokens
            sampling = replace(self._sampling, seed=seed, max_new_tokens=min(most, max_new_tokens or most))
            try:
                async with asyncio.timeout(self._timeout_s):
                    written = await self._engine.generate(tokens, sampling)
            except TimeoutError as error:
                raise RolloutFailed(
                    f"no response within policy.generation.timeout_s={self._timeout_s:g}", "infrastructure"
                ) from error
            engines[number] = written.engine
            return written

        return write


def traces_of(attempt: int, engines: Sequence[int]) -> dict[str, list[torch.Tensor]]:
    """The columns of where the samples of a group were written."""
    return {
        "attempt": [torch.tensor(attempt, dtype=torch.int32) for _ in engines],
        "engine": [torch.tensor(engine, dtype=torch.int32) for engine in engines],
    }


def first_of(errors: BaseExceptionGroup[E]) -> E:
    """The first error inside a group of them."""
    first = errors.exceptions[0]
    return first_of(first) if isinstance(first, BaseExceptionGroup) else first


def shown(parts: Sequence[str]) -> str:
    """Names for a message."""
    return ", ".join(map(repr, parts)) or "no parts"


def columns_of(samples: Sequence[Sample]) -> dict[str, list[torch.Tensor]]:
    """The plane's columns of finished samples; see types.py for the alignment."""
    columns = {
        "tokens": [torch.tensor(s.tokens, dtype=torch.int64) for s in samples],
        "mask": [torch.tensor(s.mask, dtype=torch.bool) for s in samples],
        "gen_logprobs": [torch.tensor(s.logprobs, dtype=torch.float32) for s in samples],
        "versions": [torch.tensor(s.versions, dtype=torch.int32) for s in samples],
        "reward": [torch.tensor(s.score.reward, dtype=torch.float32) for s in samples],
        "trained": [torch.tensor(s.trained, dtype=torch.bool) for s in samples],
        "truncated": [torch.tensor(s.truncated, dtype=torch.bool) for s in samples],
    }
    for name in samples[0].score.components:
        columns[f"reward/{name}"] = [torch.tensor(s.score.components[name], dtype=torch.float32) for s in samples]
    return columns


def group_of(prompt: Prompt, keys: tuple[int, ...], samples: Sequence[Sample]) -> Group:
    """The handle of a finished group. Its age counts from the oldest version that wrote one of its tokens."""
    versions = [v for s in samples for v, wrote in zip(s.versions, s.mask, strict=True) if wrote]
    if not versions:
        raise RolloutFailed(f"prompt {prompt.id!r}: the policy wrote no token")
    names = samples[0].score.components
    return Group(
        index=prompt.index,
        prompt_id=prompt.id,
        keys=keys,
        lengths=tuple(len(s.tokens) for s in samples),
        written=tuple(sum(s.mask) for s in samples),
        rewards=tuple(s.score.reward for s in samples),
        truncated=tuple(s.truncated for s in samples),
        components={name: tuple(s.score.components[name] for s in samples) for name in names},
        oldest_version=min(versions),
        newest_version=max(versions),
    )
