"""What each stage of a step reaches on one GPU, against what the machine can do: `python benchmarks/stages.py`.

Log-probs, values, policy update, critic update at several lengths of samples, and a weight sync to an engine in this
process. Random weights, full rows, bfloat16. MFU is against a square matrix product of the same run, a sync against a
plain copy of the same bytes. `above` is the peak of a stage over what lay on the device before it.

    python benchmarks/stages.py [--lengths 2048 8192 32768] [--tokens 65536] [--models actor,reference,critic]
    python benchmarks/stages.py --shape tiny --device cpu --tokens 256 --lengths 32 64  # tries the code
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import time
from collections.abc import Callable
from dataclasses import replace

import torch

from benchmarks.shapes import SHAPES
from benchmarks.trained_model import (
    Figures,
    Job,
    Stages,
    Variant,
    fresh_model,
    matmul_tflops,
    measure,
    our_backend,
    work_of,
)
from tandem.rollout.transformers import transformers_engine
from tandem.train.backend import Backend
from tandem.weights.memory import MemoryCarrier
from tandem.weights.publisher import Publisher

GIB = 1 << 30
NAMES = {  # of inference, and of an update
    "actor": ("log-probs", "policy update"),
    "reference": ("log-probs of a reference",),
    "critic": ("values", "critic update"),
}


def held(device: str) -> int:
    """Bytes that lie on the device."""
    return torch.cuda.memory_allocated() if device == "cuda" else 0


def stage(job: Job, work: Callable[[], None]) -> tuple[Figures, float]:
    """Its figures, and GiB above what is kept from one round to the next."""
    work()  # what stays (moments) is there from here on
    before = held(job.device)
    figures = measure(work, job)
    return figures, figures.peak - before / GIB


def rows_of(job: Job, variant: Variant, stages: Stages, peak_tflops: float) -> list[str]:
    """A row for inference and one for the update, which a reference has not."""
    tflop = work_of(job, variant)
    lines = []
    parts = ((stages.infer, tflop / 3), (stages.update, tflop))
    for name, (work, amount) in zip(NAMES[variant.model], parts, strict=False):
        figures, above = stage(job, work)
        reached = amount / figures.seconds
        cells = (
            f"{name}, samples of {job.length:,}",
            f"{job.tokens / figures.seconds:,.0f}",
            f"{reached:.0f}",
            f"{reached / peak_tflops:.2f}",
            f"{figures.peak:.1f}",
            f"{above:.2f}",
        )
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def show_stages(job: Job, kind: str, micro_batch: int, lengths: list[int], peak_tflops: float) -> None:
    variant = Variant(model=kind, mb=micro_batch, ac="selective")
    backend, objective = our_backend(job, variant)
    for length in lengths:
        this = replace(job, length=length, tokens=max(job.tokens, length))
        fitting = replace(variant, mb=max(micro_batch, length))
        try:
            for line in rows_of(this, fitting, Stages(this, fitting, backend, objective), peak_tflops):
                print(line, flush=True)
        except torch.OutOfMemoryError:
            print(f"| {kind}, samples of {length:,} | out of memory |", flush=True)
            torch.cuda.empty_cache()
    if kind == "actor":
        asyncio.run(show_sync(job, backend))


async def show_sync(job: Job, backend: Backend) -> None:
    """Export, fingerprints of both sides and the copy into a running engine."""
    model = fresh_model(job, torch.bfloat16).eval()
    engine = transformers_engine(model, max_concurrent_samples=16, max_total_sequence_length=256, pad_token_id=0)
    publisher = Publisher(MemoryCarrier(backend, [engine]), [engine], pause="drain", recompute_kv=False)
    size = sum(tensor.nbytes for tensor in model.parameters())
    seconds, paused = [], []
    for version in range(job.warmup + job.steps):
        begin = time.perf_counter()
        metrics = await publisher.publish(version)
        seconds.append(time.perf_counter() - begin)
        paused.append(metrics["weights/pause_s"].value)
    await engine.close()
    whole, pause = (sorted(found[job.warmup :])[job.steps // 2] for found in (seconds, paused))
    copy = copy_seconds(job, size)
    print(
        f"weight sync of {size / GIB:.2f} GiB within the process: {1e3 * whole:.0f} ms with export and fingerprints, "
        f"engines paused for {1e3 * pause:.0f}; {size / whole / 1e9:.0f} GB/s; one plain copy takes {1e3 * copy:.1f} ms"
    )


def copy_seconds(job: Job, size: int) -> float:
    """Of so many bytes, read and written."""
    source = torch.ones(size, dtype=torch.uint8, device=job.device)
    target = torch.empty_like(source)

    def copy() -> None:
        target.copy_(source)

    return measure(copy, job).seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="qwen2-1.5b")
    parser.add_argument("--lengths", type=int, nargs="+", default=[2048, 8192, 32768])
    parser.add_argument("--tokens", type=int, default=65536, help="of an update")
    parser.add_argument("--micro-batch", type=int, default=8192, help="tokens; a longer sample is one by itself")
    parser.add_argument("--models", type=lambda text: text.split(","), default=["actor", "reference", "critic"])
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    asked = parser.parse_args()
    job = Job(asked.shape, asked.tokens, 0, "bfloat16", asked.steps, 2, asked.device)
    peak = matmul_tflops(asked.device, 8192 if asked.device == "cuda" else 256)
    name = torch.cuda.get_device_name() if asked.device == "cuda" else "CPU"
    print(f"{name}, torch {torch.__version__}; a bfloat16 product reaches {peak:.1f} TFLOP/s")
    print(
        f"{asked.shape}, {asked.tokens:,} tokens a stage, micro-batches of {asked.micro_batch:,}; {asked.steps} rounds"
    )
    print("| stage | tokens/s | TFLOP/s | MFU | peak GiB | above GiB |")
    print("|---" * 6 + "|")
    for kind in asked.models:
        show_stages(job, kind, asked.micro_batch, asked.lengths, peak)
        gc.collect()
        if asked.device == "cuda":
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
