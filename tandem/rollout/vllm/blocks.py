"""A vLLM model's weights under their Hugging Face names: what vLLM fuses is parted again, what it cuts is placed.

These functions run inside vLLM's workers, one call a tensor-parallel rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from vllm.model_executor.layers.linear import (  # type: ignore  # not every checkout has vllm
    ColumnParallelLinear,
    LinearBase,
    QKVParallelLinear,
    RowParallelLinear,
)
from vllm.model_executor.layers.vocab_parallel_embedding import (  # type: ignore  # as above
    ParallelLMHead,
    VocabParallelEmbedding,
)

HEAD = "lm_head.weight"


@dataclass(frozen=True)
class Block:
    """A rank's part of a weight: what it computes with, the shape of the whole, and where in it this begins."""

    name: str
    tensor: torch.Tensor
    shape: tuple[int, ...]
    start: tuple[int, ...]


def blocks(model: nn.Module) -> Iterator[Block]:
    """Every weight of this rank, in the model's order. A tied output layer is there too, under its own name.

    Raises ValueError for a layer whose weights have no plain form here, such as mixtures of experts.
    """
    for path, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            full = f"{path}.{name}" if path else name
            match module:
                case ParallelLMHead():
                    yield cut_vocabulary(HEAD if name == "weight" else full, module, effective(module, parameter, name))
                case VocabParallelEmbedding():
                    yield cut_vocabulary(full, module, parameter)
                case LinearBase():
                    tensor = effective(module, parameter, name)
                    yield from parts(full, module, tensor, fused_names(model, path))
                case _ if "experts" in path:
                    raise ValueError(f"{type(module).__name__} at {path}: its weights cannot be proven equal")
                case _:
                    yield Block(full, parameter, tuple(parameter.shape), (0,) * parameter.dim())


def effective(module: nn.Module, parameter: torch.Tensor, name: str) -> torch.Tensor:
    """The weight that a layer multiplies with, in the engine's precision.

    On a CPU vLLM packs it into a form that cannot be read and drops or forgets the original: the product with the unit
    matrix gives it back, to the bit. There a bias may be held in float32, which holds all lower precisions.
    """
    packed = getattr(module, "cpu_linear", None)  # set by vLLM on CPUs only
    if not callable(packed):
        return parameter
    dtype = module.params_dtype
    assert isinstance(dtype, torch.dtype)
    if name != "weight":
        return parameter.to(dtype)
    width = module.input_size_per_partition if isinstance(module, LinearBase) else parameter.shape[1]
    assert isinstance(width, int)
    return packed(torch.eye(width, dtype=dtype), parameter, None).t()


def fused_names(model: nn.Module, path: str) -> list[str]:
    """Hugging Face's paths of what vLLM fused into this layer; the path itself if it fused nothing."""
    parent, _, own = path.rpartition(".")
    fused: Any = getattr(model, "packed_modules_mapping", {})  # not every vLLM model fuses
    return [f"{parent}.{name}" if parent else name for name in fused.get(own, [own])]


def parts(full: str, module: LinearBase, tensor: torch.Tensor, paths: list[str]) -> Iterator[Block]:
    """A linear layer's blocks: cut along its output, along its input, or whole."""
    leaf = full.rpartition(".")[2]
    if isinstance(module, RowParallelLinear) and tensor.dim() == 2:
        rows, columns = tensor.shape
        yield Block(full, tensor, (rows, columns * module.tp_size), (0, columns * module.tp_rank))
        return
    if not isinstance(module, ColumnParallelLinear):
        yield Block(full, tensor, tuple(tensor.shape), (0,) * tensor.dim())
        return
    sizes = module.output_partition_sizes
    if len(sizes) != len(paths):
        raise ValueError(f"{full} is fused from {len(sizes)} layers, but the model names {paths}")
    for number, (path, part) in enumerate(zip(paths, tensor.split(sizes), strict=True)):
        rank, ranks = module.tp_rank, module.tp_size
        if isinstance(module, QKVParallelLinear) and number > 0:  # few key heads: ranks hold copies
            rank, ranks = rank // module.num_kv_head_replicas, ranks // module.num_kv_head_replicas
        rest = tuple(part.shape[1:])
        yield Block(f"{path}.{leaf}", part, (len(part) * ranks, *rest), (len(part) * rank, *(0 for _ in rest)))


def cut_vocabulary(full: str, module: VocabParallelEmbedding, tensor: torch.Tensor) -> Block:
    """The rows of this rank's tokens, without vLLM's padding."""
    first, end = module.shard_indices.org_vocab_start_index, module.shard_indices.org_vocab_end_index
    part = tensor[: end - first]
    rest = tuple(part.shape[1:])
    return Block(full, part, (module.org_vocab_size, *rest), (first, *(0 for _ in rest)))
