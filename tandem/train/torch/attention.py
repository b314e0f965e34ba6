"""Causal attention inside each sequence of a pack: sequences that lie end to end never see each other.

Registered with transformers under one name; the layout of the pack travels through the model as a keyword. transformers
builds no mask for an attention that it does not know, so there is no mask that could leak.
"""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import pad, scaled_dot_product_attention
from transformers import AttentionInterface, PreTrainedModel

from tandem.train.backend import Pack, send
from tandem.train.lengths import any_length
from tandem.train.torch.context import Context
from tandem.train.torch.long_attention import LARGEST_HEAD, attend_in_pack

NAME = "tandem_packed"
Kernel = Literal["sdpa", "varlen", "varlen_cudnn"]  # the last sends long sequences to cuDNN
# Sequences whose lengths round up to the same multiple run as one SDPA call.
LENGTH_STEP = 16
# torch 2.11's kernel takes fewer key heads than query heads as they come; later ones want to be told.
KNOWS_GQA = "enable_gqa" in inspect.signature(varlen_attn).parameters
ATTEND = functools.partial(varlen_attn, enable_gqa=True) if KNOWS_GQA else varlen_attn


@dataclass(frozen=True)
class Bucket:
    """Sequences of one padded length as a padded batch."""

    sequences: int
    length: int


@dataclass(frozen=True)
class OwnSlice:
    """What one of several ranks that share a pack attends with: the queries of `part`, and the `keys` that they see.

    Of a sequence, the last query here sees all keys that are here, each one before it one less.
    """

    context: Context
    part: slice
    keys: slice
    cu_queries: Tensor  # int32, for varlen, as the next three
    cu_keys: Tensor
    max_queries: int
    max_keys: int


@dataclass(frozen=True)
class Layout:
    """How the sequences of one pack lie, in the form that its kernel reads."""

    cu_seqlens: Tensor  # int32, for varlen
    borders: Tensor  # the same on the CPU
    longest: Tensor  # [tokens of the longest one, 0]: of an int, a compiled graph would make a constant
    buckets: tuple[Bucket, ...]  # for sdpa
    source_S: Tensor  # the packed token of each slot of the concatenated buckets; padding repeats a sequence's last one
    is_filled_S: Tensor  # where a slot is no padding
    slot_P: Tensor  # the slot of each packed token
    kernel: Kernel
    own: OwnSlice | None  # where ranks share the pack


def use_packed_attention(model: PreTrainedModel) -> None:
    """Let this model attend inside packs. It must then be called with `layout=`."""
    AttentionInterface.register(NAME, packed_attention)
    model.set_attn_implementation(NAME)


def lay_out(pack: Pack, device: torch.device, kernel: Kernel, context: Context | None = None) -> Layout:
    """The layout of one pack.

    For sdpa, sequences are grouped by their length rounded up to LENGTH_STEP. Measured on CPU: the bits of a row depend
    on the padded length of its own sequence and on nothing else (batch, neighbours, threads), so a sample's log-probs
    are the same in any pack. A padded slot is on the right: causality hides it from the real ones.
    """
    borders = pack.cu_seqlens
    lengths = [end - start for start, end in itertools.pairwise(borders)]
    groups: dict[int, list[int]] = {}
    if kernel == "sdpa":
        for sequence, length in enumerate(lengths):
            groups.setdefault(-(-length // LENGTH_STEP) * LENGTH_STEP, []).append(sequence)
    starts, ends = torch.tensor(borders[:-1]), torch.tensor(borders[1:])
    buckets, sources, filled = [], [torch.empty(0, dtype=torch.int64)], [torch.empty(0, dtype=torch.bool)]
    slots, offset = torch.zeros(borders[-1], dtype=torch.int64), 0
    for length, members in groups.items():
        source = starts[members, None] + torch.arange(length)
        inside = source < ends[members, None]
        slots[source[inside]] = offset + inside.flatten().nonzero().squeeze(1)
        buckets.append(Bucket(len(members), length))
        sources.append(source.minimum(ends[members, None] - 1).flatten())
        filled.append(inside.flatten())
        offset += inside.numel()
    cu_seqlens, longest = torch.tensor(borders, dtype=torch.int32), torch.empty(max(lengths), 0)
    cu_there = send(cu_seqlens, device)
    any_length(cu_seqlens, cu_there, longest)
    return Layout(
        cu_seqlens=cu_there,
        borders=cu_seqlens,
        longest=longest,
        buckets=tuple(buckets),
        source_S=send(torch.cat(sources), device),
        is_filled_S=send(torch.cat(filled), device),
        slot_P=send(slots, device),
        kernel=kernel,
        own=None if context is None else own_slice(borders, context, device),
    )


def own_slice(borders: Sequence[int], context: Context, device: torch.device) -> OwnSlice:
    """The slice of a pack with these borders between its sequences that this rank attends with."""
    part = context.part(borders[-1])
    seen = [(a, max(a, part.start), min(b, part.stop)) for a, b in itertools.pairwise(borders)]
    seen = [(first, start, stop) for first, start, stop in seen if start < stop]
    queries, keys = [stop - start for _, start, stop in seen], [stop - first for first, _, stop in seen]
    cu_queries, cu_keys = ([0, *itertools.accumulate(sizes)] for sizes in (queries, keys))
    return OwnSlice(
        context=context,
        part=part,
        keys=slice(seen[0][0], part.stop),
        cu_queries=send(torch.tensor(cu_queries, dtype=torch.int32), device),
        cu_keys=send(torch.tensor(cu_keys, dtype=torch.int32), device),
        max_queries=max(queries),
        max_keys=max(keys),
    )


def packed_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    layout: Layout,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: object,
) -> tuple[Tensor, None]:
    """transformers' attention interface: [1, heads, P, D] -> [1, P, heads, D]. No dropout: ratios must be exact."""
    if softcap is not None or s_aux is not None:
        raise ValueError(
            f"{type(module).__name__} caps its attention scores or has attention sinks; packed attention has neither"
        )
    assert attention_mask is None, "transformers must build no mask for packed attention"
    query_PD, key_PD, value_PD = (x.squeeze(0).transpose(0, 1) for x in (query, key, value))
    if layout.own is not None:
        key_PD, value_PD = (layout.own.context.gather(x_CD) for x_CD in (key_PD, value_PD))
    if layout.kernel != "sdpa":
        return _varlen(query_PD, key_PD, value_PD, layout, scaling, sliding_window).unsqueeze(0), None
    return _bucketed(query_PD, key_PD, value_PD, layout, scaling, sliding_window).unsqueeze(0), None


def _varlen(
    query: Tensor, key: Tensor, value: Tensor, layout: Layout, scaling: float | None, window: int | None
) -> Tensor:
    longest = layout.longest.shape[0]
    lengths = layout.cu_seqlens, layout.cu_seqlens, longest, longest
    if (own := layout.own) is not None:
        key, value = key[own.keys], value[own.keys]
        lengths = own.cu_queries, own.cu_keys, own.max_queries, own.max_keys
    query, key, value = query.contiguous(), key.contiguous(), value.contiguous()
    if layout.kernel == "varlen_cudnn" and own is None and window is None and query.shape[-1] <= LARGEST_HEAD:
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        return attend_in_pack(query, key, value, layout.borders, layout.cu_seqlens, scale)[0]
    attended = ATTEND(
        query,
        key,
        value,
        *lengths,
        scale=scaling,
        window_size=(-1 if window is None else window - 1, 0),
    )
    assert isinstance(attended, Tensor)
    return attended


@torch.compiler.disable  # a graph would be one of these buckets only
def _bucketed(
    query: Tensor, key: Tensor, value: Tensor, layout: Layout, scaling: float | None, window: int | None
) -> Tensor:
    if layout.own is not None:  # whole sequences, of which the other ranks' queries are not used
        part = layout.own.part
        query = pad(query, (0, 0, 0, 0, part.start, len(key) - part.stop))
    sizes = [bucket.sequences * bucket.length for bucket in layout.buckets]
    spread = (_Spread.apply(x, layout.source_S, layout.slot_P).split(sizes) for x in (query, key, value))
    parts = []
    for bucket, *rows in zip(layout.buckets, *spread, strict=True):
        padded = (x.unflatten(0, (bucket.sequences, bucket.length)).transpose(1, 2) for x in rows)
        band = _band(bucket.length, window, query.device) if window is not None and window < bucket.length else None
        attended = scaled_dot_product_attention(
            *padded, attn_mask=band, is_causal=band is None, scale=scaling, enable_gqa=key.shape[1] != query.shape[1]
        )
        parts.append(attended.transpose(1, 2).flatten(0, 1))
    together = _Gather.apply(torch.cat(parts), layout.source_S, layout.is_filled_S, layout.slot_P)
    return together if layout.own is None else together[layout.own.part]


class _Spread(torch.autograd.Function):
    """[P, heads, D] -> [slots, heads, D]. What comes back to padding is 0: no token sees it, nobody reads its result.

    So the gradient is picked up, where torch would add up all slots in one thread.
    """

    @staticmethod
    def forward(ctx: Any, x_PD: Tensor, source_S: Tensor, slot_P: Tensor) -> Tensor:
        ctx.save_for_backward(slot_P)
        return x_PD.index_select(0, source_S)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return gradients[0].index_select(0, *ctx.saved_tensors), None, None


class _Gather(torch.autograd.Function):
    """[slots, heads, D] -> [P, heads, D], each packed token from its slot: the way back."""

    @staticmethod
    def forward(ctx: Any, x_SD: Tensor, source_S: Tensor, is_filled_S: Tensor, slot_P: Tensor) -> Tensor:
        ctx.save_for_backward(source_S, is_filled_S)
        return x_SD.index_select(0, slot_P)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        source_S, is_filled_S = ctx.saved_tensors
        return gradients[0].index_select(0, source_S) * is_filled_S[:, None, None], None, None, None


def _band(length: int, window: int, device: torch.device) -> Tensor:
    distance = torch.arange(length, device=device)[:, None] - torch.arange(length, device=device)
    return (distance >= 0) & (distance < window)
