"""What an engine's thread drives: sequences being written, and the decoder that writes them, one token a step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from tandem.roles import Fingerprint, NamedTensors
from tandem.types import FinishReason, Metrics, RolloutFailed, Sampling


@dataclass(eq=False)
class Row:
    """A sequence being written."""

    prompt: tuple[int, ...]
    sampling: Sampling
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)  # shorter than tokens until sign()
    looked: int = 0  # so many tokens have been searched for stop strings

    def sign(self, version: int) -> None:
        """All tokens since the last signature were drawn by this version."""
        self.versions += [version] * (len(self.tokens) - len(self.versions))

    def clear(self) -> None:
        """Forget what was written."""
        self.cut(0)
        self.looked = 0

    def cut(self, count: int) -> None:
        """Forget what was written behind so many tokens."""
        for column in (self.tokens, self.logprobs, self.versions):
            del column[count:]

    def cached_text(self) -> list[int]:
        """All but the last token, which the next step reads."""
        return [*self.prompt, *self.tokens][:-1]

    def next_input(self) -> int:
        return self.tokens[-1] if self.tokens else self.prompt[-1]

    def position(self) -> int:
        """Of the next input."""
        return len(self.prompt) + len(self.tokens) - 1


Finished = tuple[Row, FinishReason | RolloutFailed]


class Decoder(Protocol):
    """A model with its cache. Synchronous: one thread owns it. An error of step() leaves it unusable."""

    @property
    def vocabulary(self) -> int: ...

    @property
    def max_length(self) -> int:
        """Tokens of prompt and response together."""
        ...

    @property
    def free(self) -> int:
        """Rows that `admit` may bring."""
        ...

    def admit(self, rows: Sequence[Row]) -> None:
        """Begin these rows. One that was removed may come again: it goes on behind the tokens that it has."""
        ...

    def remove(self, row: Row) -> None:
        """A row that runs is wanted no more."""
        ...

    def step(self) -> list[Finished]:
        """Write at most one token in every row: all tokens of a step are drawn with the present weights."""
        ...

    def recompute(self) -> None:
        """The rows that run continue as if their text had been read with the present weights."""
        ...

    def sleep(self, *, keep_weights: bool) -> Metrics:
        """No row runs. Leave the device; what is not kept is loaded before the next step. See the Engine role."""
        ...

    def wake(self) -> Metrics:
        """Room for weights again."""
        ...

    def wake_cache(self) -> None:
        """Room for rows again, and the weights are there."""
        ...

    def load_weights(self, weights: NamedTensors) -> None:
        """Between two steps. New rows read nothing that was cached before. ValueError: wrong weights, none changed."""
        ...

    def fingerprint(self) -> Fingerprint: ...

    def close(self) -> None:
        """Give back memory and processes."""
        ...


def check_request(tokens: Sequence[int], sampling: Sampling, decoder: Decoder) -> None:
    """Raise ValueError for a request that no engine could serve, RolloutFailed for one that is too long for this."""
    if not tokens:
        raise ValueError("the prompt is empty: give at least one token, e.g. the tokenizer's bos")
    if min(tokens) < 0 or max(tokens) >= decoder.vocabulary:
        raise ValueError(
            f"the prompt's token ids run from {min(tokens)} to {max(tokens)}, the vocabulary is {decoder.vocabulary}"
        )
    if sampling.max_new_tokens < 1:
        raise ValueError(f"max_new_tokens must be at least 1, got {sampling.max_new_tokens}")
    if not 0 <= sampling.temperature < math.inf:
        raise ValueError(f"temperature must be finite and not negative (0: greedy), got {sampling.temperature}")
    if sampling.top_k is not None and sampling.top_k < 1:
        raise ValueError(f"top_k must be at least 1, or None for the whole vocabulary, got {sampling.top_k}")
    if not 0 < sampling.top_p <= 1:
        raise ValueError(f"top_p must be in (0, 1], got {sampling.top_p}")
    if len(tokens) + sampling.max_new_tokens > decoder.max_length:
        raise RolloutFailed(
            f"a prompt of {len(tokens)} tokens and max_new_tokens {sampling.max_new_tokens} make "
            f"{len(tokens) + sampling.max_new_tokens}, over max_total_sequence_length {decoder.max_length}"
        )


def ending(row: Row) -> FinishReason | RolloutFailed | None:
    """Why a row ends with the token just written, or None."""
    if not math.isfinite(row.logprobs[-1]):
        place = f"at position {row.position()} (new token {len(row.tokens)})"
        return RolloutFailed(f"the model's logits are not finite {place}: log-prob {row.logprobs[-1]}")
    if row.tokens[-1] in row.sampling.stop_token_ids:
        return "stop"
    return "length" if len(row.tokens) == row.sampling.max_new_tokens else None
