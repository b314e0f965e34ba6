"""The implementations of the Engine role that the contract runs on, and the stage they play on."""

from __future__ import annotations

import asyncio
import copy
import importlib.util
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, replace

import pytest
import torch
from transformers import PreTrainedModel

from tandem.roles import Engine, Pause
from tandem.rollout.router import Router
from tandem.rollout.transformers import transformers_engine
from tandem.types import Generation, Sampling
from tests.rollout.tiny_models import tiny_model

Task = asyncio.Task[Generation]
MAX_LENGTH = 160
PROMPTS = [[5, 17, 3], [9], [100, 101, 102, 103, 104, 105, 106], list(range(1, 17)), list(range(50, 83)), [5, 17, 3]]
GREEDY = Sampling(max_new_tokens=12, temperature=0.0, seed=0, stop_token_ids=())
SAMPLED = Sampling(max_new_tokens=12, temperature=1.0, seed=7, stop_token_ids=())


def spell(tokens: Sequence[int]) -> str:
    """The text of a model that has no tokenizer."""
    return "".join(f"<{token}>" for token in tokens)


@dataclass(frozen=True)
class Kind:
    """An implementation: how to start one from a model, and how near its float32 log-probs are to the definition.

    `exact`: what is written is a function of prompt, law, seed and weights to the last bit, and a seed draws the same
    at a position whether the text before it was written or given. Where it is not, kernels see how many rows there
    are: tokens are compared as they are, log-probs within the tolerance.
    """

    name: str
    start: Callable[[PreTrainedModel, int], Engine]
    tolerance: float
    exact: bool = True
    package: str | None = None  # that is not always there

    def same(self, got: Generation, want: Generation) -> bool:
        """Whether two generations are one, as far as this implementation holds it."""
        if self.exact:
            return got == want
        near = len(got.logprobs) == len(want.logprobs) and all(
            abs(a - b) <= self.tolerance for a, b in zip(got.logprobs, want.logprobs, strict=True)
        )
        return near and replace(got, logprobs=()) == replace(want, logprobs=())

    def all_same(self, got: Sequence[Generation], want: Sequence[Generation]) -> bool:
        return len(got) == len(want) and all(self.same(a, b) for a, b in zip(got, want, strict=True))


def start_transformers(model: PreTrainedModel, max_concurrent_samples: int) -> Engine:
    return transformers_engine(
        model,
        max_concurrent_samples=max_concurrent_samples,
        max_total_sequence_length=MAX_LENGTH,
        pad_token_id=0,
        decode=spell,
    )


def start_router(model: PreTrainedModel, max_concurrent_samples: int) -> Engine:
    """Two engines that share the slots."""
    engines = [start_transformers(copy.deepcopy(model), max(1, max_concurrent_samples // 2)) for _ in range(2)]
    return Router(engines, max_reissues=1, max_imbalance=1)


def start_vllm(model: PreTrainedModel, max_concurrent_samples: int) -> Engine:
    from tests.contracts import vllm_kind

    return vllm_kind.start_vllm(model, max_concurrent_samples, MAX_LENGTH, spell)


KINDS = [
    Kind("transformers", start_transformers, tolerance=1e-5),
    Kind("router", start_router, tolerance=1e-5),
    # A GPU's attention multiplies float32 in TF32, 10 bits of mantissa.
    Kind("vllm", start_vllm, 2e-2 if torch.cuda.is_available() else 1e-4, exact=False, package="vllm"),
]


def kind_of(request: pytest.FixtureRequest) -> Kind:
    """The implementation that a test runs on. One whose package is not installed is skipped, with the way to it."""
    kind: Kind = request.param
    if kind.package is not None and importlib.util.find_spec(kind.package) is None:
        pytest.skip(f"the {kind.name} engine needs the package {kind.package}: .ci/vllm makes an environment with it")
    return kind


def text(written: Generation, begin: int = 0, end: int | None = None) -> Generation:
    """Tokens and log-probs from here to there, without what else was said of them."""
    return Generation(written.tokens[begin:end], written.logprobs[begin:end], (), "length")


def play(
    kind: Kind,
    scene: Callable[[Engine], Coroutine[None, None, None]],
    model: PreTrainedModel | None = None,
    slots: int = 8,
) -> None:
    """Run a scene with an engine that is closed afterwards."""

    async def body() -> None:
        engine = kind.start(model or tiny_model(), slots)
        try:
            await asyncio.wait_for(scene(engine), timeout=120)
        finally:
            await engine.close()

    asyncio.run(body())


async def write_all(engine: Engine, prompts: Sequence[Sequence[int]], sampling: Sampling) -> list[Generation]:
    """One sample of each prompt, all at once; the seed counts up."""
    requests = [engine.generate(prompt, replace(sampling, seed=sampling.seed + i)) for i, prompt in enumerate(prompts)]
    return await asyncio.gather(*requests)


async def pause_midway(
    engine: Engine, prompts: Sequence[Sequence[int]], sampling: Sampling, kind: Pause = "stand"
) -> list[Task]:
    """Requests as of write_all() that are paused after some tokens. Give them many, so that none ends before."""
    requests = [engine.generate(prompt, replace(sampling, seed=sampling.seed + i)) for i, prompt in enumerate(prompts)]
    tasks = [asyncio.create_task(request) for request in requests]
    await asyncio.sleep(0)
    for _ in range(2):
        await engine.fingerprint()  # a round trip: the first has started them, the second saw a token
    await engine.pause(kind)
    assert not any(task.done() for task in tasks)
    return tasks
