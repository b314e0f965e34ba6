"""Tiny random models, batches and workers for the tests of this room."""

from __future__ import annotations

import itertools

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

from tandem.config.models import SequencePacking, TrainedModel
from tandem.plane.memory import MemoryPlane
from tandem.train.backend import Pack
from tandem.train.heads import TokenLogprobs, ValueHead
from tandem.train.objectives import Objective
from tandem.train.packs import pack_batch
from tandem.train.sharding import plan_shares
from tandem.train.torch.backend import TorchBackend, build_torch_backend
from tandem.train.worker import Worker
from tandem.types import Batch

CPU = torch.device("cpu")
VOCABULARY = 96
SHAPE = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "vocab_size": VOCABULARY,
    "initializer_range": 0.2,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
PROMPT = 5


def llama(seed: int = 0, *, tied: bool = True) -> PreTrainedModel:
    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(**SHAPE, tie_word_embeddings=tied))


def qwen(seed: int = 0, **options: object) -> PreTrainedModel:
    """Biases in attention, and a sliding window if asked."""
    torch.manual_seed(seed)
    return Qwen2ForCausalLM(Qwen2Config(**SHAPE, tie_word_embeddings=False, **options))


def settings(**changes: object) -> TrainedModel:
    return TrainedModel.model_validate({"precision": "float32", "optimizer": {"lr": 1e-2}} | changes)


def actor_backend(
    model: PreTrainedModel | None = None,
    config: TrainedModel | None = None,
    temperature: float = 1.0,
    steps: int | None = 10,
    device: torch.device = CPU,
) -> TorchBackend:
    model = model or llama()
    head = TokenLogprobs(model.get_output_embeddings(), temperature=temperature, chunk_size=32)
    return backend_on(model, head, config or settings(), steps, device)


def backend_on(
    model: PreTrainedModel,
    head: TokenLogprobs | ValueHead,
    config: TrainedModel,
    steps: int | None,
    device: torch.device = CPU,
) -> TorchBackend:
    """Of the library that the config names: both are built by functions of one form."""
    build = build_torch_backend
    if config.backend.name == "megatron":
        from tests.train.megatron_here import build_megatron_backend as build  # an extra: not everywhere
    return build(model, head, config, total_optimizer_steps=steps, device=device)


def critic_backend(
    config: TrainedModel | None = None,
    support: tuple[float, float, int] | None = None,
    *,
    zero: bool = False,
    device: torch.device = CPU,
    model: PreTrainedModel | None = None,
) -> TorchBackend:
    """`zero` leaves the head as it starts; otherwise values are random."""
    model = model or llama()
    head = ValueHead(SHAPE["hidden_size"], support=support)
    if not zero:
        torch.nn.init.normal_(head.linear.weight, std=0.2)
    return backend_on(model, head, config or settings(), 10, device)


def worker(
    backend: TorchBackend,
    plane: MemoryPlane,
    objective: Objective | None,
    budget: int = 256,
    name: str = "actor",
    **options: object,
) -> Worker:
    """Its clock ticks a second at each look. `options` are of the packing."""
    packing, clock = SequencePacking(train_mb_tokens=budget, **options), itertools.count().__next__
    return Worker(name, backend, plane=plane, packing=packing, objective=objective, clock=clock)


def batch_of(lengths: list[int]) -> Batch:
    return Batch(tuple(range(len(lengths))), tuple(lengths), tuple(i // 2 for i in range(len(lengths))))


def packs_of(lengths: list[int], columns: dict[str, list[torch.Tensor]], budget: int) -> list[Pack]:
    """The micro-batches of one process."""
    (share,) = plan_shares(lengths, SequencePacking(), budget, 1)
    return pack_batch(batch_of(lengths), columns, share.bins)


def lengths_of(samples: int, seed: int = 0, low: int = 9, high: int = 40) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(low, high, (samples,), generator=generator).tolist()


def rows(lengths: list[int], seed: int = 0) -> dict[str, list[torch.Tensor]]:
    """Every column of the plane, at random; 0 where the policy did not write. A hole of two tool tokens in each row."""
    generator = torch.Generator().manual_seed(seed)
    columns: dict[str, list[torch.Tensor]] = {name: [] for name in ("tokens", "mask", *FLOATS)}
    for length in lengths:
        mask = torch.arange(length) >= PROMPT
        mask[PROMPT + 1 : PROMPT + 3] = False
        columns["tokens"].append(torch.randint(0, VOCABULARY, (length,), generator=generator))
        columns["mask"].append(mask)
        for name, (centre, spread) in FLOATS.items():
            noise = centre + spread * torch.randn(length, generator=generator)
            columns[name].append(torch.where(mask, noise, 0.0))
        for name in ("weights", "value_weights", "nll_weights"):
            columns[name][-1] = torch.where(mask, torch.rand(length, generator=generator) + 0.5, 0.0)
    return columns


FLOATS = {
    "gen_logprobs": (-4.5, 0.3),
    "old_logprobs": (-4.5, 0.3),
    "ref_logprobs": (-4.5, 0.3),
    "values": (0.0, 0.5),
    "advantages": (0.0, 1.0),
    "returns": (0.3, 0.5),
    "weights": (1.0, 0.0),
    "value_weights": (1.0, 0.0),
    "nll_weights": (1.0, 0.0),
}


def gradients(backend: TorchBackend) -> dict[str, torch.Tensor]:
    """The accumulated gradient by name, copied."""
    return {name: p.grad.clone() for name, p in backend.parameters.items() if p.grad is not None}
