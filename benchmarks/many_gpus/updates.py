"""Parts a and b: updates of a Qwen2-7B shape by benchmarks/train_step.py, on the torch backend and on Megatron-Core."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable, Sequence

from benchmarks.many_gpus.place import Place

FSDP, MEGATRON = "fsdp.jsonl", "megatron.jsonl"
SHAPE = ("--shape", "qwen2-7b", "--steps", "2", "--warmup", "1")
TINY = ("--shape", "tiny", "--device", "cpu", "--tokens", "64", "--length", "32", "--steps", "1", "--warmup", "1")
# One rank holds float32 weights, bfloat16 copies, gradients and moments: 128 GiB. So it computes layers again, and all
# ranks that are compared with it do.
SAME, BEST = "actor,mb=4096,ac=full", "actor,ac=selective"
PP_STAGES = 2


def fsdp(place: Place) -> int:
    """On 1, 2, 4, 8 ranks: all but the largest at one time, on GPUs of their own; then the largest."""
    if place.cpu:
        return together([start(place, FSDP, 2, ["actor,mb=32,keep=true"], TINY)])
    *smaller, largest = [count for count in (1, 2, 4, 8) if count <= place.gpus]
    begun = [start(place, FSDP, count, variants(SAME, ranks=count), SHAPE, first=count - 1) for count in smaller]
    failed = together(begun)
    return failed | together([start(place, FSDP, largest, variants(SAME, BEST, ranks=largest), SHAPE)])


def variants(*names: str, ranks: int) -> list[str]:
    """Ranks that share weights keep a gathered layer over the micro-batches of a step."""
    return [f"{name},keep=true" if ranks > 1 else name for name in names]


def megatron(place: Place) -> int:
    """An actor on tensor and pipeline ranks, a critic on tensor and sequence ranks; a start each: one layout a process.

    A GPU has as many tokens of a step in both, and two stages have eight micro-batches.
    """
    if place.cpu:
        place.note("b", "not run: Megatron-Core computes on GPUs only")
        return 0
    if place.gpus < 2:
        place.note("b", f"not run: tensor parallel needs 2 GPUs, {place.gpus} here")
        return 0
    if place.lacks("b", "megatron", "the extra megatron"):
        return 0
    ranks = 1 << (place.gpus.bit_length() - 1)
    actor, sharing = "actor,backend=megatron,tp=2,pp=2,mb=4096", 2 * PP_STAGES
    if ranks < sharing:
        place.note("b", f"the actor without pipeline parallel: beside tensor parallel it needs 4 GPUs, {ranks} here")
        actor, sharing = "actor,backend=megatron,tp=2,mb=4096", 2
    failed = 0
    for variant, count in ((actor, sharing), ("critic,backend=megatron,tp=2,sp=true,mb=4096", 2)):
        tokens = ("--tokens", str(8192 * count))
        failed |= together([start(place, MEGATRON, ranks, [variant], (*SHAPE, *tokens))])
    return failed


def start(
    place: Place, kept: str, ranks: int, rows: Sequence[str], options: Sequence[str], *, first: int = 0
) -> subprocess.Popen[bytes]:
    """The training benchmark on so many GPUs, from number `first` on."""
    command = [sys.executable, "-m", "benchmarks.train_step", "--ranks", str(ranks), "--json", str(place.out / kept)]
    command += ["--patience", str(place.patience_s)]
    env = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
    if not place.cpu:
        there = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(place.gpus)))).split(",")
        env["CUDA_VISIBLE_DEVICES"] = ",".join(there[first : first + ranks])
        env["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"  # a rank alone fills its GPU
    return subprocess.Popen([*command, *options, "--variants", *rows], env=env)


def together(begun: Iterable[subprocess.Popen[bytes]]) -> int:
    """Wait for all. 1 if one of them has failed."""
    codes = [process.wait() for process in begun]
    return int(any(codes))
