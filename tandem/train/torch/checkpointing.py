"""Activation checkpointing: what a layer forgets after its forward pass and computes again in the backward pass."""

from __future__ import annotations

import functools
import warnings
from typing import Literal

import torch
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts
from transformers import PreTrainedModel

from tandem import onednn
from tandem.train.torch import long_attention  # noqa: F401  # it defines an operator that is named below

aten = torch.ops.aten
# What costs time: matrix products and attention. Norms, activations and rotations only move bytes.
KEPT = onednn.OPERATORS | frozenset(
    {
        aten.mm.default,
        aten.addmm.default,
        aten._scaled_dot_product_flash_attention.default,
        aten._scaled_dot_product_flash_attention_for_cpu.default,
        aten._scaled_dot_product_efficient_attention.default,
        aten._scaled_dot_product_cudnn_attention.default,
        torch.ops.torch_attn._varlen_attn.default,
        torch.ops.tandem.attend_in_pack.default,
    }
)


def use_checkpointing(model: PreTrainedModel, mode: Literal["none", "selective", "full"]) -> None:
    """`full` keeps only what enters a layer; `selective` also the results of products and attention.

    A compiled layer does `selective` itself: this sees nothing of what is inside of its graph.
    """
    if mode == "none":
        return
    arguments: dict[str, object] = {"use_reentrant": False, "preserve_rng_state": False}  # nothing is drawn in a layer
    if mode == "selective":
        arguments["context_fn"] = functools.partial(create_selective_checkpoint_contexts, keep_products)
    with warnings.catch_warnings(category=FutureWarning, action="ignore"):  # its new name is not in 5.17
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=arguments)
    model.train()  # transformers checkpoints in training mode only


def keep_products(context: object, operation: object, *arguments: object, **keywords: object) -> CheckpointPolicy:
    """The policy of `selective`, in torch's words."""
    return CheckpointPolicy.MUST_SAVE if operation in KEPT else CheckpointPolicy.PREFER_RECOMPUTE
