"""vLLM under the engine contract. Starting it takes 15 to 60 s: one decoder a model's shape serves all tests."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from functools import cache

from transformers import PreTrainedModel

from tandem.config.models import VllmEngine
from tandem.roles import Fingerprint, NamedTensors
from tandem.rollout.rows import Decoder, Finished, Row
from tandem.rollout.stops import Decode
from tandem.rollout.threaded import ThreadedEngine
from tandem.rollout.vllm.decoder import VllmDecoder
from tandem.rollout.vllm.engine import engine_args, vllm_decoder
from tandem.types import Metrics
from tests.rollout.tiny_models import tiny_model

ROWS = 64
SETTINGS = VllmEngine(name="vllm", max_num_seqs=ROWS, kv_cache_memory_bytes=8 << 20, enforce_eager=True)


class Lent:
    """A decoder that goes on to the next test: fewer rows if asked, and nothing is left running at the end."""

    def __init__(self, decoder: Decoder, rows: int) -> None:
        self._decoder = decoder
        self._rows = rows
        self._running: list[Row] = []
        self.vocabulary, self.max_length = decoder.vocabulary, decoder.max_length

    @property
    def free(self) -> int:
        return min(self._rows - len(self._running), self._decoder.free)

    def admit(self, rows: Sequence[Row]) -> None:
        self._decoder.admit(rows)
        self._running += rows

    def remove(self, row: Row) -> None:
        self._decoder.remove(row)
        self._running.remove(row)

    def step(self) -> list[Finished]:
        finished = self._decoder.step()
        self._running = [row for row in self._running if all(row is not other for other, _ in finished)]
        return finished

    def sleep(self, *, keep_weights: bool) -> Metrics:
        return self._decoder.sleep(keep_weights=keep_weights)

    def wake(self) -> Metrics:
        return self._decoder.wake()

    def wake_cache(self) -> None:
        self._decoder.wake_cache()

    def recompute(self) -> None:
        self._decoder.recompute()

    def load_weights(self, weights: NamedTensors) -> None:
        self._decoder.load_weights(weights)

    def fingerprint(self) -> Fingerprint:
        return self._decoder.fingerprint()

    def close(self) -> None:
        for row in list(self._running):
            self.remove(row)


@cache
def decoder_of(architecture: str, tied: bool, max_length: int) -> VllmDecoder:
    """Started from files, as a run starts it."""
    with tempfile.TemporaryDirectory() as directory:
        tiny_model(architecture, tied=tied).save_pretrained(directory)
        args = engine_args(
            SETTINGS,
            model=directory,
            precision="float32",
            max_total_sequence_length=max_length,
            trust_remote_code=False,
            can_sleep=False,
        )
        return vllm_decoder(args)


def start_vllm(
    model: PreTrainedModel, max_concurrent_samples: int, max_length: int, decode: Decode | None = None
) -> ThreadedEngine:
    """An engine of this model's shape and weights, as version 0."""
    decoder = decoder_of(model.config.model_type, model.config.tie_word_embeddings, max_length)
    decoder.load_weights(model.named_parameters())
    return ThreadedEngine(Lent(decoder, max_concurrent_samples), name="vllm-engine", decode=decode)
