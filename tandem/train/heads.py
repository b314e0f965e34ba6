"""What stands on a backbone: log-probs of tokens (actor, reference) or values (critic). The value head IS the critic."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tandem.train.backend import Output, Pack
from tandem.train.logprobs import token_logprobs
from tandem.train.packs import ALIGNMENT


class TokenLogprobs(nn.Module):
    """The law that tokens are sampled from: log-probs and entropy at `temperature`, for the tokens the policy wrote."""

    def __init__(self, lm_head: nn.Module, *, temperature: float, chunk_size: int) -> None:
        """`lm_head` is the model's own output layer (`model.get_output_embeddings()`), a linear map without bias."""
        super().__init__()
        if not isinstance(lm_head, nn.Linear) or lm_head.bias is not None:
            raise ValueError(f"the policy's output layer must be a linear map without bias, got {lm_head}")
        self.lm_head = lm_head
        self._temperature = temperature
        self._chunk_size = -(-chunk_size // ALIGNMENT) * ALIGNMENT

    def forward(self, hidden_PH: Tensor, pack: Pack, dtype: torch.dtype) -> Output:
        """Products in `dtype`. Token t is predicted from t - 1; rows are filled up to ALIGNMENT with the first one."""
        wanted = pack.mask_P.nonzero().squeeze(1)
        if not len(wanted):  # keep the graph whole: every gradient exists, and is 0
            nothing_P = hidden_PH[:, 0].float() * 0 + self.lm_head.weight[0, 0] * 0
            return Output(column_P=nothing_P, entropy_P=nothing_P)
        rows = torch.cat([wanted, wanted[:1].expand(-len(wanted) % ALIGNMENT)])
        logprobs_R, entropy_R = token_logprobs(
            hidden_PH[rows - 1],
            self.lm_head.weight,
            pack.tokens_P[rows],
            temperature=self._temperature,
            chunk_size=self._chunk_size,
            dtype=dtype,
        )
        return Output(column_P=self._spread(logprobs_R, wanted, pack), entropy_P=self._spread(entropy_R, wanted, pack))

    def _spread(self, x_R: Tensor, wanted: Tensor, pack: Pack) -> Tensor:
        return x_R.new_zeros(pack.tokens_P.shape).index_put((wanted,), x_R[: len(wanted)])


class ValueHead(nn.Module):
    """hidden -> value, or bins whose expectation is the value. Zero at first: the critic starts by claiming nothing."""

    def __init__(self, hidden_size: int, *, support: tuple[float, float, int] | None = None) -> None:
        """`support` is (lowest, highest, number) of the bins' centres; None is one scalar."""
        super().__init__()
        bins = 1 if support is None else support[2]
        self.linear = nn.Linear(hidden_size, bins)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)
        self._support = support

    def forward(self, hidden_PH: Tensor, pack: Pack, dtype: torch.dtype) -> Output:
        """float32 whatever `dtype` is: values are compared with returns. At t stands the state before token t."""
        with torch.autocast(hidden_PH.device.type, enabled=False):
            logits_PB = self.linear(hidden_PH.float()).roll(1, 0)
        seen_P = pack.positions_P > 0
        if self._support is None:
            return Output(column_P=torch.where(seen_P, logits_PB.squeeze(1), 0.0))
        low, high, bins = self._support
        centres_B = torch.linspace(low, high, bins, device=hidden_PH.device)
        values_P = (logits_PB.softmax(-1) * centres_B).sum(-1)
        return Output(column_P=torch.where(seen_P, values_P, 0.0), logits_PB=logits_PB)
