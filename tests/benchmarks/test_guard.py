"""A coarse guard against becoming slower: work that is counted exactly, and ratios of CPU time with a wide margin.

Seconds say nothing on a machine that others share. A count is the same on every run: operators that torch dispatches,
calls of functions. BOUNDS stands about a quarter above what was counted, so half as much again fails; who makes a part
faster lowers its bound, who must raise one says why in the commit. Small models: overheads are what shows here.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaForCausalLM, PreTrainedModel

from benchmarks import gae, scaling_control, scaling_train
from benchmarks.trained_model import Variant, fresh_model, our_backend, rows
from tandem.config.models import SequencePacking
from tandem.rollout.rows import Row
from tandem.rollout.transformers import decode_batch
from tandem.train.backend import Output, Pack
from tandem.train.packs import pack_batch
from tandem.train.sharding import plan_shares
from tandem.types import Metrics, Sampling
from tests.train.small_models import llama

# What is counted: (what it was when the bound was set, the bound).
BOUNDS: dict[str, tuple[float, float]] = {
    # operators of a model of two layers
    "decode step, operators": (136, 170),
    "decode step, synchronising operators": (0, 0),
    "actor forward_backward, operators": (932, 1165),
    "actor forward_backward, synchronising operators": (1, 1),
    "actor infer, operators": (295, 370),
    "actor optim_step, operators": (340, 425),
    "critic forward_backward, operators": (702, 880),
    "critic infer, operators": (201, 250),
    "critic optim_step, operators": (353, 440),
    "advantages, operators": (337, 420),
    "advantages, synchronising operators": (19, 19),
    "packs of 64 samples, operators": (104, 130),
    # calls of functions, Python's and those written in C
    "decode step of 24 rows, calls": (339, 425),
    "controller, calls a sample": (264, 330),
    "buffer, calls a group": (43, 54),
    # how many times as many at 10,000 as at 100
    "buffer, calls at 10,000 groups over those at 100": (1.0, 1.02),
    "controller, calls with 800 in flight over those with 8": (1.0, 1.1),
    # CPU time over that of the other way
    "decoding over model.generate": (0.80, 1.4),
    "GAE over the loop over tokens": (1 / 15, 1 / 5),
    "forward_backward over plain transformers": (0.94, 1.6),
}
# A GPU is waited for by these. In inference mode torch dispatches `item`, elsewhere what it is made of. The transfer of
# a decode step (`cpu`) is not among them: on a CPU it is nothing.
SYNCHRONISING = {"item", "_local_scalar_dense", "is_nonzero", "nonzero", "masked_select", "_unique2", "equal"}
QUICKSTART = Path(__file__).parents[2] / "tandem" / "assets" / "quickstart"
ROUNDS = 5  # of a ratio, behind one that warms up


def hold(what: str, found: float) -> None:
    was, bound = BOUNDS[what]
    assert found <= bound, f"{what}: {found:.4g}; it was {was:.4g} when the bound of {bound:.4g} was set"


class Operators(TorchDispatchMode):
    """Counts what torch dispatches in this thread, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, operator, types, arguments=(), options=None):
        self.counts[operator.overloadpacket.__name__] += 1
        return operator(*arguments, **(options or {}))

    @property
    def synchronising(self) -> int:
        return sum(count for name, count in self.counts.items() if name in SYNCHRONISING)


def operators_of(work: Callable[[], object]) -> Operators:
    work()  # what is done once is not counted
    with Operators() as operators:
        work()
    return operators


def calls_of(work: Callable[[], object]) -> int:
    """Calls of functions in this thread."""
    calls = 0

    def count(frame: FrameType, event: str, argument: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        work()
    finally:
        sys.setprofile(before)
    return calls


def cpu_ratio(ours: Callable[[], object], theirs: Callable[[], object]) -> float:
    """CPU time of ours over theirs: they take turns, the median of what each turn says."""
    ratios = []
    for _ in range(ROUNDS + 1):
        seconds = []
        for work in (ours, theirs):
            began = time.process_time()
            work()
            seconds.append(time.process_time() - began)
        ratios.append(seconds[0] / seconds[1])
    return statistics.median(ratios[1:])


def decoding(model: PreTrainedModel, prompts: Sequence[tuple[int, ...]], tokens: int) -> Callable[[], None]:
    """All rows from their prompts to their last token."""
    decoder = decode_batch(model, max_concurrent_samples=len(prompts), max_total_sequence_length=128, pad_token_id=0)

    def write() -> None:
        decoder.admit([Row(prompt, Sampling(tokens, 1.0, seed, ())) for seed, prompt in enumerate(prompts)])
        while len(decoder):
            decoder.step()

    return write


def test_a_decode_step():
    decoder = decode_batch(llama().eval(), max_concurrent_samples=32, max_total_sequence_length=256, pad_token_id=0)
    decoder.admit([Row(tuple(range(1, 9)), Sampling(64, 1.0, seed, ())) for seed in range(24)])
    decoder.step()
    operators = operators_of(decoder.step)
    hold("decode step, operators", operators.counts.total())
    hold("decode step, synchronising operators", operators.synchronising)
    hold("decode step of 24 rows, calls", calls_of(decoder.step))


def packed_update(name: str) -> tuple[object, list[Pack], Callable[[Output, Pack], tuple[Tensor, Metrics]]]:
    """A backend with a tiny model, the one pack of 32 rows, and the loss."""
    job = scaling_train.TINY
    backend, objective = our_backend(job, Variant(name))
    batch, columns = rows(job, job.tokens // job.length)
    (own,) = plan_shares(batch.lengths, SequencePacking(), job.tokens, 1)
    packs = pack_batch(batch.pick(own.rows), {k: [x[row] for row in own.rows] for k, x in columns.items()}, own.bins)
    return backend, packs, lambda output, pack: objective(output, pack, {})


@pytest.mark.parametrize("name", ["actor", "critic"])
def test_an_update(name: str):
    backend, packs, loss = packed_update(name)
    passes = operators_of(lambda: backend.forward_backward(packs, loss))
    hold(f"{name} forward_backward, operators", passes.counts.total())
    hold("actor forward_backward, synchronising operators", passes.synchronising)
    backend.optim_step(100.0)  # its first makes the moments
    backend.forward_backward(packs, loss)
    with Operators() as operators:
        backend.optim_step(100.0)
    hold(f"{name} optim_step, operators", operators.counts.total())
    hold(f"{name} infer, operators", operators_of(lambda: list(backend.infer(packs))).counts.total())


def test_advantages_and_packs():
    operators = operators_of(scaling_train.advantages(32, 512))
    hold("advantages, operators", operators.counts.total())
    hold("advantages, synchronising operators", operators.synchronising)
    hold("packs of 64 samples, operators", operators_of(scaling_train.packs(64, 256)).counts.total())


@pytest.mark.parametrize("sampler", scaling_control.SAMPLERS)
def test_a_decision_of_the_sampler(sampler: str):
    choose, groups = scaling_control.SAMPLERS[sampler], scaling_control.CYCLES * scaling_control.STEP
    few, many = (calls_of(scaling_control.buffered(choose, size)) for size in (100, 10_000))
    hold("buffer, calls a group", few / groups)
    hold("buffer, calls at 10,000 groups over those at 100", many / few)


def test_the_whole_controller():
    samples = 64
    steps = calls_of(scaling_control.controller(samples)) / (scaling_control.STEPS * samples)
    hold("controller, calls a sample", steps)
    few, many = (further_steps(in_flight) for in_flight in (8, 800))
    hold("controller, calls with 800 in flight over those with 8", many / few)


def further_steps(in_flight: int) -> int:
    """Calls of 20 steps more while so many groups are in flight."""
    lead = in_flight // scaling_control.SMALL_STEP

    def run(steps: int) -> Callable[[], float]:
        plan = scaling_control.plan(scaling_control.SMALL_STEP, lead + steps, lead)
        return lambda: scaling_control.run(plan, 1, 8, slots=8)

    return calls_of(run(30)) - calls_of(run(10))


def test_decoding_beside_generate():
    ours, peer = (LlamaForCausalLM.from_pretrained(QUICKSTART, dtype=torch.float32).eval() for _ in range(2))
    ids, tokens = torch.randint(5, 200, (32, 24), generator=torch.Generator().manual_seed(0)), 16
    peer.generation_config.eos_token_id = None
    law = {"do_sample": True, "top_k": 0, "max_new_tokens": tokens, "pad_token_id": 0}

    @torch.inference_mode()
    def generate() -> None:
        peer.generate(ids, attention_mask=torch.ones_like(ids), **law)

    hold("decoding over model.generate", cpu_ratio(decoding(ours, [*map(tuple, ids.tolist())], tokens), generate))


def test_advantages_beside_a_loop_over_tokens():
    draw, shape = torch.Generator().manual_seed(0), (64, 1024)
    rewards_NT, values_NT = (torch.randn(shape, generator=draw) for _ in range(2))
    mask_NT = torch.arange(1024) < torch.randint(128, 1025, (64, 1), generator=draw)
    data = (rewards_NT, values_NT, mask_NT)
    hold("GAE over the loop over tokens", cpu_ratio(lambda: gae.ours(*data), lambda: gae.plain_loop(*data)))


def test_a_pack_beside_plain_transformers():
    backend, packs, loss = packed_update("actor")
    job = scaling_train.TINY
    plain = fresh_model(job, torch.float32).train()
    tokens_NT = torch.stack(rows(job, job.tokens // job.length)[1]["tokens"])

    def theirs() -> None:
        plain.zero_grad()
        plain(input_ids=tokens_NT, labels=tokens_NT, use_cache=False).loss.backward()

    ratio = cpu_ratio(lambda: backend.forward_backward(packs, loss), theirs)
    hold("forward_backward over plain transformers", ratio)
