"""Models with random weights as benchmarks train them: shapes, variants, a batch, and the stages that run on it."""

from __future__ import annotations

import copy
import os
import socket
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from benchmarks.shapes import SHAPES
from tandem.config.algorithm import MseValueLoss, PolicyLoss
from tandem.config.models import SequencePacking, TrainedModel
from tandem.launch.trainers import backend_of
from tandem.train.backend import Backend, Output, Pack
from tandem.train.flops import shape_of
from tandem.train.heads import TokenLogprobs, ValueHead
from tandem.train.objectives import PolicyObjective, ValueObjective
from tandem.train.packs import pack_batch
from tandem.train.sharding import plan_shares
from tandem.types import Batch, Metrics


@dataclass(frozen=True)
class Variant:
    """One row of the table."""

    model: str = "actor"
    mb: int = 8192
    ac: str = "none"
    compile: str = "auto"
    chunk: int = 1024
    backend: str = "torch"
    dp: str = "auto"
    keep: str = "false"
    tp: int = 1
    pp: int = 1
    cp: int = 1
    sp: str = "false"

    @property
    def name(self) -> str:
        """As it is asked for."""
        default = vars(default_variant(self.model))
        return ",".join([self.model, *(f"{key}={value}" for key, value in vars(self).items() if value != default[key])])


@dataclass(frozen=True)
class Job:
    """What all variants of a run share."""

    shape: str
    tokens: int  # of a step, for each rank that has samples of its own
    length: int
    precision: str
    steps: int
    warmup: int
    device: str


@dataclass(frozen=True)
class Figures:
    """Seconds of a step (median) and the peak of memory in GiB while it ran, of the fullest rank."""

    seconds: float
    peak: float
    first: float  # seconds of the first one


def default_variant(model: str) -> Variant:
    """Plain transformers take the step in one piece if nothing else is asked for."""
    return Variant(model, mb=1 << 30) if model == "plain" else Variant(model)


def parse(text: str) -> Variant:
    """`model,option=value,...`"""
    model, *options = text.split(",")
    values = dict(option.split("=") for option in options)
    numbers = {name: int(values[name]) for name in ("mb", "chunk", "tp", "pp", "cp") if name in values}
    return replace(default_variant(model), **(values | numbers))


def fresh_model(job: Job, dtype: torch.dtype) -> PreTrainedModel:
    torch.manual_seed(0)
    with torch.device(job.device):
        shape = copy.deepcopy(SHAPES[job.shape])  # a model keeps it, and writes its attention into it
        return AutoModelForCausalLM.from_config(shape, dtype=dtype, attn_implementation="sdpa")


def rows(job: Job, samples: int) -> tuple[Batch, dict[str, list[Tensor]]]:
    """Every token but the first of a row is in the loss."""
    draw = torch.Generator().manual_seed(0)
    n, vocabulary = job.length, SHAPES[job.shape].vocab_size
    noise = {"old_logprobs": -11.9, "gen_logprobs": -11.9, "advantages": 0.0, "values": 0.0, "returns": 0.0}
    columns = {name: [at + 0.1 * torch.randn(n, generator=draw) for _ in range(samples)] for name, at in noise.items()}
    columns["tokens"] = [torch.randint(vocabulary, (n,), generator=draw) for _ in range(samples)]
    columns["mask"] = [torch.arange(n) > 0 for _ in range(samples)]
    columns["weights"] = columns["value_weights"] = [mask.float() for mask in columns["mask"]]
    return Batch(tuple(range(samples)), (n,) * samples, tuple(range(samples))), columns


def measure(work: Callable[[], None], job: Job) -> Figures:
    """After warm-up. Every rank measures; they wait for each other in the work itself."""
    cuda, seconds = job.device == "cuda", []
    for step in range(job.warmup + job.steps):
        if cuda:
            torch.cuda.synchronize()
        if cuda and step == job.warmup:
            torch.cuda.reset_peak_memory_stats()
        begin = time.perf_counter()
        work()
        if cuda:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begin)
    peak = torch.tensor(torch.cuda.max_memory_allocated() / 2**30 if cuda else 0.0, device=job.device)
    if dist.is_initialized():  # stages of a pipeline hold different parts
        dist.all_reduce(peak, dist.ReduceOp.MAX)
    return Figures(statistics.median(seconds[job.warmup :]), peak.item(), seconds[0])


class Stages:
    """What one of our models does with a batch of the job, as functions without arguments."""

    def __init__(
        self, job: Job, variant: Variant, backend: Backend, objective: PolicyObjective | ValueObjective
    ) -> None:
        self._backend, self._objective = backend, objective
        self._optimizer = vars(backend)["optimizer"]  # no part of a backend's role
        shards = backend.shard.count
        batch, columns = rows(job, shards * job.tokens // job.length)
        share = plan_shares(batch.lengths, SequencePacking(), variant.mb, shards)[backend.shard.index]
        own = {name: [column[row] for row in share.rows] for name, column in columns.items()}
        self._packs = pack_batch(batch.pick(share.rows), own, share.bins)
        self._tokens = sum(batch.lengths)

    def _loss(self, output: Output, pack: Pack) -> tuple[Tensor, Metrics]:
        return self._objective(output, pack, {})

    def clear(self) -> None:
        """Drop the gradient."""
        self._optimizer.clear()

    def passes(self) -> None:
        """Forward and backward alone."""
        self.clear()
        self._backend.forward_backward(self._packs, self._loss)

    def update(self) -> None:
        """Forward, backward, and the optimizer's step."""
        self._backend.forward_backward(self._packs, self._loss)
        if self._backend.optim_step(float(self._tokens)).refused:
            raise RuntimeError("a step was refused: the benchmark's numbers are not finite")

    def infer(self) -> None:
        """Log-probs or values."""
        for _ in self._backend.infer(self._packs):
            pass


def layout_of(variant: Variant) -> dict[str, object]:
    """The sections that say how the model lies on its ranks."""
    if variant.backend == "torch":
        dp = None if variant.dp == "auto" else variant.dp
        return {"parallel": {"data_parallel": dp, "keep_gathered": variant.keep == "true"}}
    return {
        "backend": {
            "name": "megatron",
            "tensor_model_parallel_size": variant.tp,
            "pipeline_model_parallel_size": variant.pp,
            "context_parallel_size": variant.cp,
            "sequence_parallel": variant.sp == "true",
        }
    }


def our_backend(job: Job, variant: Variant) -> tuple[Backend, PolicyObjective | ValueObjective]:
    model = fresh_model(job, torch.float32)
    if variant.backend == "megatron":  # it reads the weights from the host's memory
        model = model.cpu()
    config = TrainedModel.model_validate(
        {
            "precision": job.precision,
            "activation_checkpointing": variant.ac,
            "compile": {"auto": "auto"}.get(variant.compile, variant.compile == "true"),
            **layout_of(variant),
        }
    )
    if variant.model == "critic":
        head, objective = ValueHead(SHAPES[job.shape].hidden_size), ValueObjective(MseValueLoss())
    else:
        head = TokenLogprobs(model.get_output_embeddings(), temperature=1.0, chunk_size=variant.chunk)
        objective = PolicyObjective(PolicyLoss())
    device = torch.device(job.device, torch.cuda.current_device()) if job.device == "cuda" else torch.device("cpu")
    steps = None if variant.model == "reference" else 1000
    return backend_of(config)(model, head, config, total_optimizer_steps=steps, device=device), objective


def matmul_tflops(device: str, size: int) -> float:
    """What a square bfloat16 product reaches here, on random numbers."""
    a, b = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    job = Job("", 0, 0, "", steps=20, warmup=5, device=device)
    return 2 * size**3 / measure(lambda: torch.mm(a, b), job).seconds / 1e12


def work_of(job: Job, variant: Variant) -> float:
    """TFLOP of forward and backward of one share of the samples."""
    critic = variant.model == "critic"
    config = SHAPES[job.shape]
    shape = shape_of(config, 1 if critic else config.vocab_size, head_everywhere=critic)
    samples = job.tokens // job.length
    asked = samples * (job.length if critic else job.length - 1)
    return shape.forward_backward([job.length] * samples, asked) / 1e12


def device_here() -> str:
    """A GPU where there is one. It asks the driver, not CUDA, which no process that forks into ranks may have begun."""
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    return "cuda" if torch.cuda.is_available() else "cpu"


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]
