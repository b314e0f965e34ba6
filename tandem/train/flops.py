"""How many floating-point operations a model's work takes, from its shape and the true lengths: padding counts nothing.

A multiply and an add are two. Counted are matrix products: linear maps, attention's two products over the pairs that
causality (and a sliding window) lets see each other, and the head where it is asked. Backward is twice forward; what is
computed again (activation checkpointing, chunks of logits) is no work of the model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedConfig

from tandem.train.backend import Pack
from tandem.types import Mean, Metrics

# Dense bfloat16 peaks in TFLOP/s, by a part of the device's name.
PEAKS = {"H200": 989.0, "H100": 989.0, "B200": 2250.0, "A100": 312.0, "L40S": 362.0}


FAMILIES = ("llama", "qwen2", "qwen3", "mistral")


@dataclass(frozen=True)
class Machine:
    """What one rank computes with: its model's shape and its device's peak, None where they are not known."""

    shape: ModelShape | None = None
    peak_tflops: float | None = None


@dataclass(frozen=True)
class ModelShape:
    """What decides the count. `linear` are the weights of a layer's linear maps; `windows` has one entry a layer."""

    linear: int
    attention_width: int  # heads x head size
    windows: tuple[int | None, ...]
    head: int  # weights of the output layer, or of the value head
    head_everywhere: bool  # a value head; an output layer is applied where the policy wrote

    def forward(self, lengths: Sequence[int], asked: int) -> int:
        """Of samples of these lengths, with the head applied to `asked` tokens."""
        linear = 2 * self.linear * len(self.windows) * sum(lengths)
        pairs = sum(visible_pairs(length, window) for window in self.windows for length in lengths)
        return linear + 4 * self.attention_width * pairs + 2 * self.head * asked

    def forward_backward(self, lengths: Sequence[int], asked: int) -> int:
        """Each product has two in its backward pass."""
        return 3 * self.forward(lengths, asked)


def shape_of(config: PreTrainedConfig, outputs: int, *, head_everywhere: bool) -> ModelShape | None:
    """Of a decoder with grouped-query attention and a gated MLP, or None; `outputs` are the rows of its head."""
    c = config.get_text_config()
    values = c.to_dict()
    if c.model_type not in FAMILIES:
        return None
    head_size = values.get("head_dim") or c.hidden_size // c.num_attention_heads
    attention = c.hidden_size * head_size * (2 * c.num_attention_heads + 2 * c.num_key_value_heads)
    return ModelShape(
        linear=attention + 3 * c.hidden_size * c.intermediate_size,
        attention_width=head_size * c.num_attention_heads,
        windows=windows_of(c),
        head=outputs * c.hidden_size,
        head_everywhere=head_everywhere,
    )


def flops_of(shape: ModelShape, packs: Sequence[Pack], *, backward: bool) -> int:
    """Of these packs, without their tails."""
    lengths = [length for pack in packs for length in pack.lengths]
    asked = sum(lengths) if shape.head_everywhere else sum(int(pack.mask_P.sum()) for pack in packs)
    return shape.forward_backward(lengths, asked) if backward else shape.forward(lengths, asked)


def speed_metrics(machine: Machine, tflop: float, seconds: float) -> Metrics:
    """Of one rank, which has done that much: what it reached, and the part of its peak where that is known."""
    metrics: Metrics = {"tflops": Mean(tflop, seconds)}
    if machine.peak_tflops is not None:
        metrics["mfu"] = Mean(tflop / machine.peak_tflops, seconds)
    return metrics


def windows_of(config: PreTrainedConfig) -> tuple[int | None, ...]:
    """How many tokens back each layer sees, itself included; None is all."""
    values = config.to_dict()
    kinds = values.get("layer_types") or ["full_attention"] * config.num_hidden_layers
    return tuple(values.get("sliding_window") if kind == "sliding_attention" else None for kind in kinds)


def visible_pairs(length: int, window: int | None) -> int:
    """Pairs of a token and one that it sees, itself included."""
    seen = length if window is None else min(window, length)
    return seen * (seen + 1) // 2 + (length - seen) * seen


def peak_tflops(device: torch.device, dtype: torch.dtype) -> float | None:
    """Of a GPU in bfloat16; None where it is not known."""
    if device.type != "cuda" or dtype != torch.bfloat16:
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for part, peak in PEAKS.items() if part in name), None)
