"""The contract of the Engine role: weights that change under running requests. Run on every implementation."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from transformers import DynamicCache, PreTrainedModel

from tandem.roles import Engine
from tandem.types import Generation
from tests.contracts.engine_kinds import KINDS, PROMPTS, SAMPLED, Kind, kind_of, pause_midway, play, text, write_all
from tests.rollout.tiny_models import ARCHITECTURES, tiny_model

LONG = replace(SAMPLED, max_new_tokens=110)


@pytest.fixture(params=KINDS, ids=lambda kind: kind.name)
def kind(request: pytest.FixtureRequest) -> Kind:
    return kind_of(request)


def undisturbed(kind: Kind, prompts: Sequence[Sequence[int]] = PROMPTS) -> list[Generation]:
    """What an engine with the default weights writes."""
    written: list[Generation] = []

    async def scene(engine: Engine):
        written.extend(await write_all(engine, prompts, LONG))

    play(kind, scene)
    return written


async def load(engine: Engine, version: int, model: PreTrainedModel, *, recompute_kv: bool) -> None:
    await engine.load_weights(version, model.named_parameters())
    await engine.resume(recompute_kv=recompute_kv)


def update_in_flight(kind: Kind, old: PreTrainedModel, new: PreTrainedModel, *, recompute_kv: bool) -> list[Generation]:
    """LONG requests, each begun with `old` as version 0 and ended with `new` as version 1."""
    written: list[Generation] = []

    async def scene(engine: Engine):
        tasks = await pause_midway(engine, PROMPTS, LONG)
        await load(engine, 1, new, recompute_kv=recompute_kv)
        written.extend(await asyncio.gather(*tasks))

    play(kind, scene, old)
    assert all(w.versions[0] == 0 and w.versions[-1] == 1 for w in written)
    return written


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_tokens_before_an_update_are_those_of_an_undisturbed_engine(kind: Kind, architecture: str):
    new = tiny_model(architecture, seed=2)
    wanted: list[Generation] = []

    async def alone(engine: Engine):
        wanted.extend(await write_all(engine, PROMPTS, LONG))

    play(kind, alone, tiny_model(architecture, seed=1))
    for recompute_kv in (True, False):
        old = tiny_model(architecture, seed=1)
        for got, want in zip(update_in_flight(kind, old, new, recompute_kv=recompute_kv), wanted, strict=True):
            before = got.versions.count(0)
            assert got.versions == (0,) * before + (1,) * (110 - before)
            assert kind.same(text(got, 0, before), text(want, 0, before))
            assert got.tokens != want.tokens


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_on_a_recomputed_cache_logprobs_are_those_of_the_new_weights_alone(kind: Kind, architecture: str):
    new = tiny_model(architecture, seed=2)
    old = tiny_model(architecture, seed=1)
    for prompt, got in zip(PROMPTS, update_in_flight(kind, old, new, recompute_kv=True), strict=True):
        seen = len(prompt) + got.versions.count(0)
        wanted = logprobs_on_old_cache(new, new, [*prompt, *got.tokens], seen - 1)
        got_after = torch.tensor(got.logprobs[got.versions.count(0) :])
        torch.testing.assert_close(got_after, wanted, atol=kind.tolerance, rtol=0)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_on_a_recomputed_cache_tokens_are_those_of_a_fresh_engine_given_the_text(kind: Kind, architecture: str):
    if not kind.exact:
        pytest.skip(f"{kind.name} draws from a stream of its own a request: after a text it begins anew")
    new = tiny_model(architecture, seed=2)
    written = update_in_flight(kind, tiny_model(architecture, seed=1), new, recompute_kv=True)

    async def fresh(engine: Engine):
        for i, (prompt, got) in enumerate(zip(PROMPTS, written, strict=True)):
            before = got.versions.count(0)
            law = replace(LONG, seed=LONG.seed + i, max_new_tokens=110 - before)
            want = await engine.generate([*prompt, *got.tokens[:before]], law)
            assert kind.same(text(got, before), text(want))

    play(kind, fresh, new)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_without_recomputing_the_old_cache_is_read_on(kind: Kind, architecture: str):
    old, new = tiny_model(architecture, seed=1), tiny_model(architecture, seed=2)
    written = update_in_flight(kind, tiny_model(architecture, seed=1), new, recompute_kv=False)
    for prompt, got in zip(PROMPTS, written, strict=True):
        before = got.versions.count(0)
        wanted = logprobs_on_old_cache(old, new, [*prompt, *got.tokens], len(prompt) + before - 1)
        torch.testing.assert_close(torch.tensor(got.logprobs[before:]), wanted, atol=kind.tolerance, rtol=0)
        anew = logprobs_on_old_cache(new, new, [*prompt, *got.tokens], len(prompt) + before - 1)
        assert (anew - wanted).abs().max() > 0.01, "the two caches differ, so the test can tell them apart"


@torch.no_grad()
def logprobs_on_old_cache(old: PreTrainedModel, new: PreTrainedModel, text: list[int], seen: int) -> torch.Tensor:
    """The slow definition: `new` reads on in the cache of `old`, which has read the first `seen` tokens."""
    cache = DynamicCache()
    if seen:
        old(torch.tensor([text[:seen]]), None, None, cache, use_cache=True)
    steps = [
        new(torch.tensor([[token]]), None, torch.tensor([[seen + i]]), cache, use_cache=True).logits[0, -1]
        for i, token in enumerate(text[seen:-1])
    ]
    return torch.stack(steps).log_softmax(-1).gather(-1, torch.tensor(text[seen + 1 :])[:, None]).squeeze(-1)


@pytest.mark.parametrize("recompute_kv", [False, True])
def test_a_late_sample_reads_its_prompt_with_the_new_weights(kind: Kind, recompute_kv: bool):
    prompt = list(range(1, 40))
    new = tiny_model(seed=1)
    wanted: list[Generation] = []

    async def fresh(engine: Engine):
        wanted.append(await engine.generate(prompt, replace(SAMPLED, seed=77)))

    async def scene(engine: Engine):
        tasks = await pause_midway(engine, [prompt] * 3, LONG)
        waiting = asyncio.create_task(engine.generate(prompt, replace(SAMPLED, seed=77)))
        await asyncio.sleep(0)
        await load(engine, 1, new, recompute_kv=recompute_kv)
        later = asyncio.create_task(engine.generate(prompt, replace(SAMPLED, seed=77)))
        for late in (await waiting, await later):
            assert kind.same(text(late), text(wanted[0]))
            assert late.versions == (1,) * 12
        await asyncio.gather(*tasks)

    play(kind, fresh, tiny_model(seed=1))
    play(kind, scene)


def test_a_pause_without_an_update_changes_no_bit(kind: Kind):
    wanted = undisturbed(kind)

    async def scene(engine: Engine):
        tasks = await pause_midway(engine, PROMPTS, LONG)
        for _ in range(3):
            await engine.fingerprint()
            await engine.pause("stand")  # again: no harm
        assert not any(task.done() for task in tasks)
        await engine.resume()
        assert kind.all_same(await asyncio.gather(*tasks), wanted)

    play(kind, scene)


def test_new_requests_wait_while_others_stand(kind: Kind):
    async def scene(engine: Engine):
        standing = await pause_midway(engine, PROMPTS[:2], LONG)
        late = [asyncio.create_task(engine.generate([i], SAMPLED)) for i in range(4)]
        await asyncio.sleep(0)
        for _ in range(3):
            await engine.fingerprint()
        assert not any(task.done() for task in [*standing, *late])
        await engine.resume()
        assert [len(w.tokens) for w in await asyncio.gather(*late)] == [12] * 4
        await asyncio.gather(*standing)

    play(kind, scene)


@pytest.mark.parametrize("recompute_kv", [False, True])
def test_requests_may_be_cancelled_while_they_stand(kind: Kind, recompute_kv: bool):
    wanted: list[Generation] = []

    async def fresh(engine: Engine):
        wanted.append(await engine.generate([3], SAMPLED))

    async def scene(engine: Engine):
        tasks = await pause_midway(engine, PROMPTS[:3], LONG)
        waiting = [asyncio.create_task(engine.generate([i], SAMPLED)) for i in range(2, 4)]
        await asyncio.sleep(0)
        for task in (tasks[0], tasks[2], waiting[0]):
            task.cancel()
        await load(engine, 1, tiny_model(seed=1), recompute_kv=recompute_kv)
        late = await waiting[1]
        assert kind.same(text(late), text(wanted[0]))
        assert len((await tasks[1]).tokens) == 110
        assert all(task.cancelled() for task in (tasks[0], tasks[2], waiting[0]))

    play(kind, fresh, tiny_model(seed=1))
    play(kind, scene, slots=3)


def test_wrong_weights_leave_what_stands_unharmed(kind: Kind):
    wanted = undisturbed(kind)

    async def scene(engine: Engine):
        tasks = await pause_midway(engine, PROMPTS, LONG)
        with pytest.raises(ValueError, match="missing"):
            await engine.load_weights(1, list(tiny_model(seed=1).named_parameters())[:3])
        await engine.resume()
        assert kind.all_same(await asyncio.gather(*tasks), wanted)

    play(kind, scene)


def test_a_generation_may_span_many_versions(kind: Kind):
    async def scene(engine: Engine):
        tasks = await pause_midway(engine, PROMPTS, LONG)
        for version in (1, 2, 5):
            await load(engine, version, tiny_model(seed=version), recompute_kv=version == 2)
            await engine.fingerprint()
            await engine.fingerprint()
            await engine.pause("stand")
        await engine.resume()
        for written in await asyncio.gather(*tasks):
            assert list(written.versions) == sorted(written.versions)
            assert set(written.versions) == {0, 1, 2, 5}
            assert len(written.versions) == len(written.tokens) == 110

    play(kind, scene)


def test_weights_may_follow_a_drain_that_follows_a_stand(kind: Kind):
    wanted = undisturbed(kind)

    async def scene(engine: Engine):
        tasks = await pause_midway(engine, PROMPTS, LONG)
        await engine.pause()
        assert kind.all_same([task.result() for task in tasks if task.done()], wanted)
        await load(engine, 1, tiny_model(seed=1), recompute_kv=True)
        assert (await engine.generate([1], SAMPLED)).versions == (1,) * 12

    play(kind, scene)


def test_close_fails_what_stands(kind: Kind):
    async def scene(engine: Engine):
        tasks = await pause_midway(engine, PROMPTS[:2], LONG)
        await engine.close()
        for task in tasks:
            with pytest.raises(RuntimeError, match="closed"):
                await task

    play(kind, scene)
