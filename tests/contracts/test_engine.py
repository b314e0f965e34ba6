"""The contract of the Engine role: what is written. Run on every implementation."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
import torch

from tandem.roles import Engine
from tandem.types import RolloutFailed
from tests.contracts.engine_kinds import (
    GREEDY,
    KINDS,
    MAX_LENGTH,
    PROMPTS,
    SAMPLED,
    Kind,
    kind_of,
    play,
    spell,
    text,
    write_all,
)
from tests.rollout.tiny_models import ARCHITECTURES, VOCABULARY, full_logits, greedy_loop, tiny_model


@pytest.fixture(params=KINDS, ids=lambda kind: kind.name)
def kind(request: pytest.FixtureRequest) -> Kind:
    return kind_of(request)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_greedy_tokens_are_those_of_an_argmax_loop(kind: Kind, architecture: str):
    model = tiny_model(architecture)

    async def scene(engine: Engine):
        for prompt, written in zip(PROMPTS, await write_all(engine, PROMPTS, GREEDY), strict=True):
            assert list(written.tokens) == greedy_loop(model, prompt, 12)

    play(kind, scene, model)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0, 1.3])
def test_logprobs_are_those_of_a_full_forward_pass(kind: Kind, architecture: str, temperature: float):
    model = tiny_model(architecture, tied=architecture == "qwen2")
    sampling = replace(SAMPLED, temperature=temperature, max_new_tokens=70)

    async def scene(engine: Engine):
        for prompt, written in zip(PROMPTS, await write_all(engine, PROMPTS, sampling), strict=True):
            logits = full_logits(model, [*prompt, *written.tokens])[len(prompt) - 1 : -1]
            wanted = (logits / (temperature or 1.0)).log_softmax(-1)
            wanted = wanted.gather(-1, torch.tensor(written.tokens)[:, None]).squeeze(-1)
            torch.testing.assert_close(torch.tensor(written.logprobs), wanted, atol=kind.tolerance, rtol=0)

    play(kind, scene, model)


@pytest.mark.parametrize(("top_k", "top_p"), [(1, 1.0), (5, 1.0), (None, 0.6), (20, 0.8), (VOCABULARY, 1.0)])
def test_filtered_tokens_are_never_written_and_logprobs_are_renormalised(kind: Kind, top_k: int | None, top_p: float):
    model = tiny_model()
    sampling = replace(SAMPLED, temperature=1.3, top_k=top_k, top_p=top_p, max_new_tokens=30)

    async def scene(engine: Engine):
        for prompt, written in zip(PROMPTS, await write_all(engine, PROMPTS, sampling), strict=True):
            logits = full_logits(model, [*prompt, *written.tokens])[len(prompt) - 1 : -1] / 1.3
            for token, logprob, row in zip(written.tokens, written.logprobs, logits, strict=True):
                kept = slow_filter(row, top_k or VOCABULARY, top_p)
                assert token in kept
                assert logprob == pytest.approx(float(row[token] - row[kept].logsumexp(0)), abs=kind.tolerance)

    play(kind, scene, model)


def slow_filter(logits: torch.Tensor, top_k: int, top_p: float) -> list[int]:
    """The ids that top-k, then top-p, keep."""
    kept = logits.argsort(descending=True).tolist()[:top_k]
    probs = logits[kept].double().softmax(0).tolist()
    mass, nucleus = 0.0, []
    for token, prob in zip(kept, probs, strict=True):
        nucleus.append(token)
        mass += prob
        if mass >= top_p:
            break
    return kept if top_p == 1 else nucleus


def test_greedy_rows_ignore_filters_and_seeds(kind: Kind):
    async def scene(engine: Engine):
        plain = await engine.generate(PROMPTS[0], GREEDY)
        assert kind.same(await engine.generate(PROMPTS[0], replace(GREEDY, top_k=2, top_p=0.3, seed=99)), plain)

    play(kind, scene)


def test_equal_seeds_write_equal_samples_and_others_differ(kind: Kind):
    async def scene(engine: Engine):
        first, again, other = await asyncio.gather(
            *[engine.generate(PROMPTS[0], replace(SAMPLED, seed=seed)) for seed in (3, 3, 4)]
        )
        assert kind.same(first, again)
        assert first.tokens != other.tokens

    play(kind, scene)


def test_seeds_may_be_any_whole_number(kind: Kind):
    async def scene(engine: Engine):
        written = [await engine.generate(PROMPTS[0], replace(SAMPLED, seed=s)) for s in (-1, 0, 2**63, 2**64 - 1)]
        assert kind.same(written[0], written[3]), "seeds are taken modulo 2**64"
        assert len({w.tokens for w in written}) == 3

    play(kind, scene)


def test_the_frequency_of_first_tokens_is_their_probability(kind: Kind):
    model = tiny_model()
    sampling = replace(SAMPLED, max_new_tokens=1, temperature=0.5)

    async def scene(engine: Engine):
        written = await write_all(engine, [PROMPTS[0]] * 1500, sampling)
        probs = (full_logits(model, PROMPTS[0])[-1] / 0.5).softmax(-1)
        counts = torch.bincount(torch.tensor([w.tokens[0] for w in written]), minlength=VOCABULARY)
        likely = probs > 0.02
        spread = (1500 * probs * (1 - probs)).sqrt()
        assert ((counts - 1500 * probs).abs() < 4 * spread)[likely].all()

    play(kind, scene, model, slots=64)


def test_a_result_does_not_depend_on_the_company(kind: Kind):
    async def scene(engine: Engine):
        alone = [await engine.generate(p, replace(SAMPLED, seed=7 + i)) for i, p in enumerate(PROMPTS)]
        assert kind.all_same(await write_all(engine, PROMPTS, SAMPLED), alone)
        crowd = asyncio.gather(*[engine.generate([i], replace(SAMPLED, max_new_tokens=3 + i)) for i in range(30)])
        assert kind.all_same(await write_all(engine, PROMPTS, SAMPLED), alone)
        await crowd

    play(kind, scene)


def test_a_stop_token_ends_the_text_and_is_part_of_it(kind: Kind):
    async def scene(engine: Engine):
        whole = await engine.generate(PROMPTS[0], SAMPLED)
        stop = whole.tokens[4]
        cut = whole.tokens.index(stop) + 1
        stopped = await engine.generate(PROMPTS[0], replace(SAMPLED, stop_token_ids=(VOCABULARY + 5, stop)))
        assert kind.same(text(stopped), text(whole, 0, cut))
        assert (whole.finish_reason, stopped.finish_reason) == ("length", "stop")

    play(kind, scene)


def test_a_stop_token_in_last_place_counts_as_stop(kind: Kind):
    async def scene(engine: Engine):
        whole = await engine.generate(PROMPTS[2], replace(SAMPLED, max_new_tokens=1))
        stopped = await engine.generate(PROMPTS[2], replace(SAMPLED, max_new_tokens=1, stop_token_ids=whole.tokens))
        assert (len(whole.tokens), whole.finish_reason, stopped.finish_reason) == (1, "length", "stop")

    play(kind, scene)


def test_a_stop_string_ends_the_text_with_the_token_that_completes_it(kind: Kind):
    async def scene(engine: Engine):
        whole = await engine.generate(PROMPTS[0], SAMPLED)
        stop = spell(whole.tokens[3:5])[1:-1]  # begins and ends within a token
        end = next(n for n in range(1, 13) if stop in spell(whole.tokens[:n]))
        stopped = await engine.generate(PROMPTS[0], replace(SAMPLED, stop_strings=("no such", stop)))
        assert kind.same(text(stopped), text(whole, 0, end))
        assert (stopped.finish_reason, len(stopped.versions)) == ("stop", end)
        never = await engine.generate(PROMPTS[0], replace(SAMPLED, stop_strings=("<-1>",)))
        assert kind.same(never, whole)

    play(kind, scene)


def test_stop_strings_end_rows_that_are_written_together(kind: Kind):
    async def scene(engine: Engine):
        whole = await write_all(engine, PROMPTS, SAMPLED)
        last = spell(whole[0].tokens[-1:])
        stopped = await write_all(engine, PROMPTS, replace(SAMPLED, stop_strings=(last,)))
        for cut, full in zip(stopped, whole, strict=True):
            ends = [n for n in range(1, 13) if last in spell(full.tokens[:n])]
            assert kind.same(text(cut), text(full, 0, ends[0] if ends else None))
            assert cut.finish_reason == ("stop" if ends else "length"), "in last place it counts as stop"

    play(kind, scene)


def test_more_requests_than_slots_are_all_served(kind: Kind):
    async def scene(engine: Engine):
        lengths = [1 + (7 * i) % 23 for i in range(40)]
        written = await asyncio.gather(
            *[engine.generate([i], replace(SAMPLED, max_new_tokens=n)) for i, n in enumerate(lengths)]
        )
        assert [len(w.tokens) for w in written] == lengths

    play(kind, scene, slots=3)


def test_a_request_may_fill_the_whole_length(kind: Kind):
    model = tiny_model()

    async def scene(engine: Engine):
        written = await engine.generate(PROMPTS[0], replace(GREEDY, max_new_tokens=MAX_LENGTH - 3))
        assert list(written.tokens[:20]) == greedy_loop(model, PROMPTS[0], 20)
        assert len(written.tokens) == MAX_LENGTH - 3

    play(kind, scene, model)


def test_an_over_long_request_fails_with_its_numbers_and_alone(kind: Kind):
    async def scene(engine: Engine):
        neighbour = asyncio.create_task(engine.generate(PROMPTS[0], SAMPLED))
        with pytest.raises(RolloutFailed, match=r"150 tokens.*12.*162.*160"):
            await engine.generate([1] * 150, SAMPLED)
        assert len((await neighbour).tokens) == 12

    play(kind, scene)


@pytest.mark.parametrize(
    ("tokens", "wrong", "message"),
    [
        ([], {}, "prompt is empty"),
        ([1, VOCABULARY], {}, f"from 1 to {VOCABULARY}.*vocabulary is {VOCABULARY}"),
        ([-1], {}, "from -1"),
        ([1], {"max_new_tokens": 0}, "max_new_tokens"),
        ([1], {"temperature": -0.5}, "temperature"),
        ([1], {"temperature": float("nan")}, "temperature"),
        ([1], {"top_k": 0}, "top_k"),
        ([1], {"top_p": 0.0}, "top_p"),
        ([1], {"top_p": 1.5}, "top_p"),
    ],
)
def test_a_senseless_request_is_refused_and_harms_nobody(kind: Kind, tokens: list[int], wrong: dict, message: str):
    async def scene(engine: Engine):
        with pytest.raises(ValueError, match=message):
            await engine.generate(tokens, replace(SAMPLED, **wrong))
        assert len((await engine.generate([1], SAMPLED)).tokens) == 12

    play(kind, scene)
