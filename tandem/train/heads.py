"""What stands on a backbone: log-probs of tokens (actor, reference) or values. The value head IS the critic."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.functional import pad

from tandem.algorithms.value_loss import HlGauss, hl_gauss_value
from tandem.train.backend import Output, Pack
from tandem.train.logprobs import PLAIN, VocabularyPart, compiled_arithmetic, token_logprobs
from tandem.train.packs import ALIGNMENT
from tandem.train.torch.context import Context
from tandem.train.torch.placement import region_of


class TokenLogprobs(nn.Module):
    """The law that tokens are sampled from: log-probs and entropy at `temperature`, for the tokens the policy wrote."""

    def __init__(
        self,
        lm_head: nn.Module | None,
        *,
        temperature: float,
        chunk_size: int,
        vocabulary: VocabularyPart | None = None,
    ) -> None:
        """`lm_head` is the model's own output layer (`model.get_output_embeddings()`), a linear map without bias.

        `vocabulary` says which tokens its rows are, where they are not all.
        """
        super().__init__()
        if not isinstance(lm_head, nn.Linear) or lm_head.bias is not None:
            raise ValueError(f"the policy's output layer must be a linear map without bias, got {lm_head}")
        self.lm_head: nn.Linear = lm_head
        self.outputs = lm_head.out_features
        self._temperature = temperature
        self._chunk_size = -(-chunk_size // ALIGNMENT) * ALIGNMENT
        self._arithmetic = PLAIN
        self._vocabulary = vocabulary

    def compile_arithmetic(self) -> None:
        """Let torch.compile fuse what is done to logits."""
        self._arithmetic = compiled_arithmetic()

    def on(self, lm_head: nn.Linear, vocabulary: VocabularyPart | None) -> TokenLogprobs:
        """The same law on another output layer, or a part of one."""
        return TokenLogprobs(lm_head, temperature=self._temperature, chunk_size=self._chunk_size, vocabulary=vocabulary)

    def forward(self, hidden_PH: Tensor, pack: Pack, context: Context | None = None) -> Output:
        """Token t is predicted from t - 1. Rows are filled up to ALIGNMENT with the first one.

        Ranks that share a pack give the hidden states of their slices: each predicts the tokens that follow its own.
        """
        logprobs_P, entropy_P = self._predict(hidden_PH, pack, context)
        if context is not None:
            logprobs_P, entropy_P = context.total(logprobs_P), context.total(entropy_P)
        return Output(column_P=logprobs_P, entropy_P=entropy_P)

    def _predict(self, hidden_PH: Tensor, pack: Pack, context: Context | None) -> tuple[Tensor, Tensor]:
        wanted, start = pack.wanted_R, 0
        if context is not None:
            part = context.part(len(pack.tokens_P))
            wanted, start = wanted[(wanted > part.start) & (wanted <= part.stop)], part.start
        weight_VH, vocabulary = local_vocabulary(self.lm_head.weight)
        if not len(wanted):  # keep the graph whole: every gradient exists, and is 0
            nothing_P = torch.zeros_like(pack.tokens_P, dtype=torch.float32) + hidden_PH[0, 0] * 0 + weight_VH[0, 0] * 0
            return nothing_P, nothing_P
        rows = torch.cat([wanted, wanted[:1].expand(-len(wanted) % ALIGNMENT)])
        logprobs_R, entropy_R = token_logprobs(
            hidden_PH[rows - 1 - start],
            weight_VH,
            pack.tokens_P[rows],
            temperature=self._temperature,
            chunk_size=self._chunk_size,
            dtype=weight_VH.dtype,
            vocabulary=vocabulary or self._vocabulary,
            arithmetic=self._arithmetic,
        )
        return self._spread(logprobs_R, wanted, pack), self._spread(entropy_R, wanted, pack)

    def _spread(self, x_R: Tensor, wanted: Tensor, pack: Pack) -> Tensor:
        return x_R.new_zeros(pack.tokens_P.shape).index_put((wanted,), x_R[: len(wanted)])


def local_vocabulary(weight_VH: Tensor) -> tuple[Tensor, VocabularyPart | None]:
    """The rows of the output layer that this rank has, and which those are where tensor ranks share them."""
    if not isinstance(weight_VH, DTensor):
        return weight_VH, None
    first = region_of(weight_VH)[0].start
    return weight_VH.to_local(), VocabularyPart(first, weight_VH.device_mesh.get_group())


class ValueHead(nn.Module):
    """hidden -> value, or bins whose expectation is the value. Zero at first: the critic starts by claiming nothing."""

    def __init__(self, hidden_size: int, *, support: tuple[float, float, int] | None = None) -> None:
        """`support` is (lowest, highest, number) of the bins; None is one scalar."""
        super().__init__()
        bins = 1 if support is None else support[2]
        self.outputs = bins
        self.linear = nn.Linear(hidden_size, bins, bias=False)
        nn.init.zeros_(self.linear.weight)
        self._histogram = None if support is None else HlGauss(*support)

    def forward(self, hidden_PH: Tensor, pack: Pack, context: Context | None = None) -> Output:
        """Always in float32: values are compared with returns. At t stands the state before token t.

        Ranks that share a pack give the hidden states of their slices.
        """
        after_PB = self.linear(hidden_PH.float())
        if context is not None:
            part = context.part(len(pack.tokens_P))
            after_PB = context.total(pad(after_PB, (0, 0, part.start, len(pack.tokens_P) - part.stop)))
        # A sum, not a view: FSDP hooks what a module returns, and warns of views.
        after_P = after_PB.sum(1) if self._histogram is None else hl_gauss_value(after_PB, self._histogram)
        column_P = torch.where(pack.positions_P > 0, after_P.roll(1), 0.0)
        return Output(column_P, after_P=after_P, logits_PB=None if self._histogram is None else after_PB.roll(1, 0))
