"""Publishing inside one process: engines that hold the trainer's weights go on, all others end the run at once."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import replace
from time import perf_counter

import pytest
import torch

from tandem.config.models import SequencePacking
from tandem.fingerprint import fingerprint
from tandem.plane.memory import MemoryPlane
from tandem.roles import NamedTensors, Pause
from tandem.rollout.threaded import ThreadedEngine
from tandem.rollout.transformers import decode_batch
from tandem.train.worker import Worker
from tandem.types import Generation, Max, Metrics, Sampling, Sum
from tandem.weights.memory import MemoryCarrier
from tandem.weights.publisher import Publisher
from tests.rollout.tiny_models import tiny_model
from tests.train.small_models import actor_backend

SAMPLED = Sampling(max_new_tokens=12, temperature=1.0, seed=7, stop_token_ids=())
LONG = replace(SAMPLED, max_new_tokens=110)
PROMPT = [5, 17, 3]
NEW = 1  # the seed of the actor's weights; engines start with those of seed 0


class Forgetful(ThreadedEngine):
    """Says yes and does nothing."""

    async def load_weights(self, version: int, weights: NamedTensors) -> None:
        for _ in weights:
            pass


class Half(ThreadedEngine):
    """Loads the first half of the tensors."""

    async def load_weights(self, version: int, weights: NamedTensors) -> None:
        given, own = dict(weights), dict(tiny_model().named_parameters())
        kept = list(given)[len(given) // 2 :]
        await super().load_weights(version, (given | {name: own[name] for name in kept}).items())


class Swapped(ThreadedEngine):
    """Takes layer 0 for layer 1 and layer 1 for layer 0."""

    async def load_weights(self, version: int, weights: NamedTensors) -> None:
        other = {"model.layers.0.": "model.layers.1.", "model.layers.1.": "model.layers.0."}
        given = dict(weights)
        await super().load_weights(
            version, [(name, given[other.get(name[:15], name[:15]) + name[15:]]) for name in given]
        )


class Diary(ThreadedEngine):
    """Writes down what is asked of it."""

    def start_diary(self, events: list[str]) -> None:
        self._events = events

    async def pause(self, kind: Pause = "drain") -> Metrics:
        self._events.append(f"pause {kind}")
        return await super().pause(kind)

    async def resume(self, *, recompute_kv: bool = False) -> None:
        self._events.append(f"resume recompute_kv={recompute_kv}")
        await super().resume(recompute_kv=recompute_kv)

    async def load_weights(self, version: int, weights: NamedTensors) -> None:
        self._events.append(f"load {version}")
        await super().load_weights(version, weights)


def start(kind: type[ThreadedEngine] = ThreadedEngine) -> ThreadedEngine:
    decoder = decode_batch(tiny_model(), max_concurrent_samples=4, max_total_sequence_length=160, pad_token_id=0)
    return kind(decoder, name="engine")


def play(
    scene: Callable[[Worker, list[ThreadedEngine]], Coroutine[None, None, None]],
    *kinds: type[ThreadedEngine],
    trainer: type[Worker] = Worker,
) -> None:
    """Run a scene with an actor of new weights and engines of old ones."""

    async def body() -> None:
        backend, packing = actor_backend(tiny_model(seed=NEW)), SequencePacking(train_mb_tokens=256)
        actor = trainer("actor", backend, plane=MemoryPlane(), packing=packing, objective=None, clock=perf_counter)
        engines = [start(kind) for kind in kinds]
        try:
            await asyncio.wait_for(scene(actor, engines), timeout=60)
        finally:
            await asyncio.gather(actor.close(), *(engine.close() for engine in engines))

    asyncio.run(body())


@pytest.mark.parametrize(("pause", "recompute_kv"), [("drain", False), ("stand", False), ("stand", True)])
def test_all_engines_hold_the_actors_weights_and_go_on(pause: Pause, recompute_kv: bool):
    new = tiny_model(seed=NEW)

    async def scene(actor: Worker, engines: list[ThreadedEngine]):
        sync = Publisher(MemoryCarrier(actor, engines), engines, pause=pause, recompute_kv=recompute_kv)
        metrics = await sync.publish(3)
        for engine in engines:
            assert await engine.fingerprint() == fingerprint(new.named_parameters())
            assert (await engine.generate(PROMPT, SAMPLED)).versions == (3,) * 12
        assert metrics["weights/bytes"] == Sum(4 * sum(p.numel() for p in new.parameters()))
        assert isinstance(metrics["weights/pause_s"], Max)
        assert 0 < metrics["weights/pause_s"].value < 60
        assert set(metrics) == {"weights/bytes", "weights/pause_s"}

    play(scene, ThreadedEngine, ThreadedEngine)


async def begin(engine: ThreadedEngine) -> asyncio.Task[Generation]:
    task = asyncio.create_task(engine.generate(PROMPT, LONG))
    await asyncio.sleep(0)
    await engine.fingerprint()
    await engine.fingerprint()
    return task


def test_draining_lets_running_requests_end_with_the_old_weights():
    async def scene(actor: Worker, engines: list[ThreadedEngine]):
        running = await begin(engines[0])
        await Publisher(MemoryCarrier(actor, engines), engines, pause="drain", recompute_kv=False).publish(1)
        assert running.done()
        assert (await running).versions == (0,) * 110

    play(scene, ThreadedEngine)


@pytest.mark.parametrize("recompute_kv", [True, False])
def test_in_flight_running_requests_go_on_with_the_new_weights(recompute_kv: bool):
    async def scene(actor: Worker, engines: list[ThreadedEngine]):
        running = await begin(engines[0])
        await Publisher(MemoryCarrier(actor, engines), engines, pause="stand", recompute_kv=recompute_kv).publish(1)
        written = await running
        assert set(written.versions) == {0, 1}
        before = written.versions.count(0)
        law = replace(LONG, max_new_tokens=110 - before)
        fresh = await engines[0].generate([*PROMPT, *written.tokens[:before]], law)
        assert ((fresh.tokens, fresh.logprobs) == (written.tokens[before:], written.logprobs[before:])) == recompute_kv

    play(scene, ThreadedEngine)


@pytest.mark.parametrize("pause", ["reissue", "rewrite"])
def test_aborted_requests_are_issued_again_and_counted(pause: Pause):
    async def scene(actor: Worker, engines: list[ThreadedEngine]):
        running = [await begin(engine) for engine in engines]
        metrics = await Publisher(MemoryCarrier(actor, engines), engines, pause=pause, recompute_kv=True).publish(1)
        written = await asyncio.gather(*running)
        old = sum(generation.versions.count(0) for generation in written)
        tokens = metrics["weights/kept_tokens" if pause == "reissue" else "weights/discarded_tokens"]
        assert metrics["weights/reissued_requests"] == Sum(2)
        assert set(metrics) - {"weights/kept_tokens", "weights/discarded_tokens"} == {
            "weights/bytes",
            "weights/pause_s",
            "weights/reissued_requests",
        }
        assert [len(generation.tokens) for generation in written] == [110, 110]
        if pause == "reissue":
            assert tokens == Sum(old)
            assert old >= 2
        else:
            assert old == 0
            assert tokens.value >= 2
            assert written == [await engine.generate(PROMPT, LONG) for engine in engines]

    play(scene, ThreadedEngine, ThreadedEngine)


@pytest.mark.parametrize(
    ("kind", "tensor"),
    [
        (Forgetful, "model.embed_tokens.weight"),
        (Half, "model.layers.1.self_attn.q_proj.weight"),
        (Swapped, "model.layers.0.self_attn.q_proj.weight"),
    ],
)
@pytest.mark.parametrize("pause", ["drain", "stand", "reissue"])
def test_an_engine_with_other_weights_ends_the_run_at_the_first_sync(
    kind: type[ThreadedEngine], tensor: str, pause: Pause, caplog: pytest.LogCaptureFixture
):
    async def scene(actor: Worker, engines: list[ThreadedEngine]):
        with pytest.raises(RuntimeError, match=rf"version 1 engine 1 holds other weights: {tensor} is float32.* there"):
            await Publisher(MemoryCarrier(actor, engines), engines, pause=pause, recompute_kv=True).publish(1)
        tasks = [asyncio.create_task(engine.generate(PROMPT, SAMPLED)) for engine in engines]
        await asyncio.sleep(0)
        for engine in engines:
            await engine.fingerprint()
        assert [engine.tokens_written for engine in engines] == [0, 0], "none writes with weights that are unproven"
        for task in tasks:
            task.cancel()

    with caplog.at_level(logging.ERROR):
        play(scene, ThreadedEngine, kind)
    assert "publishing version 1 failed: the engines stay paused" in caplog.text


@pytest.mark.parametrize(("pause", "recompute_kv"), [("drain", False), ("stand", True)])
def test_the_weights_are_exported_before_the_pause(pause: Pause, recompute_kv: bool):
    events: list[str] = []

    class Exporting(Worker):
        def export_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
            events.append("export")
            return super().export_weights()

    async def scene(actor: Worker, engines: list[ThreadedEngine]):
        for engine in engines:
            assert isinstance(engine, Diary)
            engine.start_diary(events)
        await Publisher(MemoryCarrier(actor, engines), engines, pause=pause, recompute_kv=recompute_kv).publish(4)

    play(scene, Diary, trainer=Exporting)
    assert events == ["export", f"pause {pause}", "load 4", f"resume recompute_kv={recompute_kv}"]


def test_an_error_while_exporting_leaves_the_engines_at_work():
    class Broken(Worker):
        def export_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
            yield from list(super().export_weights())[:3]
            raise OSError("the trainer is gone")

    async def scene(actor: Worker, engines: list[ThreadedEngine]):
        with pytest.raises(OSError, match="the trainer is gone"):
            await Publisher(MemoryCarrier(actor, engines), engines, pause="stand", recompute_kv=True).publish(1)
        assert (await engines[0].generate(PROMPT, SAMPLED)).versions == (0,) * 12

    play(scene, ThreadedEngine, trainer=Broken)
