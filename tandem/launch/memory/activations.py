"""What passes take: the bytes that a layer keeps for its backward pass, and what layers and head need while they run.

Each number is a tensor that the code saves; docs/memory.md lists them. Pure arithmetic. In the formulas: H hidden, Q
query width, K key width, I MLP width, A heads, V vocabulary, C tokens of a chunk of logits, b bytes of a number, t
tensor-parallel ranks, s = t where these cut the tokens between products (else 1).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tandem.launch.memory.sizes import ModelSize, Ranks

F32 = 4


@dataclass(frozen=True)
class Passes:
    """How a model is run on a rank. `tokens` and `head_tokens` are of a micro-batch there, its tail included."""

    backend: Literal["torch", "megatron"]
    number: int  # bytes of a number: 2 or 4
    checkpointing: Literal["none", "selective", "full"]
    compiled: bool
    kernel: Literal["varlen", "sdpa"]
    value: bool  # a value head in the place of the output layer
    chunk: int  # tokens whose logits exist at one time
    tempered: bool  # logits are divided by a temperature
    tokens: int
    longest: int  # tokens of the longest sequence

    @property
    def mode(self) -> Literal["none", "selective", "full"]:
        """Megatron-Core's layers know none and full."""
        return "none" if self.backend == "megatron" and self.checkpointing == "selective" else self.checkpointing


def kept(size: ModelSize, ranks: Ranks, passes: Passes) -> int:
    """Bytes that a layer keeps of each token of this rank until its backward pass."""
    if passes.mode == "full":
        return passes.number * size.hidden // ranks.between  # what enters it
    if passes.mode == "selective":
        return _selective(size, ranks, passes)
    return whole_layer(size, ranks, passes)


def whole_layer(size: ModelSize, ranks: Ranks, passes: Passes) -> int:
    """Bytes that a layer saves of each token without checkpointing; with it, what it makes anew in backward."""
    b, t, s, H, In = passes.number, ranks.tensor, ranks.between, size.hidden, size.intermediate
    attention = _attention(size, ranks, passes)
    if passes.backend == "megatron":
        # Two norms' inputs and results; gate and up, silu's result, up + offset, their product.
        return b * 4 * H // s + attention + b * 5 * In // t
    if passes.compiled:
        # inductor keeps a norm's input and result, makes silu's result anew, and keeps the product.
        return b * 4 * H + attention + b * 3 * In
    # Two eager norms: float32 input and its scale, what meets the weight, the result that enters a product.
    norms = 2 * (F32 * H // s + F32 + b * H // s + b * H)
    return norms + attention + b * 4 * In // t  # gate, silu's result, up, their product


def _attention(size: ModelSize, ranks: Ranks, passes: Passes) -> int:
    """Rotated queries and keys, values, the result and its norms; keys and values come from all context ranks."""
    b, t = passes.number, ranks.tensor
    inputs = b * (size.query + 2 * size.key * ranks.context) // t
    result = b * size.query // t + F32 * size.heads // t
    if passes.kernel == "varlen":
        return inputs + result
    padded = b * size.query // t  # the result once more, packed again
    return inputs + result + padded + _scores(size, ranks, passes)


def _scores(size: ModelSize, ranks: Ranks, passes: Passes) -> int:
    """Without a kernel for it (float32 with fewer key heads), torch writes every weight of attention down."""
    if passes.number == F32 and size.key != size.query:
        return F32 * size.heads // ranks.tensor * passes.longest
    return 0


def _selective(size: ModelSize, ranks: Ranks, passes: Passes) -> int:
    """What enters the layer, results of products and of attention. An eager product's result is kept, used or not."""
    b, t, s, H, In = passes.number, ranks.tensor, ranks.between, size.hidden, size.intermediate
    outs = b * (H // s if passes.compiled else 2 * H // s)  # o_proj; eager also down_proj
    attention = b * (2 * size.query + 2 * size.key * ranks.context) // t + F32 * size.heads // t
    return b * H // s + attention + outs + b * 2 * In // t


def layer_work(size: ModelSize, ranks: Ranks, passes: Passes) -> int:
    """Bytes that exist at one time while a layer's backward pass runs, beside what is kept."""
    b, t = passes.number, ranks.tensor
    again = whole_layer(size, ranks, passes) - kept(size, ranks, passes)
    gradients = b * ((3 if passes.compiled else 5) * size.intermediate // t + 2 * size.hidden)
    scores = 2 * _scores(size, ranks, passes) if passes.kernel == "sdpa" else 0
    weights = b * size.layer // t + (b * _output_weights(size) // t if not passes.value and not size.output else 0)
    if ranks.sharded:
        weights += (b + F32) * size.layer // t  # whole, and in float32 as it is added up over the ranks
    return (max(again, 0) + gradients + scores) * passes.tokens + weights


def infer_work(size: ModelSize, ranks: Ranks, passes: Passes) -> int:
    """Bytes of one layer at a time, without a graph; a compiled one of a trained model keeps what training would."""
    hidden = passes.number * 2 * size.hidden
    scores = _scores(size, ranks, passes) if passes.kernel == "sdpa" else 0
    mlp = passes.number * 3 * size.intermediate // ranks.tensor
    layer = whole_layer(size, ranks, passes) if passes.compiled else mlp + hidden + scores
    return (hidden + layer) * passes.tokens


def head_kept(size: ModelSize, passes: Passes) -> int:
    """Bytes of each token between the last layer and the head's result: last norm, and what the head reads."""
    b, H = passes.number, size.hidden
    norm = 2 * b * H if passes.backend == "megatron" else F32 * H + 2 * b * H
    return norm + (F32 * H if passes.value else b * H)


def head_work(size: ModelSize, ranks: Ranks, passes: Passes) -> tuple[int, int]:
    """Bytes of the head's backward pass: gradients of its input and weight, and the chunk's logits."""
    b = passes.number
    entering = b * size.hidden * passes.tokens
    if passes.value:
        return entering + F32 * size.hidden * passes.tokens, 0
    weight = F32 * _output_weights(size) // ranks.tensor  # added up over the chunks in float32, then cast
    cast = b * _output_weights(size) // ranks.tensor
    logits = _chunk(size, ranks, passes) * (F32 + b if passes.compiled else _eager_logits(passes, backward=True))
    return entering + weight + max(0, cast - logits), logits


def head_infer(size: ModelSize, ranks: Ranks, passes: Passes) -> int:
    """Bytes of a chunk's logits where only log-probs are wanted."""
    if passes.value:
        return F32 * size.hidden * passes.tokens
    return _chunk(size, ranks, passes) * (F32 if passes.compiled else _eager_logits(passes, backward=False))


def _output_weights(size: ModelSize) -> int:
    return size.vocabulary * size.hidden


def _chunk(size: ModelSize, ranks: Ranks, passes: Passes) -> int:
    return min(passes.chunk, passes.tokens) * size.vocabulary // ranks.tensor


def _eager_logits(passes: Passes, *, backward: bool) -> int:
    """Bytes a logit. `logits_gradient` has six float32 of them and a mask at one time, `chunk_statistics` three."""
    return F32 * ((6 if backward else 3) + passes.tempered) + backward
