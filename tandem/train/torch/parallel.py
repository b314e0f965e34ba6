"""Lay a model on its mesh: layers cut over the tensor ranks, and what is left of them sharded over the data ranks."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from tandem.train.heads import TokenLogprobs, ValueHead
from tandem.train.torch.mesh import Mesh

FAMILIES = ("llama", "qwen2", "qwen3")


def lay_on_mesh(model: nn.Module, backbone: PreTrainedModel, head: nn.Module, mesh: Mesh, dtype: torch.dtype) -> None:
    """In place; `model` holds backbone and head. Parameters are other objects afterwards, under the same names."""
    if mesh.devices is None:
        return
    if mesh.parallel.tensor_parallel_size > 1:
        cut_layers(backbone, head, mesh)
    if mesh.shards_weights:
        shard_weights(model, head, mesh, dtype)


def cut_layers(backbone: PreTrainedModel, head: nn.Module, mesh: Mesh) -> None:
    """Heads, MLP columns and vocabulary over the tensor ranks. A value head stays whole on each."""
    check_divisible(backbone, mesh.parallel.tensor_parallel_size)
    embedding = backbone.get_input_embeddings()
    assert isinstance(embedding, nn.Embedding), "of the families above"
    output = head.lm_head if isinstance(head, TokenLogprobs) else None
    tied = output is not None and output.weight is embedding.weight
    parallelize_module(backbone, mesh.tensor, tensor_plan(backbone, sequence=mesh.parallel.sequence_parallel))
    if output is not None and tied:
        output.weight = embedding.weight
    elif output is not None:
        cut = distribute_tensor(output.weight.detach(), mesh.tensor, [Shard(0)])
        output.weight = nn.Parameter(cut, requires_grad=output.weight.requires_grad)


def check_divisible(backbone: PreTrainedModel, parts: int) -> None:
    """Raise ValueError for a model that cannot be cut into so many parts."""
    config = backbone.config.get_text_config()
    if config.model_type not in FAMILIES:
        raise ValueError(
            f"parallel.tensor_parallel_size={parts} knows the layers of {', '.join(FAMILIES)}; this model is "
            f"{config.model_type}: set it to 1 and parallel.data_parallel=shard"
        )
    for name in ("num_attention_heads", "num_key_value_heads", "intermediate_size"):
        size = config.to_dict()[name]
        if size % parts:
            raise ValueError(f"parallel.tensor_parallel_size={parts} does not divide the model's {name}, {size}")


def tensor_plan(backbone: PreTrainedModel, *, sequence: bool) -> dict[str, ParallelStyle]:
    """Megatron's cut (arXiv:1909.08053); with `sequence`, tokens are cut between the products (arXiv:2205.05198)."""
    between = Shard(1) if sequence else Replicate()
    plan: dict[str, ParallelStyle] = {"embed_tokens": RowwiseParallel(input_layouts=Replicate())}
    plan |= {f"layers.*.self_attn.{name}_proj": ColwiseParallel() for name in "qkv"}
    plan |= {f"layers.*.mlp.{name}_proj": ColwiseParallel() for name in ("gate", "up")}
    plan |= {"layers.*.self_attn.o_proj": RowwiseParallel(), "layers.*.mlp.down_proj": RowwiseParallel()}
    if backbone.config.get_text_config().model_type == "qwen3":  # norms over the heads of which each rank has its own
        of_heads = SequenceParallel(sequence_dim=2, use_local_output=True)
        plan |= {"layers.*.self_attn.q_norm": of_heads, "layers.*.self_attn.k_norm": of_heads}
    if sequence:
        plan["embed_tokens"] = RowwiseParallel(input_layouts=Replicate(), output_layouts=between)
        plan["layers.*.self_attn.o_proj"] = RowwiseParallel(output_layouts=between)
        plan["layers.*.mlp.down_proj"] = RowwiseParallel(output_layouts=between)
        plan |= {f"layers.*.{name}_layernorm": SequenceParallel() for name in ("input", "post_attention")}
        plan["norm"] = SequenceParallel()
        plan["layers.*.self_attn"] = PrepareModuleInput(
            input_kwarg_layouts={"hidden_states": between}, desired_input_kwarg_layouts={"hidden_states": Replicate()}
        )
        plan["layers.*.mlp"] = PrepareModuleInput(input_layouts=between, desired_input_layouts=Replicate())
    return plan


def shard_weights(model: nn.Module, head: nn.Module, mesh: Mesh, dtype: torch.dtype) -> None:
    """FSDP2, a unit a layer. Master weights are float32, gathered in `dtype`; gradients are added in float32.

    A value head is a unit of its own, gathered in float32 as in one process. Sums, not averages: the one divisor is
    applied in the optimizer step.
    """
    reshard = not mesh.parallel.keep_gathered
    passes = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    for module in list(model.modules()):
        if isinstance(module, GradientCheckpointingLayer):
            fully_shard(module, mesh=mesh.data, mp_policy=passes, reshard_after_forward=reshard)
    if isinstance(head, ValueHead):
        values = MixedPrecisionPolicy(reduce_dtype=torch.float32, cast_forward_inputs=False)
        fully_shard(head, mesh=mesh.data, mp_policy=values, reshard_after_forward=False)
    fully_shard(model, mesh=mesh.data, mp_policy=passes, reshard_after_forward=False)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def release(model: nn.Module) -> None:
    """Drop gathered weights. FSDP keeps those that it does not reshard after a forward pass: they would grow stale."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def keep_gathered(model: nn.Module, keep: bool) -> None:
    """Whether the weights stay gathered after the next backward pass, for one more micro-batch under them."""
    if isinstance(model, FSDPModule):
        model.set_reshard_after_backward(not keep)
