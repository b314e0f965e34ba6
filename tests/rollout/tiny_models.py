"""Random causal LMs that take milliseconds: the architectures that engines are tested on, and their slow definition."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

ARCHITECTURES = ("llama", "qwen2", "qwen3")
VOCABULARY = 211  # odd: rows of logits are not aligned to vector registers


def tiny_model(architecture: str = "llama", *, seed: int = 0, tied: bool = False) -> PreTrainedModel:
    """Weights large enough that the law is neither flat nor certain."""
    shape = {
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,  # of 32: the smallest that kernels know
        "num_key_value_heads": 1,
        "intermediate_size": 96,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 1024,
        "tie_word_embeddings": tied,
        "initializer_range": 0.15,
    }
    torch.manual_seed(seed)
    match architecture:
        case "llama":
            model: PreTrainedModel = LlamaForCausalLM(LlamaConfig(**shape))
        case "qwen2":
            model = Qwen2ForCausalLM(Qwen2Config(**shape))
        case "qwen3":
            model = Qwen3ForCausalLM(Qwen3Config(**shape, head_dim=64))
        case _:
            raise ValueError(architecture)
    return model.eval()


@torch.no_grad()
def full_logits(model: PreTrainedModel, tokens: Sequence[int]) -> torch.Tensor:
    """Logits [T, V] of one sequence, without a cache: row t is the law of token t + 1."""
    return model(input_ids=torch.tensor([list(tokens)]), use_cache=False).logits[0].float()


def greedy_loop(model: PreTrainedModel, prompt: Sequence[int], count: int) -> list[int]:
    """What temperature 0 must write."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(full_logits(model, tokens)[-1].argmax()))
    return tokens[len(prompt) :]
