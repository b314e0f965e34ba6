"""Routing between engines of the quickstart model: who gets a request, and what a death costs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace

import pytest
import torch
from transformers import PreTrainedModel

from tandem.fingerprint import fingerprint
from tandem.launch.models import load_causal_lm
from tandem.roles import Engine
from tandem.rollout.router import Router
from tandem.rollout.threaded import ThreadedEngine
from tandem.rollout.transformers import transformers_engine
from tandem.types import EngineDied, Generation, RolloutFailed, Sampling

SAMPLED = Sampling(max_new_tokens=24, temperature=1.0, seed=7, stop_token_ids=())
PROMPTS = [[11, 12, 13, 14 + i] for i in range(6)]
Task = asyncio.Task[Generation]


def quickstart() -> PreTrainedModel:
    return load_causal_lm("quickstart", dtype=torch.float32, device=torch.device("cpu"), trust_remote_code=False)


def shifted(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Other weights of the same model."""
    return {name: parameter.detach() * 1.01 for name, parameter in model.named_parameters()}


def engine(dies_at_pass: int = 0) -> ThreadedEngine:
    """`dies_at_pass`: this forward pass finds no memory, which ends the engine. 0: none does."""
    model = quickstart()
    passes = iter(range(1, 1_000_000))

    def forward(*_: object) -> None:
        if next(passes) == dies_at_pass:
            raise MemoryError("no memory left")

    model.get_output_embeddings().register_forward_pre_hook(forward)
    return transformers_engine(model, max_concurrent_samples=8, max_total_sequence_length=64, pad_token_id=0)


def play(
    scene: Callable[[Router], Coroutine[None, None, None]],
    dies_at_pass: Sequence[int] = (0, 0),
    *,
    max_reissues: int = 2,
    max_imbalance: int = 2,
    restart: Callable[[int], Coroutine[None, None, Engine]] | None = None,
) -> None:
    async def body() -> None:
        engines = [engine(at) for at in dies_at_pass]
        router = Router(engines, max_reissues=max_reissues, max_imbalance=max_imbalance, restart=restart)
        try:
            await asyncio.wait_for(scene(router), timeout=60)
        finally:
            await router.close()

    asyncio.run(body())


async def write(engine: Engine, prompts: Sequence[Sequence[int]] = PROMPTS) -> list[Generation]:
    requests = [engine.generate(prompt, replace(SAMPLED, seed=i)) for i, prompt in enumerate(prompts)]
    return await asyncio.gather(*requests)


def written_by_one() -> list[Generation]:
    """What an engine that nothing befalls writes."""
    wanted: list[Generation] = []

    async def scene(router: Router) -> None:
        wanted.extend(await write(router))

    play(scene, (0,))
    return wanted


async def begin(router: Router, prompts: Sequence[Sequence[int]]) -> list[Task]:
    """Requests that have reached their engines and wait there."""
    await router.pause()
    tasks = [asyncio.create_task(router.generate(prompt, SAMPLED)) for prompt in prompts]
    await asyncio.sleep(0)
    return tasks


def test_a_request_goes_to_the_engine_with_the_fewest():
    async def scene(router: Router):
        tasks = await begin(router, PROMPTS)
        assert router.loads == (2, 2, 2)
        tasks[1].cancel()
        tasks[4].cancel()
        await asyncio.gather(tasks[1], tasks[4], return_exceptions=True)
        assert router.loads == (2, 0, 2)
        more = [asyncio.create_task(router.generate([40 + i], SAMPLED)) for i in range(2)]
        await asyncio.sleep(0)
        assert router.loads == (2, 2, 2)
        await router.resume()
        await asyncio.gather(tasks[0], *tasks[2:4], tasks[5], *more)
        assert router.loads == (0, 0, 0)

    play(scene, (0, 0, 0))


def test_the_samples_of_a_prompt_share_an_engine_until_it_has_too_many():
    async def scene(router: Router):
        first = await begin(router, [PROMPTS[0]] * 3)
        assert router.loads == (3, 0)
        more = [asyncio.create_task(router.generate(PROMPTS[0], SAMPLED)) for _ in range(2)]
        await asyncio.sleep(0)
        assert router.loads == (3, 2), "3 more than the other engine are too many: the group's home moves"
        await router.resume()
        results = await asyncio.gather(*first, *more)
        assert results == [results[0]] * 5

    play(scene, max_imbalance=2)


def test_a_prompt_that_comes_again_goes_where_it_was_read():
    async def scene(router: Router):
        await router.generate(PROMPTS[0], SAMPLED)
        blocked = await begin(router, [PROMPTS[1], PROMPTS[0]])
        assert router.loads == (2, 0), "both prefer engine 0, the second because its prompt is cached there"
        await router.resume()
        await asyncio.gather(*blocked)

    play(scene)


def test_a_dead_engines_requests_are_written_elsewhere_with_the_same_tokens(caplog: pytest.LogCaptureFixture):
    async def scene(router: Router):
        assert await write(router) == wanted
        assert (router.serving, router.reissued) == ((1,), 3)
        assert await write(router) == wanted
        assert router.loads == (0, 0)

    wanted = written_by_one()
    play(scene, (10, 0))
    assert "engine 0 has died, 1 are left: the engine's thread ended with MemoryError: no memory left" in caplog.text


def test_with_no_engine_left_the_error_goes_to_every_caller():
    async def scene(router: Router):
        results = await asyncio.gather(
            *[router.generate(prompt, SAMPLED) for prompt in PROMPTS], return_exceptions=True
        )
        assert all(isinstance(result, EngineDied) for result in results)
        calls = (router.generate([1], SAMPLED), router.pause(), router.resume(), router.load_weights(1, []))
        for call in (*calls, router.fingerprint()):
            with pytest.raises(EngineDied, match=r"none of 2 engines is left.*no memory left"):
                await call

    play(scene, (10, 10))


def test_a_request_that_outlives_too_many_engines_is_a_failed_rollout():
    async def scene(router: Router):
        with pytest.raises(RolloutFailed, match=r"2 engines died under this request.*no memory left") as caught:
            await router.generate(PROMPTS[0], SAMPLED)
        assert caught.value.kind == "infrastructure"
        assert router.serving == (2,)
        assert len((await router.generate(PROMPTS[0], SAMPLED)).tokens) == 24

    play(scene, (10, 10, 0), max_reissues=1)


def test_an_update_reaches_the_engines_that_are_left():
    new = shifted(quickstart())

    async def scene(router: Router):
        await write(router)
        await router.pause("stand")
        await router.load_weights(3, iter(new.items()))
        assert await router.fingerprint() == fingerprint(new.items())
        await router.resume(recompute_kv=True)
        assert {version for w in await write(router) for version in w.versions} == {3}
        assert router.serving == (0, 2)

    play(scene, (0, 10, 0))


def test_engines_that_hold_other_weights_are_named():
    async def scene(router: Router):
        odd = engine()
        await odd.pause()
        await odd.load_weights(0, shifted(quickstart()).items())
        await odd.resume()
        pair = Router([engine(), odd], max_reissues=0, max_imbalance=0)
        with pytest.raises(RuntimeError, match=r"engines 0 and 1 hold other weights: model\.embed_tokens\.weight is"):
            await pair.fingerprint()
        await pair.close()

    play(scene, (0,))


def test_a_restarted_engine_serves_once_it_has_the_current_weights():
    new = shifted(quickstart())
    started = asyncio.Event()

    async def restart(number: int) -> Engine:
        assert number == 0
        started.set()
        return engine()

    async def scene(router: Router):
        await write(router)
        await started.wait()
        assert router.serving == (1,), "it has the weights of a model file: none asks for those any more"
        await router.pause()
        await router.load_weights(1, new.items())
        assert router.serving == (0, 1)
        assert await router.fingerprint() == fingerprint(new.items())
        waiting = await begin(router, [[40 + i] for i in range(6)])
        assert router.loads == (3, 3)
        await router.resume()
        assert {version for task in waiting for version in (await task).versions} == {1}

    play(scene, (10, 0), restart=restart)


def test_an_engine_that_cannot_be_restarted_stays_out(caplog: pytest.LogCaptureFixture):
    async def restart(number: int) -> Engine:
        raise OSError("no such machine")

    async def scene(router: Router):
        await write(router)
        await router.pause()
        await router.load_weights(1, shifted(quickstart()).items())
        await router.resume()
        assert router.serving == (1,)
        assert len(await write(router)) == 6

    play(scene, (10, 0), restart=restart)
    assert "engine 0 could not be started again: no such machine" in caplog.text


def test_no_engines_are_no_router():
    with pytest.raises(ValueError, match="at least one engine"):
        Router([], max_reissues=0, max_imbalance=0)
