"""The contract of the Engine role: requests aborted for new weights and issued again. Run on every implementation."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from transformers import PreTrainedModel

from tandem.roles import Engine, Pause
from tandem.types import EngineDied, Generation, Sampling, Sum
from tests.contracts.engine_kinds import KINDS, PROMPTS, SAMPLED, Kind, kind_of, pause_midway, play, text, write_all
from tests.rollout.tiny_models import ARCHITECTURES, full_logits, tiny_model

LONG = replace(SAMPLED, max_new_tokens=110)
GREEDY = replace(LONG, temperature=0.0)


@pytest.fixture(params=KINDS, ids=lambda kind: kind.name)
def kind(request: pytest.FixtureRequest) -> Kind:
    return kind_of(request)


def undisturbed(kind: Kind, model: PreTrainedModel, sampling: Sampling = LONG) -> list[Generation]:
    """What an engine with these weights writes, as version 0."""
    written: list[Generation] = []

    async def scene(engine: Engine):
        written.extend(await write_all(engine, PROMPTS, sampling))

    play(kind, scene, model)
    return written


def update(
    kind: Kind, old: PreTrainedModel, new: PreTrainedModel, pause: Pause, sampling: Sampling = LONG
) -> list[Generation]:
    """Requests begun with `old` as version 0, aborted, and ended with `new` as version 1."""
    written: list[Generation] = []

    async def scene(engine: Engine):
        tasks = await pause_midway(engine, PROMPTS, sampling, pause)
        await engine.load_weights(1, new.named_parameters())
        await engine.resume()
        written.extend(await asyncio.gather(*tasks))

    play(kind, scene, old)
    return written


def assert_law(kind: Kind, prompt: Sequence[int], written: Generation, models: dict[int, PreTrainedModel]) -> None:
    """Every token's log-prob is that of its version, had this version's weights read the whole text before it."""
    for version in set(written.versions):
        logits_TV = full_logits(models[version], [*prompt, *written.tokens])[len(prompt) - 1 : -1]
        logprob_T = logits_TV.log_softmax(-1).gather(-1, torch.tensor(written.tokens)[:, None]).squeeze(-1)
        mine_T = torch.tensor(written.versions) == version
        torch.testing.assert_close(
            torch.tensor(written.logprobs)[mine_T], logprob_T[mine_T], atol=kind.tolerance, rtol=0
        )


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_reissued_request_keeps_its_tokens_and_goes_on_under_the_new_weights_alone(kind: Kind, architecture: str):
    old, new = tiny_model(architecture, seed=1), tiny_model(architecture, seed=2)
    wanted = undisturbed(kind, tiny_model(architecture, seed=1))
    written = update(kind, tiny_model(architecture, seed=1), new, "reissue")
    for prompt, got, want in zip(PROMPTS, written, wanted, strict=True):
        before = got.versions.count(0)
        assert got.versions == (0,) * before + (1,) * (110 - before)
        assert 0 < before < 110
        assert kind.same(text(got, 0, before), text(want, 0, before))
        assert got.finish_reason == "length"
        assert_law(kind, prompt, got, {0: old, 1: new})


def test_what_follows_the_tokens_kept_is_what_a_fresh_engine_writes_after_the_text(kind: Kind):
    if not kind.exact:
        pytest.skip(f"{kind.name} draws from a stream of its own a request: after a text it begins another")
    new = tiny_model(seed=2)
    written = update(kind, tiny_model(seed=1), new, "reissue")

    async def fresh(engine: Engine):
        for i, (prompt, got) in enumerate(zip(PROMPTS, written, strict=True)):
            before = got.versions.count(0)
            law = replace(LONG, seed=LONG.seed + i, max_new_tokens=110 - before)
            assert text(got, before) == text(await engine.generate([*prompt, *got.tokens[:before]], law))

    play(kind, fresh, new)


def test_a_request_written_anew_is_that_of_an_engine_that_never_had_other_weights(kind: Kind):
    wanted = undisturbed(kind, tiny_model(seed=2))
    written = update(kind, tiny_model(seed=1), tiny_model(seed=2), "rewrite")
    assert all(got.versions == (1,) * 110 for got in written)
    assert kind.all_same([text(got) for got in written], [text(want) for want in wanted])


def test_a_reissued_request_does_not_draw_its_random_numbers_twice(kind: Kind):
    """Where every token is equally likely, a text shows the random numbers and nothing else."""

    def uniform(seed: int) -> PreTrainedModel:
        model = tiny_model(seed=seed)
        with torch.no_grad():
            model.get_output_embeddings().weight.zero_()
        return model

    wanted = undisturbed(kind, uniform(1))
    for got, want in zip(update(kind, uniform(1), uniform(2), "reissue"), wanted, strict=True):
        before = got.versions.count(0)
        assert got.tokens[before : before + 20] != want.tokens[:20]
        assert not kind.exact or got.tokens == want.tokens, "the law is the same, so its text is"


@pytest.mark.parametrize("pause", ["reissue", "rewrite"])
def test_aborting_without_an_update_changes_no_token(kind: Kind, pause: Pause):
    wanted = undisturbed(kind, tiny_model(), GREEDY)

    async def scene(engine: Engine):
        tasks = await pause_midway(engine, PROMPTS, GREEDY, pause)
        await engine.resume()
        for got, want in zip(await asyncio.gather(*tasks), wanted, strict=True):
            assert (got.tokens, got.versions, got.finish_reason) == (want.tokens, want.versions, want.finish_reason)
            assert got.logprobs == pytest.approx(want.logprobs, abs=kind.tolerance)

    play(kind, scene)


def test_a_reissued_request_ends_where_its_law_says(kind: Kind):
    """The stop tokens are one in 32: most requests meet one behind the cut, none reads over one."""
    law = replace(LONG, stop_token_ids=tuple(range(4)))
    reasons: list[str] = []

    async def scene(engine: Engine):
        for seed in range(4):
            sampling = replace(law, seed=100 * seed)
            requests = [engine.generate(p, replace(sampling, seed=sampling.seed + i)) for i, p in enumerate(PROMPTS)]
            tasks = [asyncio.create_task(request) for request in requests]
            await asyncio.sleep(0)
            for version in range(3 * seed + 1, 3 * seed + 4):
                await engine.fingerprint()
                await engine.fingerprint()
                await engine.pause("reissue")
                await engine.load_weights(version, tiny_model(seed=version).named_parameters())
                await engine.resume()
            for written in await asyncio.gather(*tasks):
                stops = [token in law.stop_token_ids for token in written.tokens]
                assert not any(stops[:-1])
                assert written.finish_reason == ("stop" if stops[-1] else "length")
                assert stops[-1] or len(written.tokens) == 110
                if len(set(written.versions)) > 1:
                    reasons.append(written.finish_reason)

    play(kind, scene)
    assert "stop" in reasons, "no request went on over a cut to its stop token"


def test_a_request_may_be_aborted_many_times(kind: Kind):
    models = {version: tiny_model(seed=version) for version in (0, 1, 2, 5)}

    async def scene(engine: Engine):
        tasks = await pause_midway(engine, PROMPTS, LONG, "reissue")
        for version in (1, 2, 5):
            await engine.load_weights(version, models[version].named_parameters())
            await engine.resume()
            await engine.fingerprint()
            await engine.fingerprint()
            await engine.pause("reissue")
        await engine.resume()
        for prompt, written in zip(PROMPTS, await asyncio.gather(*tasks), strict=True):
            assert list(written.versions) == sorted(written.versions)
            assert len(written.versions) == len(written.tokens) == 110
            assert len(set(written.versions)) > 1  # one engine may have ended before the other heard of version 5
            assert_law(kind, prompt, written, models)

    play(kind, scene)


@pytest.mark.parametrize("pause", ["reissue", "rewrite"])
def test_what_was_aborted_is_counted_once(kind: Kind, pause: Pause):
    async def scene(engine: Engine):
        tasks = await pause_midway(engine, PROMPTS, LONG)
        metrics = await engine.pause(pause)
        again = await engine.pause(pause)
        tokens = metrics.pop("weights/kept_tokens" if pause == "reissue" else "weights/discarded_tokens")
        assert metrics == {"weights/reissued_requests": Sum(len(PROMPTS))}
        assert all(count.value == 0 for count in again.values())
        assert await engine.pause() == {}, "none is begun"
        await engine.load_weights(1, tiny_model(seed=1).named_parameters())
        await engine.resume()
        written = await asyncio.gather(*tasks)
        assert tokens.value >= len(PROMPTS)
        if pause == "reissue":
            assert tokens == Sum(sum(w.versions.count(0) for w in written))

    play(kind, scene)


def test_aborted_requests_have_their_slots_before_those_that_wait(kind: Kind):
    async def scene(engine: Engine):
        aborted = await pause_midway(engine, PROMPTS[:2], LONG)
        late = [asyncio.create_task(engine.generate([i], replace(SAMPLED, max_new_tokens=1))) for i in range(4)]
        await asyncio.sleep(0)
        await engine.pause("reissue")
        await engine.resume()
        await asyncio.wait(late, return_when=asyncio.FIRST_COMPLETED)
        assert any(task.done() for task in aborted)
        assert [len(w.tokens) for w in await asyncio.gather(*aborted, *late)] == [110, 110, 1, 1, 1, 1]

    play(kind, scene, slots=2)


@pytest.mark.parametrize("pause", ["reissue", "rewrite"])
def test_aborted_requests_may_be_cancelled(kind: Kind, pause: Pause):
    wanted = undisturbed(kind, tiny_model(), GREEDY)

    async def scene(engine: Engine):
        tasks = await pause_midway(engine, PROMPTS, GREEDY, pause)
        for task in tasks[::2]:
            task.cancel()
        await engine.resume()
        assert [got.tokens for got in await asyncio.gather(*tasks[1::2])] == [want.tokens for want in wanted[1::2]]
        assert all(task.cancelled() for task in tasks[::2])

    play(kind, scene)


def test_a_group_that_is_aborted_reads_its_prompt_with_the_new_weights(kind: Kind):
    prompt, new = list(range(1, 40)), tiny_model(seed=1)
    wanted: list[Generation] = []

    async def fresh(engine: Engine):
        wanted.append(await engine.generate(prompt, replace(SAMPLED, seed=77)))

    async def scene(engine: Engine):
        tasks = await pause_midway(engine, [prompt] * 3, LONG, "reissue")
        waiting = asyncio.create_task(engine.generate(prompt, replace(SAMPLED, seed=77)))
        await asyncio.sleep(0)
        await engine.load_weights(1, new.named_parameters())
        await engine.resume()
        late = await waiting
        assert kind.same(text(late), text(wanted[0]))
        assert late.versions == (1,) * 12
        for written in await asyncio.gather(*tasks):
            assert_law(kind, prompt, written, {0: tiny_model(), 1: new})

    play(kind, fresh, tiny_model(seed=1))
    play(kind, scene)


@pytest.mark.parametrize("pause", ["reissue", "rewrite"])
def test_an_engine_sleeps_while_its_aborted_requests_wait(kind: Kind, pause: Pause):
    """With nothing begun there is no cache to keep, which is what tells them from requests that stand."""
    old, new = tiny_model(), tiny_model(seed=1)

    async def scene(engine: Engine):
        tasks = await pause_midway(engine, PROMPTS, LONG, pause)
        await engine.sleep(keep_weights=False)
        await engine.wake()
        await engine.load_weights(1, new.named_parameters())
        await engine.resume()
        models = {1: new} if pause == "rewrite" else {0: old, 1: new}
        for prompt, written in zip(PROMPTS, await asyncio.gather(*tasks), strict=True):
            assert len(written.tokens) == 110
            assert set(written.versions) == set(models)
            assert_law(kind, prompt, written, models)

    play(kind, scene)


def test_wrong_weights_leave_aborted_requests_unharmed(kind: Kind):
    wanted = undisturbed(kind, tiny_model(), GREEDY)

    async def scene(engine: Engine):
        tasks = await pause_midway(engine, PROMPTS, GREEDY, "reissue")
        with pytest.raises(ValueError, match="missing"):
            await engine.load_weights(1, list(tiny_model(seed=1).named_parameters())[:3])
        await engine.resume()
        assert [got.tokens for got in await asyncio.gather(*tasks)] == [want.tokens for want in wanted]

    play(kind, scene)


def test_close_fails_what_was_aborted(kind: Kind):
    async def scene(engine: Engine):
        tasks = await pause_midway(engine, PROMPTS[:2], LONG, "reissue")
        await engine.close()
        for task in tasks:
            with pytest.raises(EngineDied, match="closed"):
                await task

    play(kind, scene)
