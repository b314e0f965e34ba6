"""The reference engine: a transformers model with continuous batching."""

from __future__ import annotations

from transformers import PreTrainedModel

from tandem import onednn
from tandem.rollout.attention import install_attention
from tandem.rollout.decoding import DecodeBatch
from tandem.rollout.loading import refuse_unsupported
from tandem.rollout.stops import Decode
from tandem.rollout.threaded import ThreadedEngine


def decode_batch(
    model: PreTrainedModel, *, max_concurrent_samples: int, max_total_sequence_length: int, pad_token_id: int
) -> DecodeBatch:
    """`model` is a causal LM on its device, in its precision, in eval mode; it now belongs to the decoder."""
    refuse_unsupported(model, max_total_sequence_length)
    install_attention(model)
    if onednn.pays(model.device, model.dtype):
        onednn.use(model)
    return DecodeBatch(
        model, max_rows=max_concurrent_samples, max_length=max_total_sequence_length, pad_token_id=pad_token_id
    )


def transformers_engine(
    model: PreTrainedModel,
    *,
    max_concurrent_samples: int,
    max_total_sequence_length: int,
    pad_token_id: int,
    decode: Decode | None = None,
    threads: int | None = None,
) -> ThreadedEngine:
    """An engine whose results depend on prompt, sampling and weights only; in float32 on a CPU bit for bit.

    `decode`: ids to text, where requests have stop strings. `threads`: of torch; None is its own choice.
    """
    decoder = decode_batch(
        model,
        max_concurrent_samples=max_concurrent_samples,
        max_total_sequence_length=max_total_sequence_length,
        pad_token_id=pad_token_id,
    )
    return ThreadedEngine(decoder, name="transformers-engine", decode=decode, threads=threads)
