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
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from transformers import PreTrainedModel

from benchmarks.shapes import SHAPES
from benchmarks.trained_model import (
    Figures,
    Job,
    Stages,
    Variant,
    device_here,
    free_port,
    fresh_model,
    matmul_tflops,
    measure,
    our_backend,
    parse,
    rows,
    work_of,
)
from tandem.launch import stacks

DEFAULT = ("plain", "plain,mb=4096", "actor,mb=4096,ac=selective", "actor,ac=selective", "critic,ac=selective")


Found = tuple[Figures, Figures | None, Figures | None]  # passes, step, inference


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
    stages = Stages(job, variant, *our_backend(job, variant))
    found = measure(stages.passes, job)
    stages.clear()
    try:  # AdamW's moments come with the first step
        return found, measure(stages.update, job), measure(stages.infer, job)
    except torch.OutOfMemoryError:
        return found, None, None


def all_reduce_gbytes_s(device: str, size: int) -> float:
    """What is reduced in a second between these ranks, in GB of one rank's tensor."""
    x = torch.ones(size // 4, device=device)
    job = Job("", 0, 0, "", steps=10, warmup=3, device=device)
    return size / measure(lambda: dist.all_reduce(x), job).seconds / 1e9


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


def run(
    rank: int, ranks: int, port: int, job: Job, variants: list[Variant], kept: Path | None, patience_s: float | None
) -> None:
    """One rank: all variants, one after the other."""
    if patience_s is not None:
        stacks.write_after(patience_s)
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
    parser.add_argument("--patience", type=float, help="seconds until each rank writes where it stands, and goes on")
    parser.add_argument("--device", choices=("cuda", "cpu"), default=device_here())
    asked = parser.parse_args()
    names = ("shape", "tokens", "length", "precision", "steps", "warmup", "device")
    job = Job(**{name: vars(asked)[name] for name in names})
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    if asked.ranks == 1:
        return run(0, 1, 0, job, asked.variants, asked.json, asked.patience)
    arguments = (asked.ranks, free_port(), job, asked.variants, asked.json, asked.patience)
    multiprocessing.start_processes(run, arguments, nprocs=asked.ranks, start_method="fork")


if __name__ == "__main__":
    main()
