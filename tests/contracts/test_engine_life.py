"""The contract of the Engine role: pause, weights, cancellation, the end. Run on every implementation."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from tandem.fingerprint import fingerprint
from tandem.roles import Engine
from tandem.types import EngineDied, Generation
from tests.contracts.engine_kinds import KINDS, PROMPTS, SAMPLED, Kind, kind_of, play, text, write_all
from tests.rollout.tiny_models import ARCHITECTURES, tiny_model


@pytest.fixture(params=KINDS, ids=lambda kind: kind.name)
def kind(request: pytest.FixtureRequest) -> Kind:
    return kind_of(request)


def test_pause_waits_for_running_requests_and_holds_new_ones(kind: Kind):
    async def scene(engine: Engine):
        running = [asyncio.create_task(engine.generate(p, replace(SAMPLED, max_new_tokens=40))) for p in PROMPTS]
        await asyncio.sleep(0)
        await engine.fingerprint()  # a round trip: the requests have started
        await engine.pause()
        assert [len(task.result().tokens) for task in running if task.done()] == [40] * len(running)
        late = asyncio.create_task(engine.generate(PROMPTS[0], SAMPLED))
        await asyncio.sleep(0)
        await engine.fingerprint()
        await engine.pause()  # again: no harm
        assert not late.done()
        await engine.resume()
        assert len((await late).tokens) == 12

    play(kind, scene)


def test_a_pause_keeps_waiting_requests_for_later(kind: Kind):
    async def scene(engine: Engine):
        tasks = [asyncio.create_task(engine.generate([i], SAMPLED)) for i in range(9)]
        await asyncio.sleep(0)
        await engine.pause()
        assert sum(not task.done() for task in tasks) >= 9 - 2
        await engine.resume()
        assert [len(w.tokens) for w in await asyncio.gather(*tasks)] == [12] * 9

    play(kind, scene, slots=2)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("tied", [False, True])
def test_loaded_weights_write_exactly_what_a_fresh_engine_writes(kind: Kind, architecture: str, tied: bool):
    old, new = tiny_model(architecture, seed=1, tied=tied), tiny_model(architecture, seed=2, tied=tied)
    written: list[list[Generation]] = []

    async def fresh(engine: Engine):
        written.append(await write_all(engine, PROMPTS, SAMPLED))

    async def loaded(engine: Engine):
        before = await write_all(engine, PROMPTS, SAMPLED)
        await engine.pause()
        await engine.load_weights(1, new.named_parameters())
        await engine.resume()
        after = await write_all(engine, PROMPTS, SAMPLED)
        assert kind.all_same([text(w) for w in after], [text(w) for w in written[0]])
        assert before[0].tokens != after[0].tokens

    play(kind, fresh, tiny_model(architecture, seed=2, tied=tied))
    play(kind, loaded, old)


def test_every_token_carries_the_version_that_wrote_it(kind: Kind):
    async def scene(engine: Engine):
        first = await engine.generate(PROMPTS[0], SAMPLED)
        await engine.pause()
        waiting = asyncio.create_task(engine.generate(PROMPTS[0], SAMPLED))
        await engine.load_weights(5, tiny_model(seed=1).named_parameters())
        await engine.resume()
        assert (first.versions, (await waiting).versions) == ((0,) * 12, (5,) * 12)

    play(kind, scene)


def test_the_fingerprint_is_that_of_the_weights_loaded(kind: Kind):
    new = tiny_model(seed=1)

    async def scene(engine: Engine):
        assert await engine.fingerprint() == fingerprint(tiny_model().named_parameters())
        await engine.pause()
        await engine.load_weights(1, new.named_parameters())
        assert await engine.fingerprint() == fingerprint(new.named_parameters())

    play(kind, scene)


def test_weights_are_refused_while_running(kind: Kind):
    async def scene(engine: Engine):
        with pytest.raises(RuntimeError, match="pause"):
            await engine.load_weights(1, tiny_model(seed=1).named_parameters())

    play(kind, scene)


def test_wrong_weights_are_named_and_change_nothing(kind: Kind):
    good = dict(tiny_model(seed=1).named_parameters())
    name = "model.layers.1.mlp.up_proj.weight"

    async def scene(engine: Engine):
        before = await engine.fingerprint()
        await engine.pause()
        for weights, message in [
            ({key: value for key, value in good.items() if key != name}, rf"missing.*{name}"),
            ({**good, "model.stranger": good[name]}, r"unknown.*model\.stranger"),
            ({**good, name: good[name].T}, rf"{name}.*shape \[64, 96\], want \[96, 64\]"),
        ]:
            with pytest.raises(ValueError, match=message):
                await engine.load_weights(1, weights.items())
            assert await engine.fingerprint() == before
        await engine.resume()
        assert (await engine.generate(PROMPTS[0], SAMPLED)).versions[0] == 0

    play(kind, scene)


def test_an_error_in_the_exporter_reaches_the_caller_and_changes_nothing(kind: Kind):
    def broken():
        yield from list(tiny_model(seed=1).named_parameters())[:3]
        raise OSError("the trainer is gone")

    async def scene(engine: Engine):
        before = await engine.fingerprint()
        await engine.pause()
        with pytest.raises(OSError, match="the trainer is gone"):
            await engine.load_weights(1, broken())
        assert await engine.fingerprint() == before

    play(kind, scene)


def test_weights_of_another_precision_are_cast(kind: Kind):
    half = [(name, tensor.bfloat16()) for name, tensor in tiny_model(seed=1).named_parameters()]

    async def scene(engine: Engine):
        await engine.pause()
        await engine.load_weights(1, half)
        assert await engine.fingerprint() == fingerprint((name, tensor.float()) for name, tensor in half)

    play(kind, scene)


def test_cancelling_frees_the_slot_and_leaves_the_others_alone(kind: Kind):
    async def scene(engine: Engine):
        wanted = await engine.generate(PROMPTS[0], SAMPLED)
        long = [asyncio.create_task(engine.generate([i], replace(SAMPLED, max_new_tokens=150))) for i in range(2)]
        neighbour = asyncio.create_task(engine.generate(PROMPTS[0], SAMPLED))
        await asyncio.sleep(0)
        await engine.fingerprint()
        for task in long:
            task.cancel()
        results = await asyncio.gather(*long, return_exceptions=True)
        assert all(isinstance(result, asyncio.CancelledError) for result in results)
        assert kind.same(await neighbour, wanted)
        assert kind.same(await engine.generate(PROMPTS[0], SAMPLED), wanted)

    play(kind, scene, slots=3)


def test_a_cancelled_waiting_request_is_never_written(kind: Kind):
    async def scene(engine: Engine):
        await engine.pause()
        waiting = [asyncio.create_task(engine.generate([i], SAMPLED)) for i in range(3)]
        await asyncio.sleep(0)
        waiting[1].cancel()
        await engine.resume()
        kept = await asyncio.gather(waiting[0], waiting[2])
        assert [len(w.tokens) for w in kept] == [12, 12]
        assert waiting[1].cancelled()

    play(kind, scene)


def test_close_fails_whoever_waits_and_every_later_call(kind: Kind):
    async def scene(engine: Engine):
        await engine.pause()
        waiting = asyncio.create_task(engine.generate(PROMPTS[0], SAMPLED))
        await asyncio.sleep(0)
        await engine.close()
        with pytest.raises(EngineDied, match="closed"):
            await waiting
        for call in (engine.generate(PROMPTS[0], SAMPLED), engine.pause(), engine.resume(), engine.fingerprint()):
            with pytest.raises(EngineDied, match="closed"):
                await call
        await engine.close()  # again: no harm

    play(kind, scene)
