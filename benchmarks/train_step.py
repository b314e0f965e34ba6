"""What a training step costs beside plain transformers: `python benchmarks/train_step.py [--variants ...] [--ranks 2]`.

Random weights, rows of one length, every token in the loss. A variant is `actor`, `critic` or `plain`, then options:
`mb` (tokens of a micro-batch), `ac` (activation checkpointing: none, selective, full), `compile` (true, false), `chunk`
(rows of log-probs at one time), `backend` (torch, megatron); with several ranks `dp` (shard, replicate) and `keep`
(keep_gathered: true, false) of torch, `tp`, `pp`, `cp` (how many share layers, stages, tokens) and `sp` of megatron.
Two figures for each. `passes` is forward and backward alone: plain transformers hold bfloat16 weights and gradients,
ours float32 master weights, a bfloat16 copy and float32 gradients. `step` is the whole update with AdamW on float32
weights: plain transformers run under autocast, as their Trainer does. MFU is against a matrix product of this machine.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import socket
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from torch import Tensor
from transformers import PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

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

SHAPES: dict[str, dict[str, int]] = {
    "qwen2-7b": {
        "hidden_size": 3584,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "intermediate_size": 18944,
        "vocab_size": 152064,
        "tie_word_embeddings": False,
    },
    "qwen2-1.5b": {
        "hidden_size": 1536,
        "num_hidden_layers": 28,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
        "intermediate_size": 8960,
        "vocab_size": 151936,
    },
    "tiny": {
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 96,
        "vocab_size": 512,
    },
}
START = {"cuda": "spawn", "cpu": "fork"}  # ranks on GPUs import anew: CUDA survives no fork
DEFAULT = ("plain", "plain,mb=4096", "actor,mb=4096,ac=selective", "actor,ac=selective", "critic,ac=selective")


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


Found = tuple[Figures, Figures | None, Figures | None]  # passes, step, inference


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
    shape = {"tie_word_embeddings": True} | SHAPES[job.shape]
    config = Qwen2Config(**shape, max_position_embeddings=32768, attn_implementation="sdpa")
    with torch.device(job.device):
        return Qwen2ForCausalLM._from_config(config, dtype=dtype)


def rows(job: Job, samples: int) -> tuple[Batch, dict[str, list[Tensor]]]:
    """Every token but the first of a row is in the loss."""
    draw = torch.Generator().manual_seed(0)
    n, vocabulary = job.length, SHAPES[job.shape]["vocab_size"]
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


def plain_figures(job: Job, variant: Variant) -> Found:
    """transformers alone: its loss over full logits, its attention, a batch without padding."""
    return (plain_passes(job, variant, torch.bfloat16), plain_step(job, variant), None)


def plain_work(job: Job, variant: Variant, model: PreTrainedModel) -> Callable[[], None]:
    tokens_NT = torch.stack(rows(job, job.tokens // job.length)[1]["tokens"]).to(job.device)
    parts = tokens_NT.split(max(1, min(variant.mb, job.tokens) // job.length))
    if variant.ac != "none":
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.train()

    def passes() -> None:
        for part in parts:
            (model(input_ids=part, labels=part, use_cache=False).loss * (len(part) / len(tokens_NT))).backward()

    return passes


def plain_passes(job: Job, variant: Variant, dtype: torch.dtype) -> Figures:
    model = fresh_model(job, dtype)
    passes = plain_work(job, variant, model)

    def work() -> None:
        model.zero_grad()
        passes()

    return measure(work, job)


def plain_step(job: Job, variant: Variant) -> Figures:
    model = fresh_model(job, torch.float32)
    passes, adamw = plain_work(job, variant, model), torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True)

    def work() -> None:
        with torch.autocast(job.device, torch.bfloat16):
            passes()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        adamw.step()
        adamw.zero_grad()

    return measure(work, job)


def our_figures(job: Job, variant: Variant) -> Found:
    """Passes, the whole step, and inference of log-probs or values; passes alone where a step does not fit."""
    backend, objective = our_backend(job, variant)
    shards = backend.shard.count
    batch, columns = rows(job, shards * job.tokens // job.length)
    share = plan_shares(batch.lengths, SequencePacking(), variant.mb, shards)[backend.shard.index]
    own = {name: [column[row] for row in share.rows] for name, column in columns.items()}
    packs = pack_batch(batch.pick(share.rows), own, share.bins)

    def loss(output: Output, pack: Pack) -> tuple[Tensor, Metrics]:
        return objective(output, pack, {})

    optimizer = vars(backend)["optimizer"]  # no part of a backend's role

    def passes() -> None:
        optimizer.clear()
        backend.forward_backward(packs, loss)

    def step() -> None:
        backend.forward_backward(packs, loss)
        if backend.optim_step(float(sum(batch.lengths))).refused:
            raise RuntimeError("a step was refused: the benchmark's numbers are not finite")

    def infer() -> None:
        for _ in backend.infer(packs):
            pass

    found = measure(passes, job)
    optimizer.clear()
    try:  # AdamW's moments come with the first step
        return found, measure(step, job), measure(infer, job)
    except torch.OutOfMemoryError:
        return found, None, None


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
        head, objective = ValueHead(SHAPES[job.shape]["hidden_size"]), ValueObjective(MseValueLoss())
    else:
        head = TokenLogprobs(model.get_output_embeddings(), temperature=1.0, chunk_size=variant.chunk)
        objective = PolicyObjective(PolicyLoss())
    device = torch.device(job.device, torch.cuda.current_device()) if job.device == "cuda" else torch.device("cpu")
    return backend_of(config)(model, head, config, total_optimizer_steps=1000, device=device), objective


def matmul_tflops(device: str, size: int) -> float:
    """What a square bfloat16 product reaches here, on random numbers."""
    a, b = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    job = Job("", 0, 0, "", steps=20, warmup=5, device=device)
    return 2 * size**3 / measure(lambda: torch.mm(a, b), job).seconds / 1e12


def all_reduce_gbytes_s(device: str, size: int) -> float:
    """What is reduced in a second between these ranks, in GB of one rank's tensor."""
    x = torch.ones(size // 4, device=device)
    job = Job("", 0, 0, "", steps=10, warmup=3, device=device)
    return size / measure(lambda: dist.all_reduce(x), job).seconds / 1e9


def work_of(job: Job, variant: Variant) -> float:
    """TFLOP of forward and backward of one share of the samples."""
    critic = variant.model == "critic"
    config = Qwen2Config(**SHAPES[job.shape])
    shape = shape_of(config, 1 if critic else config.vocab_size, head_everywhere=critic)
    samples = job.tokens // job.length
    asked = samples * (job.length if critic else job.length - 1)
    return shape.forward_backward([job.length] * samples, asked) / 1e12


def figures_of(job: Job, variant: Variant, found: Found, peak: float, ranks: int) -> dict[str, float]:
    """Tokens a second of all ranks, MFU of each, GiB of the fullest: of passes and step; what was measured of them."""
    sharing = variant.tp * variant.pp * variant.cp  # ranks that compute one share of the samples
    tflop, tokens = work_of(job, variant) / sharing, ranks // sharing * job.tokens
    shown = {"first_s": found[0].first}
    for name, figures in zip(("passes", "step"), found, strict=False):
        if figures is not None:
            shown[f"{name}_tok_s"] = tokens / figures.seconds
            shown[f"{name}_mfu"] = tflop / figures.seconds / peak
            shown[f"{name}_gib"] = figures.peak
    return shown | ({"infer_tok_s": tokens / found[2].seconds} if found[2] else {})


def line(name: str, shown: dict[str, float]) -> str:
    cells = [name]
    for part in ("passes", "step"):
        keys = {f"{part}_tok_s": ",.0f", f"{part}_mfu": ".2f", f"{part}_gib": ".1f"}
        cells += [format(shown[key], form) if key in shown else "out of memory" for key, form in keys.items()]
    cells += [f"{shown['infer_tok_s']:,.0f}" if "infer_tok_s" in shown else "", f"{shown['first_s']:.1f}"]
    return "| " + " | ".join(cells) + " |"


def run(rank: int, ranks: int, port: int, job: Job, variants: list[Variant], kept: Path | None) -> None:
    """One rank: all variants, one after the other."""
    if job.device == "cuda":
        torch.cuda.set_device(rank)
    if ranks > 1:
        backend = "nccl" if job.device == "cuda" else "gloo"
        dist.init_process_group(backend, init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=ranks)
    peak = matmul_tflops(job.device, 8192 if job.device == "cuda" else 256)
    say = print if rank == 0 else lambda *_, **__: None
    name = torch.cuda.get_device_name() if job.device == "cuda" else "CPU"
    say(f"{ranks} x {name}, torch {torch.__version__}; a bfloat16 product reaches {peak:.1f} TFLOP/s")
    say(f"{job.shape}, {job.tokens} tokens a step and share, rows of {job.length}, {job.precision}; {job.steps} steps")
    if ranks > 1:
        say(f"an all-reduce of float32 reaches {all_reduce_gbytes_s(job.device, 1 << 28):.1f} GB/s")
    columns = "passes tok/s | MFU | peak GiB | step tok/s | MFU | peak GiB | infer tok/s | first passes, s"
    say(f"| variant | {columns} |\n" + "|---" * 9 + "|")
    for variant in variants:
        try:
            measured = plain_figures if variant.model == "plain" else our_figures
            shown = figures_of(job, variant, measured(job, variant), peak, ranks)
            say(line(variant.name, shown), flush=True)
        except torch.OutOfMemoryError:
            shown = {}
            say(f"| {variant.name} | out of memory |", flush=True)
        if rank == 0 and kept is not None:
            with kept.open("a", encoding="utf-8") as file:
                print(json.dumps({"shape": job.shape, "variant": variant.name, "ranks": ranks} | shown), file=file)
        torch._dynamo.reset()
        gc.collect()
        if job.device == "cuda":
            torch.cuda.empty_cache()
    if ranks > 1:
        dist.destroy_process_group()


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--variants", nargs="+", type=parse, default=[parse(text) for text in DEFAULT])
    parser.add_argument("--shape", choices=SHAPES, default="qwen2-1.5b")
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--precision", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--json", type=Path, help="a file that each row is appended to as a JSON object")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    asked = parser.parse_args()
    names = ("shape", "tokens", "length", "precision", "steps", "warmup", "device")
    job = Job(**{name: vars(asked)[name] for name in names})
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    if asked.ranks == 1:
        return run(0, 1, 0, job, asked.variants, asked.json)
    arguments, method = (asked.ranks, free_port(), job, asked.variants, asked.json), START[asked.device]
    multiprocessing.start_processes(run, arguments, nprocs=asked.ranks, start_method=method)


if __name__ == "__main__":
    main()
