"""THE architecture on one page: the roles that rooms play for each other. Only launch/ knows who plays them.

Everything that may wait is async. Tensors move through the DataPlane or the WeightSync; the controller holds handles.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol, runtime_checkable

from tandem.types import Batch, Generation, Group, Metrics, Prompt, Sample, Sampling, Score

if TYPE_CHECKING:
    import torch

# A weight by its Hugging Face name. Bytes of equal weights are equal; order is the model's own.
NamedTensors = Iterable[tuple[str, "torch.Tensor"]]
# Writes a snapshot into a directory, which it makes. Runs in any thread, at any later time.
WriteFiles = Callable[[Path], None]
# What becomes of the requests that an engine has begun when it pauses, see Engine.pause().
Pause = Literal["drain", "stand", "reissue", "rewrite"]
# Tensor name -> digest of its bytes.
Fingerprint = Mapping[str, str]


class Write(Protocol):
    """An environment asks for text with this: the row so far -> what the policy writes next.

    At most `max_new_tokens`; None: as many as the recipe allows for one response, and never more than that.
    """

    def __call__(self, tokens: Sequence[int], *, max_new_tokens: int | None = None) -> Awaitable[Generation]: ...


@runtime_checkable
class WeightStream(Protocol):
    """NamedTensors that come a few at a time, and are checked before the first comes: what will come is known.

    A tensor may be kept, but who keeps none holds few at any time. An engine of several processes reads in each.
    """

    @property
    def shapes(self) -> Sequence[tuple[str, tuple[int, ...]]]:
        """Name and shape of all that will come."""
        ...

    def open(self, share: int) -> Iterator[tuple[str, torch.Tensor]]:
        """Read, in the engine's process of this number; the first is 0."""
        ...

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Read in an engine of one process."""
        ...


class Dataset(Protocol):
    """Prompts by index: `prompt(i)` is a pure function of (seed, i), so a position is all a checkpoint needs."""

    def __len__(self) -> int:
        """Prompts in one epoch."""
        ...

    def prompt(self, index: int) -> Prompt:
        """The prompt at a place of the run's stream; index // len is the epoch."""
        ...


class Verifier(Protocol):
    """Scores one response. Raises RolloutFailed when it cannot: an error is never a reward of 0."""

    async def score(self, prompt: Prompt, response: str) -> Score: ...

    async def close(self) -> None:
        """End what it holds: processes, connections."""
        ...


class Environment(Protocol):
    """Plays one episode of a prompt: asks for text, answers, scores."""

    async def play(self, prompt: Prompt, write: Write) -> Sample: ...

    async def close(self) -> None:
        """End what it holds, its verifier too."""
        ...


class Engine(Protocol):
    """Writes tokens. One call is one sequence; batching is the engine's business. Results do not depend on it.

    A token carries the version that drew it. What was cached under older weights never serves a new request.
    An engine that has ended raises EngineDied: from every call that waits, and from every later one but close().
    """

    async def generate(self, tokens: Sequence[int], sampling: Sampling) -> Generation: ...

    async def pause(self, kind: Pause = "drain") -> Metrics:
        """New requests wait until resume(). What becomes of those begun, until this returns:

        - `drain`: they end.
        - `stand`: they stand still between two tokens, and keep their places and caches.
        - `reissue`: they are aborted and wait again, before all others; resume() issues them with their text as prompt.
          No token is lost and none counts twice: not against max_new_tokens, nor in the random numbers of the seed.
        - `rewrite`: they are aborted, and issued again as they came. What they had written is thrown away.

        After all but `stand` no request is begun. The metrics, of the last two: `weights/reissued_requests`, and the
        tokens that these had: `weights/kept_tokens` or `weights/discarded_tokens`.
        """
        ...

    async def resume(self, *, recompute_kv: bool = False) -> None:
        """Write on. `recompute_kv`: first cache the text of the requests begun anew, under the present weights.

        From then on they write what an engine would that holds these weights only and is given their text as prompt.
        Without it they write on with the keys and values of the weights that read each token.
        """
        ...

    async def load_weights(self, version: int, weights: NamedTensors) -> None:
        """Take these weights as `version`. Only while paused, in either way, and awake."""
        ...

    async def sleep(self, *, keep_weights: bool) -> Metrics:
        """Leave the device as far as it can, weights and cache; only while paused with no request begun.

        Without `keep_weights` they are lost: load_weights() must follow wake(). The metrics, here and of wake(): the
        device's memory in use before and after, `gpu/...` in bytes; none on a CPU.
        """
        ...

    async def wake(self) -> Metrics:
        """Take the weights' memory again, still paused. The cache's comes with resume()."""
        ...

    async def fingerprint(self) -> Fingerprint:
        """Digest of the weights that the next token will be written with."""
        ...

    async def close(self) -> None: ...


class Trainer(Protocol):
    """A model that infers and learns. Actor, critic and reference are all Trainers: head and loss differ."""

    async def infer(self, batch: Batch, out: str) -> Metrics:
        """Forward only; one row a sample is put into the plane's column `out`."""
        ...

    async def forward_backward(self, batch: Batch, scale: Mapping[str, float]) -> Metrics:
        """Add the gradient of the SUM of the weighted losses; may be called in chunks. `scale`: of auxiliary terms."""
        ...

    async def optim_step(self, divisor: float) -> Metrics:
        """Divide the gradient by `divisor`, clip, step, clear."""
        ...

    async def park(self) -> None:
        """Others compute next: leave the device as far as the recipe says (`offload`). The next call comes back.

        An accumulated gradient is kept. Weights are brought to engines and snapshots taken from wherever they are.
        """
        ...

    async def snapshot(self, *, copy: bool) -> WriteFiles:
        """Weights, optimizer and counts as they are now. Without `copy`, write them before anything trains again."""
        ...

    async def load(self, directory: Path) -> None:
        """Continue from a snapshot's files. Another architecture: ValueError naming the first tensor that differs."""
        ...

    async def load_weights(self, directory: Path) -> None:
        """Start from a snapshot's weights alone, with a fresh optimizer."""
        ...

    async def close(self) -> None: ...


class DataPlane(Protocol):
    """Columns of ragged rows, one tensor a sample. A missing row or column is a KeyError: never a wait, never zeros.

    A plane of several processes has a deadline on every call: past it, or when one of them dies, a RuntimeError.
    """

    async def put(self, keys: Sequence[int], columns: Mapping[str, Sequence[torch.Tensor]]) -> None:
        """Add columns to rows, whole or not at all. A row that is new begins here, a column that is there is replaced.

        A key twice or a column of another length is a ValueError, another dtype than the column has a TypeError, no
        room a RuntimeError: all before anything is written.
        """
        ...

    async def get(self, keys: Sequence[int], names: Sequence[str]) -> dict[str, list[torch.Tensor]]: ...

    async def drop(self, keys: Sequence[int]) -> None:
        """Forget whole rows. Dropping what is not there is no error."""
        ...

    async def snapshot(self, keys: Sequence[int]) -> WriteFiles:
        """These rows with all their columns as they are now."""
        ...

    async def load(self, directory: Path) -> None:
        """Take the rows of a snapshot's files, of whichever plane, beside those that are here."""
        ...

    def drain(self) -> Metrics:
        """plane/bytes_put and plane/bytes_get: what this process moved since the last drain."""
        ...

    async def close(self) -> None: ...


@dataclass(frozen=True)
class Delivery:
    """What a carrier brought: the trainer's own fingerprint of it, and its size."""

    fingerprint: Fingerprint
    bytes: int


class Carrier(Protocol):
    """One way from a trainer's weights to engines: a reference, shared memory, a collective."""

    async def prepare(self) -> None:
        """All that can be done while the engines still write."""
        ...

    async def deliver(self, version: int) -> Delivery:
        """Every engine takes the weights as `version`. They are paused; that one ignores them is not seen here."""
        ...


class WeightSync(Protocol):
    """Trainer -> engines. Afterwards every engine's fingerprint equals the trainer's, or the run ends."""

    async def publish(self, version: int) -> Metrics: ...


class Algorithm(Protocol):
    """Learns from one batch."""

    async def step(self, chunks: AsyncIterator[Batch], *, step: int, train_policy: bool) -> Metrics:
        """The step's samples arrive in chunks. `train_policy` is False in critic warm-up: only the critic learns."""
        ...

    def state(self) -> dict[str, float]:
        """What a checkpoint must keep beside the models."""
        ...

    def restore(self, state: Mapping[str, float]) -> None: ...


class RollOut(Protocol):
    """Prompt -> finished group, its rows in the plane; None when it gives no learning signal."""

    async def __call__(self, prompt: Prompt, *, attempt: int) -> Group | None: ...


class Gpus(Protocol):
    """Who may use the accelerators."""

    def training(self, *, publishes: bool) -> AbstractAsyncContextManager[None]:
        """Holds them for trainers; engines on the same ones may sleep. `publishes`: engines get new weights next."""
        ...

    def drain(self) -> Metrics:
        """What memory was in use around the moves since the last drain."""
        ...


class Sink(Protocol):
    """Where metrics go: one flat record a step."""

    def write(self, step: int, record: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...
