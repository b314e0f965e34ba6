"""What is asked of every vLLM worker: its weights' shapes, their fingerprint, and to take others.

The functions are sent to the workers by `collective_rpc`, which hands them the worker as first argument.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from vllm.config import set_current_vllm_config  # type: ignore  # as below
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead  # type: ignore  # as below
from vllm.v1.worker.worker_base import WorkerBase  # type: ignore  # not every checkout has vllm

from tandem.fingerprint import as_numbers, describe, weigh
from tandem.roles import WeightStream
from tandem.rollout.loading import Named
from tandem.rollout.vllm.blocks import HEAD, blocks


@dataclass(frozen=True)
class Weighed:
    """A rank's part of a weight and what it adds to the digest of the whole."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: tuple[int, ...]
    size: int
    total: int


def shapes(worker: WorkerBase) -> dict[str, tuple[int, ...]]:
    """Name -> shape of the whole weights, as a trainer sends them. A tied output layer is not among them."""
    found = {block.name: block.shape for block in blocks(worker.get_model())}
    if tied(worker):
        found.pop(HEAD, None)
    return found


def weigh_weights(worker: WorkerBase) -> dict[str, Weighed]:
    """This rank's share of the fingerprint. Nothing leaves the device but the sums."""
    held = list(blocks(worker.get_model()))
    totals = as_numbers([weigh(block.tensor, block.shape, block.start) for block in held])
    return {
        block.name: Weighed(block.tensor.dtype, block.shape, block.start, block.tensor.numel(), total)
        for block, total in zip(held, totals, strict=True)
    }


def take_weights(worker: WorkerBase, weights: Sequence[Named] | WeightStream) -> None:
    """Replace every weight. They are whole, complete and of the right shapes: a reload that fails leaves no model."""
    given = weights.open(worker.rank) if isinstance(weights, WeightStream) else iter(weights)
    model = worker.get_model()
    dtype: torch.dtype = worker.model_config.dtype
    with set_current_vllm_config(worker.vllm_config):  # which 0.26 does not set for a reload
        worker.reload_weights(weights_iterator=cast(given, dtype))
    repack(model)


def cast(weights: Iterator[Named], dtype: torch.dtype) -> Iterator[Named]:
    """In the engine's precision. None is held here while the next one comes."""
    for name, tensor in weights:
        yield name, tensor.to(dtype)
        del tensor


def repack(model: nn.Module) -> None:
    """On a CPU an output layer multiplies with a packed copy, which a reload of the embedding it is tied to leaves."""
    head = getattr(model, "lm_head", None)  # pipeline stages but the last have none
    if isinstance(head, ParallelLMHead) and getattr(head, "cpu_linear", None) is not None:
        head.quant_method.process_weights_after_loading(head)


def used_bytes(worker: WorkerBase) -> int | None:
    """Of this rank's GPU, by whomever; None on a CPU."""
    if worker.device is None or worker.device.type != "cuda":
        return None
    free, total = torch.cuda.mem_get_info(worker.device)
    return total - free


def tied(worker: WorkerBase) -> bool:
    """Whether the output layer is the embedding."""
    config = worker.get_model().config
    return bool(getattr(config, "tie_word_embeddings", False))  # absent: not tied


def join(ranks: Sequence[Mapping[str, Weighed]], *, tied: bool) -> dict[str, str]:
    """The fingerprint of the whole from the shares of the ranks: their blocks are counted once and must be complete.

    Ranks that hold copies of a block must agree, and so must a tied output layer with its embedding: what differs is
    in the fingerprint, under a name or in words that no trainer has.
    """
    found: dict[str, str] = {}
    for name in dict.fromkeys(name for rank in ranks for name in rank):
        shares = [rank[name] for rank in ranks if name in rank]
        copies: dict[tuple[int, ...], set[int]] = defaultdict(set)
        sizes: dict[tuple[int, ...], int] = {}
        for share in shares:
            copies[share.start].add(share.total)
            sizes[share.start] = share.size
        whole = torch.Size(shares[0].shape).numel()
        if any(len(totals) > 1 for totals in copies.values()) or sum(sizes.values()) != whole:
            found[name] = f"ranks that disagree: {sum(sizes.values())} of {whole} elements, {dict(copies)}"
        else:
            found[name] = describe(shares[0].dtype, shares[0].shape, sum(sum(totals) for totals in copies.values()))
    if tied and found.get(HEAD) in {digest for name, digest in found.items() if name != HEAD}:
        del found[HEAD]
    return found
