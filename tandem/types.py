"""The nouns every room shares: prompts, samples, groups, batches, generations and metrics that merge exactly.

Shape legend (suffixes of tensor names, everywhere):
    N samples of a batch    G groups    T tokens of a padded row, prompt and response together
    P tokens of a pack, end to end   V vocabulary    H hidden size    B bins of a value head
Token alignment: slot t of a per-token column belongs to token t given the tokens before it; `values` at t is the
critic's estimate of the state before token t. Position 0 of a row has no context: its mask is always False.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

FinishReason = Literal["stop", "length"]


FailureKind = Literal["data", "infrastructure"]


class RolloutFailed(Exception):
    """The one survivable error: this rollout gives no samples. Counted, budgeted, logged; its ticket returns.

    `data`: the prompt, its answer or its score is at fault, the same again would fail again. `infrastructure`: the
    machinery is, a timeout or a dead engine; the same request may succeed elsewhere or later.
    """

    def __init__(self, message: str, kind: FailureKind = "data") -> None:
        super().__init__(message)
        self.kind: FailureKind = kind


class EngineDied(RuntimeError):
    """An engine has ended, by an error, with its process or because it was closed: it serves no call any more.

    The request is not at fault: another engine with the same weights answers it with the same tokens.
    """


@dataclass(frozen=True)
class Prompt:
    """One prompt. `index` is its place in the run's stream, over epochs; `id` is the data set's own name for it."""

    index: int
    id: str
    question: str
    answer: str
    tokens: tuple[int, ...]


@dataclass(frozen=True)
class Sampling:
    """The law a response is drawn from, and where it ends. `temperature` 0 is greedy, with log-probs at 1."""

    max_new_tokens: int
    temperature: float
    seed: int
    stop_token_ids: tuple[int, ...]
    top_k: int | None = None
    top_p: float = 1.0
    stop_strings: tuple[str, ...] = ()


@dataclass(frozen=True)
class Generation:
    """What an engine wrote: ids (what stopped it too), their log-probs under the sampled law, the version of each."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: tuple[int, ...]
    finish_reason: FinishReason
    engine: int = field(default=0, compare=False)  # the number of the one that wrote it, where there are several


@dataclass(frozen=True)
class Score:
    """A verifier's verdict. `components` are named parts of the reward, logged one by one."""

    reward: float
    components: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Reply:
    """What an environment says to the policy between two of its turns. `name`: of the tool that says it."""

    role: Literal["user", "tool"]
    content: str
    name: str | None = None


@dataclass(frozen=True)
class Sample:
    """One episode as an environment returns it: the whole row, and which of its tokens the policy wrote."""

    tokens: tuple[int, ...]
    mask: tuple[bool, ...]
    logprobs: tuple[float, ...]
    versions: tuple[int, ...]
    score: Score
    truncated: bool
    text: str
    trained: bool = True  # False: an environment takes this sample out of every loss, baseline and statistic

    def __post_init__(self) -> None:
        lengths = {len(self.tokens), len(self.mask), len(self.logprobs), len(self.versions)}
        if len(lengths) != 1:
            raise ValueError(f"a sample's tokens, mask, logprobs and versions must be of one length, got {lengths}")


@dataclass(frozen=True)
class Group:
    """The samples of one prompt as handles: keys into the data plane, and the few numbers the controller needs."""

    index: int
    prompt_id: str
    keys: tuple[int, ...]
    lengths: tuple[int, ...]
    written: tuple[int, ...]
    rewards: tuple[float, ...]
    truncated: tuple[bool, ...]
    components: Mapping[str, tuple[float, ...]]
    oldest_version: int
    newest_version: int


@dataclass(frozen=True)
class Trace:
    """The place of a mini-batch in its step. Trainers that learn from a batch with one write down what they saw."""

    epoch: int
    mini_batch: int

    def column(self, trainer: str, name: str) -> str:
        """The plane's column of what a trainer writes down; a later epoch has columns of its own."""
        return f"epoch_{self.epoch}/{trainer}/{name}"


@dataclass(frozen=True)
class Batch:
    """A handle to samples in the data plane. Rows keep this order everywhere; lengths are in tokens, prompt included.

    `groups` labels each sample with its group, by the index of its prompt; `components` names the parts of the reward.
    """

    keys: tuple[int, ...]
    lengths: tuple[int, ...]
    groups: tuple[int, ...]
    components: tuple[str, ...] = ()
    trace: Trace | None = None

    @staticmethod
    def of(groups: Sequence[Group]) -> Batch:
        """The samples of these groups, which all have the same reward components."""
        rows = [(key, length, g.index) for g in groups for key, length in zip(g.keys, g.lengths, strict=True)]
        return Batch(
            tuple(key for key, _, _ in rows),
            tuple(length for _, length, _ in rows),
            tuple(label for _, _, label in rows),
            tuple(groups[0].components),
        )

    @staticmethod
    def join(parts: Sequence[Batch]) -> Batch:
        """One batch of several, in their order."""
        return Batch(
            tuple(key for part in parts for key in part.keys),
            tuple(length for part in parts for length in part.lengths),
            tuple(label for part in parts for label in part.groups),
            parts[0].components,
        )

    def pick(self, positions: Iterable[int]) -> Batch:
        """The samples at these positions, in this order."""
        at = list(positions)
        return replace(
            self,
            keys=tuple(self.keys[i] for i in at),
            lengths=tuple(self.lengths[i] for i in at),
            groups=tuple(self.groups[i] for i in at),
        )

    def __len__(self) -> int:
        return len(self.keys)


@dataclass(frozen=True)
class Sum:
    """A count or an amount: merging adds."""

    amount: float

    def merge(self, other: Sum) -> Sum:
        return Sum(self.amount + other.amount)

    @property
    def value(self) -> float:
        return self.amount


@dataclass(frozen=True)
class Mean:
    """A weighted mean kept as its two sums, so that merging parts gives the mean of the whole."""

    total: float
    count: float

    def merge(self, other: Mean) -> Mean:
        return Mean(self.total + other.total, self.count + other.count)

    @property
    def value(self) -> float:
        return self.total / self.count if self.count else float("nan")


@dataclass(frozen=True)
class Max:
    """A largest value: merging takes the larger."""

    largest: float

    def merge(self, other: Max) -> Max:
        return Max(max(self.largest, other.largest))

    @property
    def value(self) -> float:
        return self.largest


@dataclass(frozen=True)
class Min:
    """A smallest value: merging takes the smaller."""

    smallest: float

    def merge(self, other: Min) -> Min:
        return Min(min(self.smallest, other.smallest))

    @property
    def value(self) -> float:
        return self.smallest


Metric = Sum | Mean | Max | Min
Metrics = dict[str, Metric]


def merge(*parts: Mapping[str, Metric]) -> Metrics:
    """Merge metrics name by name. Two parts of one name must be of one kind."""
    merged: Metrics = {}
    for part in parts:
        for name, metric in part.items():
            if name not in merged:
                merged[name] = metric
                continue
            known = merged[name]
            if type(known) is not type(metric):
                raise TypeError(f"metric {name!r} is a {type(known).__name__} here and a {type(metric).__name__} there")
            merged[name] = known.merge(metric)  # type: ignore[arg-type]  # same kind, checked above
    return merged
