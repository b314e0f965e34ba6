"""Actor, critic and reference on one device: each leaves before another computes, and nothing else changes."""

from __future__ import annotations

import asyncio
import itertools
from contextlib import contextmanager

import pytest
import torch

from tandem.launch.gpus import SharedGpus
from tandem.launch.trainers import check_offload
from tandem.launch.turns import TakesTurns, Turns
from tandem.rollout.threaded import ThreadedEngine
from tandem.rollout.transformers import decode_batch
from tandem.train.torch.backend import TorchBackend
from tandem.train.torch.placement import part_of
from tandem.types import Max, Metrics, Sampling
from tests.rollout.tiny_models import tiny_model
from tests.train.ppo_steps import BATCH, OBJECTIVES, algorithm_of, chunks, plane_of_rollouts
from tests.train.small_models import CPU, actor_backend, critic_backend, settings, worker


def build(offload: str) -> dict[str, TorchBackend]:
    config = settings(offload=offload)
    return {
        "critic": critic_backend(config),
        "actor": actor_backend(config=config, temperature=0.7),
        "reference": actor_backend(config=config, temperature=0.7, steps=None),
    }


def present(backends: dict[str, TorchBackend]) -> set[str]:
    """Whose weights have bytes."""
    first = {name: part_of(next(iter(backend.parameters.values()))) for name, backend in backends.items()}
    return {name for name, tensor in first.items() if tensor.untyped_storage().nbytes()}


class Watched:
    """A step of the real algorithm over real trainers, and who was on the device at the end of each call."""

    def __init__(self, offload: str, **options: object) -> None:
        self.backends = build(offload)
        self.turns = Turns()
        self.calls: list[str] = []
        self.there: list[set[str]] = []
        self._options = options

    @contextmanager
    def span(self, name: str):
        yield
        if not name.startswith("advantages/"):
            self.calls.append(name.partition("/")[0])
            self.there.append(present(self.backends))

    async def step(self, chunk: int = 8) -> Watched:
        plane = await plane_of_rollouts()
        workers = {name: worker(backend, plane, OBJECTIVES[name], name=name) for name, backend in self.backends.items()}
        models = {name: TakesTurns(model, self.turns) for name, model in workers.items()}
        algorithm = algorithm_of(plane, models, span=self.span, **self._options)
        async with SharedGpus([self.turns]).training(publishes=True):
            self.metrics = await algorithm.step(chunks(chunk), step=0, train_policy=True)
        for model in models.values():
            await model.close()
        return self


def weights(watched: Watched) -> dict[str, torch.Tensor]:
    return {
        f"{name}/{tensor_name}": tensor
        for name, backend in watched.backends.items()
        for tensor_name, tensor in backend.export_weights()
    }


def assert_same(one: Watched, other: Watched) -> None:
    ours, theirs = weights(one), weights(other)
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())
    assert one.metrics == other.metrics


@pytest.mark.parametrize("options", [{"ppo_epochs": 2}, {"mini_batch": 8, "streaming": True}], ids=["epochs", "stream"])
def test_one_model_is_there_at_a_time_and_a_step_learns_the_same(options):
    together = asyncio.run(Watched("none", **options).step(chunk=4))
    in_turn = asyncio.run(Watched("all", **options).step(chunk=4))
    assert all(names == {name} for name, names in zip(in_turn.calls, in_turn.there, strict=True))
    assert all(names == set(together.backends) for names in together.there)
    assert present(in_turn.backends) == set(), "engines have the device now"
    assert_same(together, in_turn)


def test_models_change_places_four_times_a_step_and_with_an_early_stop_at_every_mini_batch():
    def order(watched: Watched) -> list[str]:
        return [name for name, _ in itertools.groupby(watched.calls)]

    free = asyncio.run(Watched("all", ppo_epochs=2).step())
    assert order(free) == ["actor", "reference", "critic", "actor"]
    bound = asyncio.run(Watched("all", ppo_epochs=2, target_kl=1e9).step())
    assert order(bound) == ["actor", "reference", *["critic", "actor"] * 4]
    assert_same(free, bound)


def test_an_early_stop_stops_the_critic_at_the_same_mini_batch():
    stopped = asyncio.run(Watched("none", ppo_epochs=2, target_kl=1e-9).step())
    assert stopped.metrics["actor/stopped_by_target_kl"].value == 1
    assert stopped.calls.count("actor") == stopped.calls.count("critic")


def test_calls_made_at_the_same_time_wait_for_each_other():
    async def both():
        watched = Watched("all")
        plane = await plane_of_rollouts()
        workers = [worker(watched.backends[name], plane, None, name=name) for name in ("actor", "critic")]
        models = [TakesTurns(model, watched.turns) for model in workers]
        await asyncio.gather(*(model.infer(BATCH, f"out{k}") for k, model in enumerate(models * 3)))
        assert present(watched.backends) == {"critic"}
        written = await plane.get(BATCH.keys, [f"out{k}" for k in range(6)])
        for model in models:
            await model.close()
        return written

    written = asyncio.run(both())
    for first, second in (("out0", "out2"), ("out1", "out3"), ("out1", "out5")):
        assert all(torch.equal(a, b) for a, b in zip(written[first], written[second], strict=True))


def test_a_model_in_the_memory_of_the_host_cannot_be_moved_there():
    with pytest.raises(ValueError, match=r"value\.offload=all moves a model .* set value\.offload=none"):
        check_offload("value", settings(offload="all"), CPU)
    check_offload("value", settings(offload="all"), torch.device("cuda"))
    check_offload("policy", settings(), CPU)


class Sleeper(ThreadedEngine):
    """Writes down what is asked of it."""

    def __init__(self, events: list[str]) -> None:
        decoder = decode_batch(tiny_model(), max_concurrent_samples=4, max_total_sequence_length=64, pad_token_id=0)
        super().__init__(decoder, name="engine")
        self._events = events

    async def sleep(self, *, keep_weights: bool) -> Metrics:
        self._events.append(f"sleep keep_weights={keep_weights}")
        return await super().sleep(keep_weights=keep_weights) | {"gpu/used_before_sleep": Max(7.0)}

    async def wake(self) -> Metrics:
        self._events.append("wake")
        return await super().wake() | {"gpu/used_before_wake": Max(3.0)}


@pytest.mark.parametrize("publishes", [True, False])
def test_an_engine_sleeps_while_trainers_compute_and_wakes_when_they_have_left(publishes: bool):
    events: list[str] = []

    class Parked:
        async def park(self) -> None:
            events.append("park")

    async def scene():
        engine, turns = Sleeper(events), Turns()
        gpus = SharedGpus([turns], engine)
        law = Sampling(max_new_tokens=4, temperature=1.0, seed=0, stop_token_ids=())
        running = asyncio.create_task(engine.generate([5], law))
        await asyncio.sleep(0)
        await engine.fingerprint()  # a round trip: the request has started
        async with gpus.training(publishes=publishes):
            assert (await running).versions == (0,) * 4
            late = asyncio.create_task(engine.generate([5], law))
            async with turns.of(Parked()):
                events.append("train")
        if publishes:
            await engine.load_weights(1, tiny_model(seed=1).named_parameters())
            await engine.resume()
        assert (await late).versions == (int(publishes),) * 4
        assert gpus.drain() == {"gpu/used_before_sleep": Max(7.0), "gpu/used_before_wake": Max(3.0)}
        assert gpus.drain() == {}
        await engine.close()
        async with gpus.training(publishes=publishes):
            events.append("train without engines")

    asyncio.run(scene())
    assert events == [f"sleep keep_weights={not publishes}", "train", "park", "wake", "train without engines"]
