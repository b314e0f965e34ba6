"""Log-probs and entropy of chosen tokens, chunk by chunk: the logits of a whole pack never exist."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor


class TokenStatistics(NamedTuple):
    """Of each row's distribution: the log-prob of its token, and the entropy. float32."""

    logprobs_R: Tensor
    entropy_R: Tensor


@dataclass(frozen=True)
class VocabularyPart:
    """The tokens whose logits this rank computes: one for each row of its weight, from `first` on; `group` has all."""

    first: int
    group: dist.ProcessGroup


def token_logprobs(
    hidden_RH: Tensor,
    weight_VH: Tensor,
    tokens_R: Tensor,
    *,
    temperature: float,
    chunk_size: int,
    dtype: torch.dtype,
    vocabulary: VocabularyPart | None = None,
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
    arguments = hidden_RH, weight_VH, tokens_R, temperature, chunk_size, dtype, vocabulary
    return TokenStatistics(*_TokenLogprobs.apply(*arguments))


class _TokenLogprobs(torch.autograd.Function):
    """With p = softmax(z), z = h W^T / temperature, l_v = log p_v and H = -sum_v p_v l_v:

    d l_token / d z = onehot(token) - p,    d H / d z = -p (l + H).
    """

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
    ) -> tuple[Tensor, Tensor]:
        weight = weight_VH.to(dtype)
        column_R, here_R = _columns(tokens_R, len(weight), vocabulary)
        logprobs_R = hidden_RH.new_empty(tokens_R.shape, dtype=torch.float32)
        entropy_R = torch.empty_like(logprobs_R)
        norm_R = torch.empty_like(logprobs_R)
        for start in range(0, len(tokens_R), chunk_size):
            part = slice(start, start + chunk_size)
            l_CV = _logits(hidden_RH[part].to(dtype), weight, temperature)
            norm_R[part] = l_CV.logsumexp(-1)
            l_CV.sub_(norm_R[part, None])
            logprobs_R[part] = l_CV.gather(1, column_R[part, None]).squeeze(1)
            entropy_R[part] = -l_CV.exp().mul_(l_CV).sum(-1)
        if vocabulary is not None:
            logprobs_R, entropy_R, norm_R = _combine(logprobs_R, entropy_R, norm_R, here_R, vocabulary.group)
        ctx.set_materialize_grads(False)  # an entropy that is only measured costs nothing in backward
        ctx.save_for_backward(hidden_RH, weight_VH, tokens_R, norm_R, entropy_R)
        ctx.temperature, ctx.chunk_size, ctx.dtype, ctx.vocabulary = temperature, chunk_size, dtype, vocabulary
        return logprobs_R, entropy_R

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor, Tensor, None, None, None, None, None]:
        grad_logprobs_R, grad_entropy_R = gradients
        hidden_RH, weight_VH, tokens_R, norm_R, entropy_R = ctx.saved_tensors
        weight = weight_VH.to(ctx.dtype)
        column_R, here_R = _columns(tokens_R, len(weight), ctx.vocabulary)
        grad_hidden_RH = torch.empty_like(hidden_RH)
        grad_weight_VH = torch.zeros_like(weight_VH)
        for start in range(0, len(tokens_R), ctx.chunk_size):
            part = slice(start, start + ctx.chunk_size)
            hidden = hidden_RH[part].to(ctx.dtype)
            l_CV = _logits(hidden, weight, ctx.temperature).sub_(norm_R[part, None])
            p_CV = l_CV.exp()
            grad_CV = torch.zeros_like(p_CV)
            if grad_logprobs_R is not None:
                grad_CV = p_CV * -grad_logprobs_R[part, None]
                own_C = torch.where(here_R[part], grad_logprobs_R[part], 0.0)
                grad_CV.scatter_add_(1, column_R[part, None], own_C[:, None])
            if grad_entropy_R is not None:
                grad_CV -= l_CV.add_(entropy_R[part, None]).mul_(p_CV).mul_(grad_entropy_R[part, None])
            grad = grad_CV.mul_(1 / ctx.temperature).to(ctx.dtype)
            grad_hidden_RH[part] = (grad @ weight).to(hidden_RH.dtype)
            grad_weight_VH += grad.t() @ hidden
        if ctx.vocabulary is not None:
            dist.all_reduce(grad_hidden_RH, group=ctx.vocabulary.group)
        return grad_hidden_RH, grad_weight_VH, None, None, None, None, None


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


def _logits(hidden_CH: Tensor, weight_VH: Tensor, temperature: float) -> Tensor:
    """float32 logits. A GPU keeps the products' float32 sums; rounding logits to bfloat16 would cost 2-3 digits."""
    if hidden_CH.is_cuda and hidden_CH.dtype != torch.float32:
        logits_CV = torch.mm(hidden_CH, weight_VH.t(), out_dtype=torch.float32)
    else:
        logits_CV = (hidden_CH @ weight_VH.t()).float()
    return logits_CV if temperature == 1.0 else logits_CV.div_(temperature)
