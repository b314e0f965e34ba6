"""What a worker asks of the machinery that holds a model: run packs, add gradients, step, save. One class a library."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch
from torch import Tensor

from tandem.roles import WriteFiles
from tandem.train.sharding import Shard
from tandem.types import Metrics

if TYPE_CHECKING:
    from tandem.train.flops import Machine


@dataclass(frozen=True)
class Pack:
    """One micro-batch: whole rows end to end, and a dummy tail that is a sequence of its own.

    The tail fills the tokens up to a multiple of `SequencePacking.multiple`; its mask is False and its columns are 0.
    `sample_P` numbers the sequences of the pack (the tail too); `cu_seqlens` holds their borders, tail included, as
    plain ints.
    """

    rows: tuple[int, ...]  # the places of these samples in the batch
    keys: tuple[int, ...]
    lengths: tuple[int, ...]  # without the tail
    cu_seqlens: tuple[int, ...]
    tokens_P: Tensor
    positions_P: Tensor
    sample_P: Tensor
    mask_P: Tensor
    wanted_R: Tensor  # the places where mask_P is True: known here, so that no device is asked
    columns: Mapping[str, Tensor]

    @property
    def tokens(self) -> int:
        """Real tokens: the tail does not count."""
        return sum(self.lengths)

    def to(self, device: torch.device) -> Pack:
        """The same pack on another device."""
        return replace(
            self,
            tokens_P=send(self.tokens_P, device),
            positions_P=send(self.positions_P, device),
            sample_P=send(self.sample_P, device),
            mask_P=send(self.mask_P, device),
            wanted_R=send(self.wanted_R, device),
            columns={name: send(column, device) for name, column in self.columns.items()},
        )


def send(x: Tensor, device: torch.device) -> Tensor:
    """To a device without waiting for what it has to do before: that takes pinned memory."""
    return x.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else x.to(device)


class Output(NamedTuple):
    """What a head says about every token of a pack, given the tokens before it; 0 where it was not asked.

    A named tuple, because FSDP looks into what a module returns for the tensors that backward begins with.
    `column_P` is the row that inference stores: log-probs (with their `entropy_P`) or values. A critic also gives the
    values `after_P` each token, which the last token of a truncated sample needs, and `logits_PB` if it has bins.
    """

    column_P: Tensor
    entropy_P: Tensor | None = None
    after_P: Tensor | None = None
    logits_PB: Tensor | None = None


# (what the head said, the pack on the same device) -> (sum of the weighted losses, metrics).
Loss = Callable[[Output, Pack], tuple[Tensor, Metrics]]


@dataclass(frozen=True)
class StepReport:
    """What an optimizer step did. `refused`: NaN or Inf in a loss or the gradient, so nothing has changed."""

    grad_norm: float  # after the division, before clipping
    lr: float
    refused: bool = False
    refusals_left: int = 0  # negative: the budget is spent


class Backend(Protocol):
    """A model with its head and optimizer. Called from one thread at a time; blocks until done.

    On several ranks every one of them makes the same calls in the same order, each with the packs of its own shard.
    """

    @property
    def shard(self) -> Shard:
        """The share of every batch whose packs this rank is to be given."""
        ...

    @property
    def machine(self) -> Machine:
        """What a rank computes with, for FLOPs."""
        ...

    def infer(self, packs: Sequence[Pack]) -> Iterator[Output]:
        """`column_P` and `after_P` of each pack, on the CPU, in order."""
        ...

    def forward_backward(self, packs: Sequence[Pack], loss: Loss) -> Metrics:
        """Add the gradient of the sum of `loss` over the packs. A pipeline schedule may call `loss` where it likes."""
        ...

    def optim_step(self, divisor: float) -> StepReport:
        """Divide, clip, step, clear. A NaN or Inf since the last step refuses it: only the gradient is cleared."""
        ...

    def park(self) -> None:
        """Free the device's memory as far as the recipe's `offload` says. Whatever is called next comes back."""
        ...

    def export_weights(self) -> Iterator[tuple[str, Tensor]]: ...

    def snapshot(self, copy: bool) -> WriteFiles:
        """Weights, optimizer and counts as they are now; `copy` lets training go on before they are written."""
        ...

    def load(self, directory: Path) -> None: ...

    def load_weights(self, directory: Path) -> None:
        """Only the weights; the optimizer stays as it is built."""
        ...

    def close(self) -> None: ...
