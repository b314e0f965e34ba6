"""The contract of the Engine role: sleep and wake; weights that come a few at a time. Run on every implementation."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import pytest
import torch

from tandem.fingerprint import fingerprint
from tandem.roles import Engine
from tandem.types import Generation, Max
from tests.contracts.engine_kinds import KINDS, PROMPTS, SAMPLED, Kind, kind_of, pause_midway, play, write_all
from tests.rollout.tiny_models import tiny_model


@pytest.fixture(params=KINDS, ids=lambda kind: kind.name)
def kind(request: pytest.FixtureRequest) -> Kind:
    return kind_of(request)


async def sleep_and_wake(engine: Engine, *, keep_weights: bool) -> None:
    await engine.pause()
    metrics = await engine.sleep(keep_weights=keep_weights) | await engine.wake()
    if torch.cuda.is_available():
        assert all(isinstance(metric, Max) and metric.value > 0 for metric in metrics.values())
    else:
        assert metrics == {}


def test_an_engine_that_slept_with_its_weights_writes_as_before(kind: Kind):
    async def scene(engine: Engine):
        before = await write_all(engine, PROMPTS, SAMPLED)
        for _ in range(2):
            await sleep_and_wake(engine, keep_weights=True)
            await engine.resume()
            assert kind.all_same(await write_all(engine, PROMPTS, SAMPLED), before)
        assert await engine.fingerprint() == fingerprint(tiny_model().named_parameters())

    play(kind, scene)


@pytest.mark.parametrize("recompute_kv", [False, True])
def test_an_engine_that_slept_without_writes_with_those_that_come(kind: Kind, recompute_kv: bool):
    new = tiny_model(seed=3)
    written: list[list[Generation]] = []

    async def fresh(engine: Engine):
        written.append(await write_all(engine, PROMPTS, SAMPLED))

    async def slept(engine: Engine):
        await write_all(engine, PROMPTS, SAMPLED)
        await sleep_and_wake(engine, keep_weights=False)
        await engine.load_weights(0, new.named_parameters())
        assert await engine.fingerprint() == fingerprint(new.named_parameters())
        await engine.resume(recompute_kv=recompute_kv)
        written.append(await write_all(engine, PROMPTS, SAMPLED))

    play(kind, fresh, model=new)
    play(kind, slept)
    assert kind.all_same(*written)


def test_requests_wait_for_an_engine_that_sleeps(kind: Kind):
    async def scene(engine: Engine):
        await engine.pause()
        await engine.sleep(keep_weights=True)
        late = asyncio.create_task(engine.generate(PROMPTS[0], SAMPLED))
        await asyncio.sleep(0)
        await engine.wake()
        await engine.fingerprint()
        assert not late.done()
        await engine.resume()
        assert len((await late).tokens) == 12

    play(kind, scene)


def test_what_an_engine_cannot_do_in_its_sleep_is_refused_with_what_comes_first(kind: Kind):
    async def scene(engine: Engine):
        with pytest.raises(RuntimeError, match=r"sleep\(\) needs .* await pause\(\) first"):
            await engine.sleep(keep_weights=True)
        with pytest.raises(RuntimeError, match=r"wake\(\) needs .* await sleep\(\) first"):
            await engine.wake()
        await engine.pause()
        await engine.sleep(keep_weights=False)
        with pytest.raises(RuntimeError, match=r"sleep\(\) needs an engine that is awake"):
            await engine.sleep(keep_weights=False)
        with pytest.raises(RuntimeError, match=r"load_weights\(1\) needs .* await wake\(\) first"):
            await engine.load_weights(1, tiny_model().named_parameters())
        with pytest.raises(RuntimeError, match=r"resume\(\) of an engine that has slept needs wake\(\) first"):
            await engine.resume()
        await engine.wake()
        with pytest.raises(RuntimeError, match=r"resume\(\) .* needs load_weights\(\) first"):
            await engine.resume()
        await engine.load_weights(1, tiny_model().named_parameters())
        await engine.resume()
        assert (await engine.generate(PROMPTS[0], SAMPLED)).versions == (1,) * 12

    play(kind, scene)


def test_an_engine_with_requests_that_stand_does_not_sleep(kind: Kind):
    async def scene(engine: Engine):
        standing = await pause_midway(engine, PROMPTS, replace(SAMPLED, max_new_tokens=60))
        with pytest.raises(RuntimeError, match=r"sleep\(\) needs an engine that is awake, paused and drained"):
            await engine.sleep(keep_weights=True)
        await engine.resume()
        assert [len(written.tokens) for written in await asyncio.gather(*standing)] == [60] * len(PROMPTS)

    play(kind, scene)


@dataclass(frozen=True)
class Trickle:
    """A WeightStream over a list."""

    weights: Sequence[tuple[str, torch.Tensor]]

    @property
    def shapes(self) -> list[tuple[str, tuple[int, ...]]]:
        return [(name, tuple(tensor.shape)) for name, tensor in self.weights]

    def open(self, share: int) -> Iterator[tuple[str, torch.Tensor]]:
        return (((name, tensor.clone())) for name, tensor in self.weights)

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        return self.open(0)


def test_weights_that_come_a_few_at_a_time_are_checked_before_the_first(kind: Kind):
    new = list(tiny_model(seed=3).named_parameters())

    async def scene(engine: Engine):
        before = await engine.fingerprint()
        await engine.pause()
        with pytest.raises(ValueError, match="weights are missing, first"):
            await engine.load_weights(1, Trickle(new[:-1]))
        assert await engine.fingerprint() == before
        await engine.load_weights(1, Trickle(new))
        assert await engine.fingerprint() == fingerprint(new)
        await engine.resume()
        assert (await engine.generate(PROMPTS[0], SAMPLED)).versions == (1,) * 12

    play(kind, scene)
