"""What the transformers engine promises beyond the contract: errors, slots, shared prompts, refused models."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import replace

import pytest
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from tandem.roles import Pause
from tandem.rollout.decoding import DecodeBatch
from tandem.rollout.rows import Row
from tandem.rollout.threaded import ThreadedEngine
from tandem.rollout.transformers import transformers_engine
from tandem.types import EngineDied, RolloutFailed, Sampling
from tests.rollout.tiny_models import full_logits, tiny_model

SAMPLED = Sampling(max_new_tokens=12, temperature=1.0, seed=7, stop_token_ids=())


def play(
    scene: Callable[[ThreadedEngine], Coroutine[None, None, None]], model: PreTrainedModel, slots: int = 8
) -> None:
    async def body() -> None:
        engine = transformers_engine(model, max_concurrent_samples=slots, max_total_sequence_length=160, pad_token_id=0)
        try:
            await asyncio.wait_for(scene(engine), timeout=60)
        finally:
            await engine.close()

    asyncio.run(body())


def count_tokens(model: PreTrainedModel) -> list[tuple[int, int]]:
    """Records the shape [rows, tokens] of every forward pass."""
    shapes: list[tuple[int, int]] = []
    model.get_input_embeddings().register_forward_pre_hook(lambda _, inputs: shapes.append(tuple(inputs[0].shape)))
    return shapes


def test_an_error_of_the_model_reaches_all_requests_and_every_later_call():
    model = tiny_model()
    shapes = count_tokens(model)

    def fail_at_step_20(*_: object) -> None:
        if len(shapes) == 20:
            raise MemoryError("no memory left")

    model.get_output_embeddings().register_forward_pre_hook(fail_at_step_20)

    async def scene(engine: ThreadedEngine):
        tasks = [asyncio.create_task(engine.generate([i], replace(SAMPLED, max_new_tokens=90))) for i in range(6)]
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            assert isinstance(result, EngineDied)
            assert isinstance(result.__cause__, MemoryError)
        for call in (engine.generate([1], SAMPLED), engine.pause(), engine.load_weights(1, []), engine.fingerprint()):
            with pytest.raises(EngineDied, match="no memory left") as caught:
                await call
            assert isinstance(caught.value.__cause__, MemoryError)

    play(scene, model, slots=2)


def test_non_finite_logits_fail_their_request_only():
    model, clean = tiny_model(), tiny_model()
    with torch.no_grad():
        model.get_input_embeddings().weight[13] = torch.nan

    async def scene(engine: ThreadedEngine):
        for poisoned in ([1, 13, 2], [13]):
            requests = [engine.generate(tokens, SAMPLED) for tokens in ([1, 2], poisoned, [3])]
            first, failed, last = await asyncio.gather(*requests, return_exceptions=True)
            assert isinstance(failed, RolloutFailed)
            assert "not finite" in str(failed)
            again = await asyncio.gather(*[engine.generate(tokens, SAMPLED) for tokens in ([1, 2], [3], [3, 1])])
            assert again[:2] == [first, last], "the slot that held NaN serves the next request"
            logits = full_logits(clean, [3, 1, *again[2].tokens])[1:-1].log_softmax(-1)
            wanted = logits.gather(-1, torch.tensor(again[2].tokens)[:, None]).squeeze(-1)
            torch.testing.assert_close(torch.tensor(again[2].logprobs), wanted, atol=1e-5, rtol=0)

    play(scene, model)


def test_the_prompt_of_a_group_is_prefilled_once():
    model = tiny_model()
    shapes = count_tokens(model)
    prompts = [list(range(1, 20)), list(range(30, 49)), list(range(5, 60))]

    async def scene(engine: ThreadedEngine):
        requests = [replace(SAMPLED, seed=seed) for seed in range(4)]
        await asyncio.gather(*[engine.generate(prompt, law) for prompt in prompts for law in requests])

    play(scene, model, slots=12)
    assert sorted(shape for shape in shapes if shape[1] > 1) == [(1, 64), (2, 32)]


def test_a_late_sample_copies_the_prompt_of_a_running_one():
    model = tiny_model()
    shapes = count_tokens(model)
    prompt = list(range(1, 40))

    async def scene(engine: ThreadedEngine):
        laws = [replace(SAMPLED, seed=seed, max_new_tokens=4 + 9 * seed) for seed in range(4)]
        together = await asyncio.gather(*[engine.generate(prompt, law) for law in laws])
        assert [shape for shape in shapes if shape[1] > 1] == [(1, 48)]
        assert together == [await engine.generate(prompt, law) for law in laws]

    play(scene, model, slots=2)


def test_the_batch_narrows_when_rows_finish():
    model = tiny_model()
    shapes = count_tokens(model)

    async def scene(engine: ThreadedEngine):
        laws = [replace(SAMPLED, max_new_tokens=100 if i in (3, 39) else 5) for i in range(40)]
        await asyncio.gather(*[engine.generate([i], law) for i, law in enumerate(laws)])

    play(scene, model, slots=48)
    assert shapes == [(48, 1)] * 5 + [(16, 1)] * 95


def test_progress_is_counted():
    async def scene(engine: ThreadedEngine):
        tasks = [asyncio.create_task(engine.generate([i], SAMPLED)) for i in range(5)]
        await asyncio.sleep(0)
        await engine.fingerprint()
        assert (engine.running, engine.waiting) == (2, 3)
        tasks[4].cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert (engine.running, engine.waiting, engine.tokens_written) == (0, 0, 48)

    play(scene, tiny_model(), slots=2)


def test_resume_ends_a_pause_that_still_waits():
    async def scene(engine: ThreadedEngine):
        running = asyncio.create_task(engine.generate([1], replace(SAMPLED, max_new_tokens=150)))
        await asyncio.sleep(0)
        await engine.fingerprint()
        pausing = asyncio.create_task(engine.pause())
        await asyncio.sleep(0)
        await engine.resume()
        with pytest.raises(RuntimeError, match="resume"):
            await pausing
        assert len((await running).tokens) == 150

    play(scene, tiny_model())


@pytest.mark.parametrize(("first_kind", "then"), [("stand", "drain"), ("drain", "stand"), ("drain", "reissue")])
def test_a_pause_of_another_kind_ends_one_that_still_waits(first_kind: Pause, then: Pause):
    async def scene(engine: ThreadedEngine):
        running = asyncio.create_task(engine.generate([1], replace(SAMPLED, max_new_tokens=150)))
        await asyncio.sleep(0)
        await engine.fingerprint()
        first = asyncio.create_task(engine.pause(first_kind))
        second = asyncio.create_task(engine.pause(then))
        await second
        assert running.done() == (then == "drain")
        if then == "drain":  # it may have stood for a moment
            await asyncio.gather(first, return_exceptions=True)
        else:
            with pytest.raises(RuntimeError, match=r"another kind of pause\(\) came before"):
                await first
        await engine.resume()
        assert len((await running).tokens) == 150

    play(scene, tiny_model())


def test_an_error_while_recomputing_reaches_resume_and_the_engine_stays_paused():
    model = tiny_model()
    shapes = count_tokens(model)

    def fail_at_second_prefill(*_: object) -> None:
        if [tokens > 1 for _, tokens in shapes].count(True) == 2:
            raise MemoryError("no memory left")

    model.get_output_embeddings().register_forward_pre_hook(fail_at_second_prefill)

    async def scene(engine: ThreadedEngine):
        running = asyncio.create_task(engine.generate([1, 2, 3], replace(SAMPLED, max_new_tokens=100)))
        await asyncio.sleep(0)
        await engine.fingerprint()
        await engine.pause("stand")
        with pytest.raises(MemoryError, match="no memory left"):
            await engine.resume(recompute_kv=True)
        written = engine.tokens_written
        await engine.fingerprint()
        assert (engine.running, engine.tokens_written) == (1, written)
        shapes.clear()
        await engine.resume(recompute_kv=True)
        assert len((await running).tokens) == 100

    play(scene, model)


def test_a_closed_event_loop_does_not_stop_the_engine():
    model = tiny_model()
    engine = transformers_engine(model, max_concurrent_samples=2, max_total_sequence_length=160, pad_token_id=0)

    async def leave() -> None:
        task = asyncio.create_task(engine.generate([1], replace(SAMPLED, max_new_tokens=100)))
        await asyncio.sleep(0)
        await engine.fingerprint()
        task.cancel()

    async def come_back() -> None:
        assert len((await engine.generate([1], SAMPLED)).tokens) == 12
        await engine.close()

    asyncio.run(leave())
    asyncio.run(come_back())


def test_bfloat16_writes_within_its_precision():
    model = tiny_model()
    with torch.no_grad():
        wanted = full_logits(model, [1, 2, 3])[-1].log_softmax(-1)

    async def scene(engine: ThreadedEngine):
        written = await engine.generate([1, 2, 3], SAMPLED)
        assert written.logprobs[0] == pytest.approx(float(wanted[written.tokens[0]]), abs=0.2)

    play(scene, tiny_model().bfloat16())


def test_a_model_in_training_mode_is_refused():
    with pytest.raises(ValueError, match=r"model\.eval\(\)"):
        start(tiny_model().train())


def test_attention_over_a_window_is_refused_unless_the_window_holds_everything():
    shape = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2}
    shape |= {"intermediate_size": 32, "vocab_size": 64}
    sliding = Qwen2ForCausalLM(Qwen2Config(**shape, use_sliding_window=True, sliding_window=64, max_window_layers=1))
    mistral = MistralForCausalLM(MistralConfig(**shape, sliding_window=64))
    for model in (sliding.eval(), mistral.eval()):
        with pytest.raises(ValueError, match="window of 64 < max_total_sequence_length 160"):
            start(model)
    wide = MistralForCausalLM(MistralConfig(**shape, sliding_window=4096)).eval()
    asyncio.run(start(wide).close())


def test_unknown_attention_is_refused():
    model = LlamaForCausalLM(LlamaConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, vocab_size=64))
    model.set_attn_implementation("flex_attention")
    with pytest.raises(ValueError, match=r"'flex_attention'.*attn_implementation='sdpa'"):
        start(model.eval())


def start(model: PreTrainedModel) -> ThreadedEngine:
    return transformers_engine(model, max_concurrent_samples=2, max_total_sequence_length=160, pad_token_id=0)


def test_the_cache_grows_and_keeps_what_runs():
    model = tiny_model()
    batch = DecodeBatch(model, max_rows=40, max_length=300, pad_token_id=0)
    first = Row((4, 8), replace(SAMPLED, max_new_tokens=200))
    batch.admit([first])
    for _ in range(3):
        batch.step()
    batch.admit([Row((i,) * 70, replace(SAMPLED, max_new_tokens=100)) for i in range(30)])
    while len(batch):
        batch.step()
    alone = DecodeBatch(model, max_rows=1, max_length=300, pad_token_id=0)
    row = Row(first.prompt, first.sampling)
    alone.admit([row])
    while len(alone):
        alone.step()
    assert (row.tokens, row.logprobs) == (first.tokens, first.logprobs)


def test_short_rows_outlive_one_that_filled_the_cache():
    batch = DecodeBatch(tiny_model(), max_rows=4, max_length=64, pad_token_id=0)
    full = Row(tuple(range(60)), replace(SAMPLED, max_new_tokens=4))
    others = [Row((i,), replace(SAMPLED, max_new_tokens=50)) for i in range(3)]
    batch.admit([full, *others])
    while len(batch):
        batch.step()
    assert [len(row.tokens) for row in (full, *others)] == [4, 50, 50, 50]
