"""The forward pass in fewer operations: equal to the model's modules, on the model's own parameters."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
import torch
from torch.nn.functional import linear
from transformers import (
    GraniteConfig,
    GraniteForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from tandem import onednn
from tandem.fingerprint import fingerprint
from tandem.rollout.attention import install_attention
from tandem.rollout.forward import Forward, ModuleForward, forward_of
from tandem.rollout.fused import FusedForward, Product, is_fusible
from tandem.rollout.kv_cache import DecodeView, PrefillView, SlotCache
from tandem.rollout.transformers import decode_batch, transformers_engine
from tandem.types import Generation, Sampling
from tests.rollout.tiny_models import VOCABULARY, full_logits

ROWS, PROMPT = 16, 16
SHAPE = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "vocab_size": VOCABULARY,
    "initializer_range": 0.15,
    "max_position_embeddings": 256,
}
LLAMA_3 = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32}
FUSIBLE: dict[str, Callable[[], PreTrainedModel]] = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SHAPE)),
    "llama, biased, tied": lambda: LlamaForCausalLM(
        LlamaConfig(**SHAPE, attention_bias=True, mlp_bias=True, tie_word_embeddings=True)
    ),
    "llama 3": lambda: LlamaForCausalLM(
        LlamaConfig(**SHAPE, rope_parameters={**LLAMA_3, "original_max_position_embeddings": 32})
    ),
    "yarn": lambda: LlamaForCausalLM(LlamaConfig(**SHAPE, rope_parameters=YARN)),
    "mistral": lambda: MistralForCausalLM(MistralConfig(**SHAPE, sliding_window=None)),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**SHAPE)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SHAPE, head_dim=32)),
}
OTHERS: dict[str, Callable[[], PreTrainedModel]] = {
    # The names of Llama's modules, and factors between them.
    "granite": lambda: GraniteForCausalLM(GraniteConfig(**SHAPE, residual_multiplier=0.5, embedding_multiplier=3.0)),
    "another activation": lambda: LlamaForCausalLM(LlamaConfig(**SHAPE, hidden_act="gelu")),
    "angles that follow the length": lambda: LlamaForCausalLM(LlamaConfig(**SHAPE, rope_parameters=DYNAMIC)),
    "bfloat16": lambda: LlamaForCausalLM(LlamaConfig(**SHAPE)).bfloat16(),
}
PRODUCTS = [
    linear,
    pytest.param(onednn.linear, marks=pytest.mark.skipif(not onednn.is_amd_with_avx512(), reason="not used here")),
]


def made(build: Callable[[], PreTrainedModel], seed: int = 0) -> PreTrainedModel:
    """Every parameter random, those that begin as zeros and ones too."""
    torch.manual_seed(seed)
    model = build().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn(parameter.shape)
    install_attention(model)
    return model


@torch.inference_mode()
def play(forward: Forward, layers: int) -> list[torch.Tensor]:
    """Logits of a prefill, and of three steps behind prompts of various lengths."""
    dice = torch.Generator().manual_seed(1)
    cache = SlotCache(layers, ROWS, 64)
    cache.reserve(ROWS, 48)
    tokens = torch.randint(VOCABULARY, (ROWS, PROMPT), generator=dice)
    causal = torch.full((PROMPT, PROMPT), -torch.inf).triu(1)[None, None]
    positions = torch.arange(PROMPT).expand(ROWS, -1)
    logits = [forward(tokens, positions, causal, PrefillView(cache, torch.arange(ROWS)))]
    lengths = torch.randint(1, PROMPT, (ROWS,), generator=dice)
    for step in range(3):
        at = lengths + step
        mask = torch.where(torch.arange(48) <= at[:, None], 0.0, -torch.inf)[:, None, None]
        view = DecodeView(cache, torch.arange(ROWS), at, 48)
        logits.append(forward(tokens[:, step : step + 1], at[:, None], mask, view))
    return logits


@pytest.mark.parametrize("product", PRODUCTS)
@pytest.mark.parametrize("name", FUSIBLE)
def test_it_is_the_model(name: str, product: Product):
    model = made(FUSIBLE[name])
    wanted = play(ModuleForward(model), model.config.num_hidden_layers)
    got = play(FusedForward(model, 64, product), model.config.num_hidden_layers)
    assert wanted[0].std() > 0.1
    torch.testing.assert_close(got, wanted, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("name", FUSIBLE)
def test_the_familys_models_are_fused(name: str):
    assert isinstance(forward_of(made(FUSIBLE[name]), 64), FusedForward)


@pytest.mark.parametrize("name", OTHERS)
def test_other_models_run_as_they_are(name: str):
    assert isinstance(forward_of(made(OTHERS[name]), 64), ModuleForward)


def test_a_subclass_is_not_fused():
    class Other(LlamaForCausalLM):
        """Whose forward pass may be any."""

    assert not is_fusible(made(lambda: Other(LlamaConfig(**SHAPE))))


@pytest.mark.parametrize("name", ["qwen2", "qwen3", "llama, biased, tied", "granite"])
def test_weights_are_loaded_in_place(name: str):
    build = (FUSIBLE | OTHERS)[name]
    model, other = made(build), made(build, seed=1)
    before = fingerprint(model.named_parameters())
    law = Sampling(max_new_tokens=12, temperature=1.0, seed=7, stop_token_ids=())

    async def scene() -> tuple[Generation, Generation]:
        engine = transformers_engine(model, max_concurrent_samples=2, max_total_sequence_length=64, pad_token_id=0)
        try:
            assert await engine.fingerprint() == before
            first = await engine.generate([1, 2, 3], law)
            await engine.pause()
            await engine.load_weights(1, [(name, parameter.detach()) for name, parameter in other.named_parameters()])
            assert await engine.fingerprint() == fingerprint(other.named_parameters()) != before
            await engine.resume()
            return first, await engine.generate([1, 2, 3], law)
        finally:
            await engine.close()

    for generation, definition in zip(asyncio.run(scene()), (made(build), other), strict=True):
        logprobs = full_logits(definition, [1, 2, 3, *generation.tokens])[2:-1].log_softmax(-1)
        wanted = logprobs.gather(-1, torch.tensor(generation.tokens)[:, None]).squeeze(-1)
        torch.testing.assert_close(torch.tensor(generation.logprobs), wanted, atol=1e-4, rtol=0)


def test_no_weight_is_held_twice():
    model = made(FUSIBLE["qwen2"])
    forward_of(model, 64)
    for layer in model.model.layers:
        attention = layer.self_attn
        for fused in ((attention.q_proj, attention.k_proj, attention.v_proj), (layer.mlp.gate_proj, layer.mlp.up_proj)):
            (storage,) = {part.weight.untyped_storage().data_ptr() for part in fused}
            assert fused[0].weight.data_ptr() == storage
            assert fused[0].weight.untyped_storage().nbytes() == sum(part.weight.nbytes for part in fused)


def test_hooks_and_parameters_of_linear_layers_stay():
    model = made(FUSIBLE["llama, biased, tied"])
    names = [name for name, _ in model.named_parameters()]
    calls: list[int] = []
    model.lm_head.register_forward_pre_hook(lambda *_: calls.append(1))
    onednn.use(model)
    full_logits(model, [1, 2, 3])
    assert (calls, names) == ([1], [name for name, _ in model.named_parameters()])
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert isinstance(model.lm_head.forward, onednn.Linear)


@pytest.mark.parametrize("name", ["llama", "granite", "bfloat16"])
def test_a_decoders_linear_layers_multiply_in_the_faster_way(name: str):
    model = made((FUSIBLE | OTHERS)[name])
    decode_batch(model, max_concurrent_samples=2, max_total_sequence_length=64, pad_token_id=0)
    wanted = onednn.is_amd_with_avx512() and name != "bfloat16"
    assert isinstance(model.lm_head.forward, onednn.Linear) == wanted


@pytest.mark.parametrize("product", PRODUCTS)
@pytest.mark.parametrize(("inputs", "outputs"), [(64, 211), (128, 256), (384, 128), (896, 1152), (4864, 896)])
def test_rows_and_threads_change_no_bit_of_a_product(inputs: int, outputs: int, product: Product):
    dice = torch.Generator().manual_seed(0)
    values, weight = torch.randn(256, inputs, generator=dice), torch.randn(outputs, inputs, generator=dice)
    bias = torch.randn(outputs, generator=dice)
    with torch.inference_mode():
        wanted = product(values, weight, bias)
        torch.testing.assert_close(wanted, (values.double() @ weight.double().T + bias).float(), atol=1e-2, rtol=1e-5)
        for threads in (1, 2):
            torch.set_num_threads(threads)
            for rows in (16, 48, 64, 112, 256):
                assert torch.equal(product(values[:rows], weight, bias), wanted[:rows])
                assert torch.equal(product(values[-rows:], weight, bias), wanted[-rows:])
