"""A request's tokens and log-probs are the same bits in any company, order, slots and threads (float32, CPU)."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from tandem.rollout.transformers import transformers_engine
from tandem.types import Generation, Sampling
from tests.rollout.tiny_models import ARCHITECTURES, VOCABULARY, tiny_model

Request = tuple[list[int], Sampling]


def requests(seed: int, count: int) -> list[Request]:
    """Prompts of 1 to 150 tokens, every third one shared, and every kind of law."""
    dice = random.Random(seed)
    prompts = [
        [dice.randrange(VOCABULARY) for _ in range(dice.choice((1, 2, 15, 16, 17, 40, 80, 150)))] for _ in range(8)
    ]
    made: list[Request] = []
    for number in range(count):
        law = {"temperature": dice.choice((0.0, 0.7, 1.0)), "top_k": dice.choice((None, None, 9)), "top_p": 1.0}
        law["top_p"] = dice.choice((1.0, 1.0, 0.8))
        stops = tuple(dice.sample(range(VOCABULARY), 4))
        made.append((dice.choice(prompts), Sampling(dice.randint(1, 60), seed=number, stop_token_ids=stops, **law)))
    return made


def write(model: PreTrainedModel, batch: list[Request], slots: int, *, one_by_one: bool = False) -> list[Generation]:
    async def scene() -> list[Generation]:
        engine = transformers_engine(model, max_concurrent_samples=slots, max_total_sequence_length=256, pad_token_id=0)
        try:
            if one_by_one:
                return [await engine.generate(tokens, sampling) for tokens, sampling in batch]
            return await asyncio.gather(*[engine.generate(tokens, sampling) for tokens, sampling in batch])
        finally:
            await engine.close()

    return asyncio.run(scene())


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_random_company_changes_no_bit(architecture: str):
    model = tiny_model(architecture)
    batch = requests(seed=1, count=24)
    alone = write(model, batch, slots=1, one_by_one=True)
    for slots, seed in ((3, 0), (17, 1), (64, 2)):
        order = random.Random(seed).sample(range(len(batch)), len(batch))
        crowd = write(model, [batch[i] for i in order] + requests(seed=seed + 10, count=20), slots=slots)
        assert {i: crowd[place] for place, i in enumerate(order)} == dict(enumerate(alone))


@pytest.mark.parametrize("hidden", [64, 128])
def test_two_threads_change_no_bit(hidden: int):
    """Few and short requests: two threads are slow where other work has the cores."""
    model = quickstart_shaped() if hidden == 128 else tiny_model()
    batch = [(tokens, replace(law, max_new_tokens=5)) for tokens, law in requests(seed=2, count=20)]
    one = write(model, batch, slots=40)
    torch.set_num_threads(2)
    assert write(model, batch, slots=40) == one
    assert write(model, batch[:2], slots=1) == one[:2]


def test_the_shape_of_the_quickstart_is_invariant():
    """Other kernels of the maths library than those of tiny models."""
    batch = requests(seed=3, count=12)
    model = quickstart_shaped()
    assert write(model, batch, slots=48) == write(model, batch, slots=1)


def quickstart_shaped() -> PreTrainedModel:
    torch.manual_seed(0)
    shape = {"hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig(**shape, intermediate_size=384, vocab_size=384, initializer_range=0.1)
    return LlamaForCausalLM(config).eval()
