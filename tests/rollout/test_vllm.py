"""What vLLM promises beyond the contract: faults that the fingerprint sees, ranks that share a model."""

from __future__ import annotations

import asyncio
import copy
import multiprocessing
import os
import signal
from collections.abc import Callable, Coroutine
from dataclasses import replace
from pathlib import Path

import pytest
import torch

pytest.importorskip("vllm", reason="needs the package vllm: .ci/vllm makes an environment with it")

from transformers import PreTrainedModel

from tandem.config.models import SequencePacking
from tandem.fingerprint import fingerprint
from tandem.plane.memory import MemoryPlane
from tandem.roles import Engine, NamedTensors
from tandem.rollout.threaded import ThreadedEngine
from tandem.rollout.vllm.decoder import VllmDecoder, spread
from tandem.rollout.vllm.engine import engine_args, vllm_decoder
from tandem.train.worker import Worker
from tandem.types import EngineDied, RolloutFailed, Sampling
from tandem.weights.memory import MemoryCarrier
from tandem.weights.publisher import Publisher
from tests.contracts.vllm_kind import SETTINGS, Lent, decoder_of, start_vllm
from tests.rollout.tiny_models import full_logits, tiny_model
from tests.train.small_models import actor_backend

MAX_LENGTH = 160
SAMPLED = Sampling(max_new_tokens=12, temperature=1.0, seed=7, stop_token_ids=())
PROMPT = [5, 17, 3]
Load = Callable[[VllmDecoder, list[tuple[str, torch.Tensor]]], None]


def ignores(decoder: VllmDecoder, weights: list[tuple[str, torch.Tensor]]) -> None:
    """Says yes and does nothing."""


def loads_half(decoder: VllmDecoder, weights: list[tuple[str, torch.Tensor]]) -> None:
    """vLLM keeps what it is not given, with a warning."""
    decoder._engine.collective_rpc("reload_weights", kwargs={"weights_iterator": iter(weights[: len(weights) // 2])})


def swaps_layers(decoder: VllmDecoder, weights: list[tuple[str, torch.Tensor]]) -> None:
    """Layer 0 for layer 1 and layer 1 for layer 0."""
    other = {"model.layers.0.": "model.layers.1.", "model.layers.1.": "model.layers.0."}
    decoder.load_weights((other.get(name[:15], name[:15]) + name[15:], tensor) for name, tensor in weights)


def forgets_the_packed_head(decoder: VllmDecoder, weights: list[tuple[str, torch.Tensor]]) -> None:
    """A bare reload on a CPU: an output layer that is tied goes on multiplying with a copy of the old embedding."""
    decoder._engine.collective_rpc("reload_weights", kwargs={"weights_iterator": iter(weights)})


class Faulty(Lent):
    """A vLLM that takes weights in a way of its own."""

    def __init__(self, decoder: VllmDecoder, load: Load) -> None:
        super().__init__(decoder, 8)
        self._vllm, self._load = decoder, load

    def load_weights(self, weights: NamedTensors) -> None:
        self._load(self._vllm, list(weights))


def start_faulty(model: PreTrainedModel, load: Load) -> ThreadedEngine:
    decoder = decoder_of(model.config.model_type, model.config.tie_word_embeddings, MAX_LENGTH)
    decoder.load_weights(model.named_parameters())
    return ThreadedEngine(Faulty(decoder, load), name="vllm-engine")


def play(
    engine: Callable[[], Engine],
    trained: PreTrainedModel,
    scene: Callable[[Engine, Publisher], Coroutine[None, None, None]],
) -> None:
    """A scene with an engine and who publishes to it the weights of an actor."""

    async def body() -> None:
        actor = Worker(
            "actor",
            actor_backend(copy.deepcopy(trained)),
            plane=MemoryPlane(),
            packing=SequencePacking(train_mb_tokens=256),
            objective=None,
            clock=lambda: 0.0,
        )
        here = engine()
        try:
            publisher = Publisher(MemoryCarrier(actor, [here]), [here], pause="stand", recompute_kv=True)
            await asyncio.wait_for(scene(here, publisher), timeout=120)
        finally:
            await asyncio.gather(actor.close(), here.close())

    asyncio.run(body())


@pytest.mark.parametrize(("architecture", "tied"), [("llama", False), ("qwen2", True), ("qwen3", True)])
def test_what_the_actor_trained_is_proven_to_be_in_vllm(architecture: str, tied: bool):
    new = tiny_model(architecture, seed=1, tied=tied)

    async def scene(engine: Engine, publisher: Publisher):
        await publisher.publish(3)
        assert await engine.fingerprint() == fingerprint(new.named_parameters())
        written = await engine.generate(PROMPT, SAMPLED)
        assert written.versions == (3,) * 12
        wanted = full_logits(new, [*PROMPT, *written.tokens])[2:-1].log_softmax(-1)
        wanted = wanted.gather(-1, torch.tensor(written.tokens)[:, None]).squeeze(-1)
        torch.testing.assert_close(torch.tensor(written.logprobs), wanted, atol=1e-4, rtol=0)

    play(lambda: start_vllm(tiny_model(architecture, tied=tied), 8, MAX_LENGTH), new, scene)


@pytest.mark.parametrize(
    ("load", "tied", "tensor"),
    [
        (ignores, False, r"model\.embed_tokens\.weight is"),
        (loads_half, False, r"model\.layers\.1\.self_attn\.q_proj\.weight is"),
        (swaps_layers, False, r"model\.layers\.0\.self_attn\.q_proj\.weight is"),
        (forgets_the_packed_head, True, r"lm_head\.weight exists only there"),
    ],
)
def test_a_vllm_with_other_weights_ends_the_run_at_the_first_sync(load: Load, tied: bool, tensor: str):
    old, new = tiny_model("qwen2", tied=tied), tiny_model("qwen2", seed=1, tied=tied)

    async def scene(engine: Engine, publisher: Publisher):
        with pytest.raises(RuntimeError, match=f"version 1 engine 0 holds other weights: {tensor}"):
            await publisher.publish(1)

    play(lambda: start_faulty(old, load), new, scene)


def test_logits_that_are_not_finite_fail_their_request_only():
    model = tiny_model("qwen2")
    with torch.no_grad():
        model.get_input_embeddings().weight[13] = torch.nan

    async def scene() -> None:
        engine = start_vllm(model, 8, MAX_LENGTH)
        requests = [engine.generate(tokens, SAMPLED) for tokens in ([1, 2], [1, 13, 2], [3])]
        first, failed, last = await asyncio.gather(*requests, return_exceptions=True)
        assert isinstance(failed, RolloutFailed)
        assert "not finite" in str(failed)
        assert [w.tokens for w in (first, last)] == [
            w.tokens for w in await asyncio.gather(*(engine.generate(t, SAMPLED) for t in ([1, 2], [3])))
        ]
        await engine.close()

    asyncio.run(scene())


def test_two_ranks_that_share_a_model_write_its_law_prove_its_weights_and_die_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """One key head for two ranks: each holds a copy."""
    monkeypatch.setenv("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    old, new = (tiny_model("qwen2", seed=seed, tied=True) for seed in (0, 1))
    old.save_pretrained(tmp_path)
    args = engine_args(
        SETTINGS.model_copy(update={"tensor_parallel_size": 2}),
        model=str(tmp_path),
        precision="float32",
        max_total_sequence_length=MAX_LENGTH,
        trust_remote_code=False,
        can_sleep=False,
    )

    async def scene(engine: Engine, publisher: Publisher):
        for version, model in enumerate((old, new)):
            if version:
                await publisher.publish(version)
            assert await engine.fingerprint() == fingerprint(model.named_parameters())
            written = await engine.generate(PROMPT, replace(SAMPLED, temperature=0.7))
            wanted = (full_logits(model, [*PROMPT, *written.tokens])[2:-1] / 0.7).log_softmax(-1)
            wanted = wanted.gather(-1, torch.tensor(written.tokens)[:, None]).squeeze(-1)
            torch.testing.assert_close(torch.tensor(written.logprobs), wanted, atol=1e-4, rtol=0)
        running = asyncio.create_task(engine.generate(PROMPT, replace(SAMPLED, max_new_tokens=150)))
        await engine.fingerprint()
        worker = multiprocessing.active_children()[0]
        os.kill(worker.pid or 0, signal.SIGKILL)
        for call in (running, engine.generate(PROMPT, SAMPLED), engine.fingerprint()):
            with pytest.raises(EngineDied):
                await call

    play(lambda: ThreadedEngine(vllm_decoder(args), name="vllm-engine"), new, scene)


def test_seeds_fit_into_signed_numbers_and_differ_in_their_lower_half():
    """vLLM keeps them as int64 on a GPU, and torch's generator takes 32 bits on a CPU."""
    seeds = [spread(seed, written) for seed in (0, 1, 1 << 32, (1 << 64) - 1, -1) for written in range(4)]
    assert all(0 <= seed < 1 << 63 for seed in seeds)
    assert len({seed % (1 << 32) for seed in seeds}) == 4 * 4, "-1 is 2^64 - 1"
