"""Log-probs and entropy of chosen tokens, chunk by chunk: the logits of a whole pack never exist."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from tandem.train.lengths import any_length


class TokenStatistics(NamedTuple):
    """Of each row's distribution: the log-prob of its token, and the entropy. float32."""

    logprobs_R: Tensor
    entropy_R: Tensor


@dataclass(frozen=True)
class VocabularyPart:
    """The tokens whose logits this rank computes: one for each row of its weight, from `first` on; `group` has all."""

    first: int
    group: dist.ProcessGroup


class ChunkArithmetic(NamedTuple):
    """What is done to the logits of one chunk between the matrix products; see the functions of these names."""

    statistics: Callable[[Tensor, Tensor, float], tuple[Tensor, Tensor, Tensor]]
    gradient: Callable[[Tensor, ChunkBackward, float, torch.dtype], Tensor]


class ChunkBackward(NamedTuple):
    """Of each row of a chunk: its norm and entropy, its token's column, and the gradients that came.

    `own_C` is that of the log-prob where the token's logit is of this rank, 0 elsewhere.
    """

    norm_C: Tensor
    entropy_C: Tensor
    column_C: Tensor
    own_C: Tensor
    grad_logprobs_C: Tensor | None
    grad_entropy_C: Tensor | None


def chunk_statistics(products_CV: Tensor, column_C: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    """The norm (log-sum-exp) of each row of logits, the log-prob of its column, and the entropy."""
    logits_CV = products_CV if temperature == 1.0 else products_CV / temperature
    norm_C = logits_CV.logsumexp(-1)
    l_CV = logits_CV - norm_C[:, None]
    return norm_C, l_CV.gather(1, column_C[:, None]).squeeze(1), -l_CV.exp().mul_(l_CV).sum(-1)


def logits_gradient(products_CV: Tensor, of: ChunkBackward, temperature: float, dtype: torch.dtype) -> Tensor:
    """With p = softmax(z), l_v = log p_v and H = -sum_v p_v l_v:

    d l_token / d z = onehot(token) - p,    d H / d z = -p (l + H).
    """
    logits_CV = products_CV if temperature == 1.0 else products_CV / temperature
    l_CV = logits_CV - of.norm_C[:, None]
    p_CV = l_CV.exp()
    grad_CV = torch.zeros_like(p_CV)
    if of.grad_logprobs_C is not None:
        grad_CV = p_CV * -of.grad_logprobs_C[:, None]
        token_CV = torch.arange(p_CV.shape[1], device=p_CV.device) == of.column_C[:, None]
        grad_CV = torch.where(token_CV, grad_CV + of.own_C[:, None], grad_CV)
    if of.grad_entropy_C is not None:
        grad_CV = grad_CV - (l_CV + of.entropy_C[:, None]).mul_(p_CV).mul_(of.grad_entropy_C[:, None])
    return (grad_CV * (1 / temperature)).to(dtype)


PLAIN = ChunkArithmetic(chunk_statistics, logits_gradient)


def compiled_arithmetic() -> ChunkArithmetic:
    """One kernel or two where PLAIN reads and writes [C, V] numbers a dozen times."""
    statistics, gradient = torch.compile(chunk_statistics), torch.compile(logits_gradient)

    def any_rows(products_CV: Tensor, column_C: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
        any_length(products_CV, column_C)
        return statistics(products_CV, column_C, temperature)

    def any_rows_back(products_CV: Tensor, of: ChunkBackward, temperature: float, dtype: torch.dtype) -> Tensor:
        any_length(products_CV, *of)
        return gradient(products_CV, of, temperature, dtype)

    return ChunkArithmetic(any_rows, any_rows_back)


def token_logprobs(
    hidden_RH: Tensor,
    weight_VH: Tensor,
    tokens_R: Tensor,
    *,
    temperature: float,
    chunk_size: int,
    dtype: torch.dtype,
    vocabulary: VocabularyPart | None = None,
    arithmetic: ChunkArithmetic = PLAIN,
) -> TokenStatistics:
    """log softmax(h W^T / temperature)[token] and the entropy of that softmax, both differentiable.

    Products run in `dtype` on chunks of `chunk_size` rows; softmax and sums in float32. The backward pass computes each
    chunk's logits again, so at most one chunk of [chunk_size, V] is alive. With `vocabulary` the weight is a part of
    the output layer: ranks of the group call with the same rows, and only [R] numbers travel in the forward pass.
    """
    rows = hidden_RH.shape[0]
    if tokens_R.shape != (rows,) or weight_VH.shape[1] != hidden_RH.shape[1]:
        raise ValueError(
            f"token_logprobs wants hidden [R, H], weight [V, H], tokens [R], got {tuple(hidden_RH.shape)}, "
            f"{tuple(weight_VH.shape)}, {tuple(tokens_R.shape)}"
        )
    arguments = hidden_RH, weight_VH, tokens_R, temperature, chunk_size, dtype, vocabulary, arithmetic
    return TokenStatistics(*_TokenLogprobs.apply(*arguments))


class _TokenLogprobs(torch.autograd.Function):
    """z = h W^T / temperature, chunk by chunk, twice."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_RH: Tensor,
        weight_VH: Tensor,
        tokens_R: Tensor,
        temperature: float,
        chunk_size: int,
        dtype: torch.dtype,
        vocabulary: VocabularyPart | None,
        arithmetic: ChunkArithmetic,
    ) -> tuple[Tensor, Tensor]:
        weight = weight_VH.to(dtype)
        column_R, here_R = _columns(tokens_R, len(weight), vocabulary)
        logprobs_R = hidden_RH.new_empty(tokens_R.shape, dtype=torch.float32)
        entropy_R = torch.empty_like(logprobs_R)
        norm_R = torch.empty_like(logprobs_R)
        for start in range(0, len(tokens_R), chunk_size):
            part = slice(start, start + chunk_size)
            products_CV = _products(hidden_RH[part].to(dtype), weight)
            norm_R[part], logprobs_R[part], entropy_R[part] = arithmetic.statistics(
                products_CV, column_R[part], temperature
            )
            del products_CV  # before the next chunk's
        if vocabulary is not None:
            logprobs_R, entropy_R, norm_R = _combine(logprobs_R, entropy_R, norm_R, here_R, vocabulary.group)
        ctx.set_materialize_grads(False)  # an entropy that is only measured costs nothing in backward
        ctx.save_for_backward(hidden_RH, weight_VH, tokens_R, norm_R, entropy_R)
        ctx.temperature, ctx.chunk_size, ctx.dtype, ctx.vocabulary = temperature, chunk_size, dtype, vocabulary
        ctx.arithmetic = arithmetic
        return logprobs_R, entropy_R

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        grad_logprobs_R, grad_entropy_R = gradients
        hidden_RH, weight_VH, tokens_R, norm_R, entropy_R = ctx.saved_tensors
        weight = weight_VH.to(ctx.dtype)
        column_R, here_R = _columns(tokens_R, len(weight), ctx.vocabulary)
        own_R = torch.zeros_like(norm_R) if grad_logprobs_R is None else torch.where(here_R, grad_logprobs_R, 0.0)
        grad_hidden_RH = torch.empty_like(hidden_RH)
        grad_weight_VH = torch.zeros_like(weight, dtype=torch.float32)
        for start in range(0, len(tokens_R), ctx.chunk_size):
            part = slice(start, start + ctx.chunk_size)
            hidden = hidden_RH[part].to(ctx.dtype)
            came = (None if x_R is None else x_R[part] for x_R in (grad_logprobs_R, grad_entropy_R))
            of = ChunkBackward(norm_R[part], entropy_R[part], column_R[part], own_R[part], *came)
            grad_CV = ctx.arithmetic.gradient(_products(hidden, weight), of, ctx.temperature, ctx.dtype)
            grad_hidden_RH[part] = (grad_CV @ weight).to(hidden_RH.dtype)
            _add_product(grad_weight_VH, grad_CV.t(), hidden)
            del grad_CV
        if ctx.vocabulary is not None:
            dist.all_reduce(grad_hidden_RH, group=ctx.vocabulary.group)
        return grad_hidden_RH, grad_weight_VH.to(weight_VH.dtype), None, None, None, None, None, None


def _columns(tokens_R: Tensor, size: int, vocabulary: VocabularyPart | None) -> tuple[Tensor, Tensor]:
    """Each token's column among `size` logits, and whether it is one of them; 0 where it is not."""
    column_R = tokens_R if vocabulary is None else tokens_R - vocabulary.first
    here_R = (column_R >= 0) & (column_R < size)
    return torch.where(here_R, column_R, 0), here_R


def _combine(
    logprobs_R: Tensor, entropy_R: Tensor, norm_R: Tensor, here_R: Tensor, group: dist.ProcessGroup
) -> tuple[Tensor, Tensor, Tensor]:
    """Statistics of parts of the vocabulary -> those of the whole.

    With Z_k the norm (log-sum-exp) of part k, H_k its entropy and Z = logsumexp_k Z_k: a log-prob of part k moves by
    d_k = Z_k - Z, and H = sum_k exp(d_k) (H_k - d_k).
    """
    norms = [torch.empty_like(norm_R) for _ in range(dist.get_world_size(group))]
    dist.all_gather(norms, norm_R, group=group)
    whole_R = torch.stack(norms).logsumexp(0)
    d_R = norm_R - whole_R
    own = torch.where(here_R, logprobs_R + d_R, 0.0), d_R.exp() * (entropy_R - d_R)
    both_2R = torch.stack(own)
    dist.all_reduce(both_2R, group=group)
    return both_2R[0], both_2R[1], whole_R


def _products(hidden_CH: Tensor, weight_VH: Tensor) -> Tensor:
    """float32 h W^T. A GPU keeps the products' float32 sums; rounding logits to bfloat16 would cost 2-3 digits."""
    if hidden_CH.is_cuda and hidden_CH.dtype != torch.float32:
        return torch.mm(hidden_CH, weight_VH.t(), out_dtype=torch.float32)
    return (hidden_CH @ weight_VH.t()).float()


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """total += left @ right, in float32; on a GPU inside of the product."""
    if left.is_cuda and left.dtype != torch.float32:
        torch.addmm(total, left, right, out_dtype=torch.float32, out=total)
    else:
        total += left @ right
