"""Processes that train one model together on this machine; what they all do here can be compared."""

from __future__ import annotations

import multiprocessing
import os
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

FORKS = multiprocessing.get_context("forkserver")  # the server has imported everything: a rank starts at once
FORKS.set_forkserver_preload(["tests.train.updates", "tests.train.megatron_here"])  # what is not here is left out


def on_ranks(
    ranks: int,
    work: Callable[..., Any],
    *arguments: object,
    folder: Path,
    timeout_s: float = 90,
    backend: str = "gloo",
) -> list[Any]:
    """`work(*arguments)` on every rank; its results in the order of the ranks. The first error ends them all.

    With nccl each rank has a GPU of its own, and no fork: what the server imports may have started CUDA.
    """
    folder.mkdir(parents=True, exist_ok=True)
    context = multiprocessing.get_context("spawn") if backend == "nccl" else FORKS
    processes = [
        context.Process(target=_rank, args=(rank, ranks, backend, folder, work, arguments), daemon=True)
        for rank in range(ranks)
    ]
    for process in processes:
        process.start()
    deadline = time.monotonic() + timeout_s
    try:
        while any(process.is_alive() for process in processes):
            multiprocessing.connection.wait([p.sentinel for p in processes if p.is_alive()], timeout=1.0)
            if any(process.exitcode for process in processes):
                break
            if time.monotonic() > deadline:
                raise TimeoutError(f"{ranks} ranks were not done after {timeout_s} s")
        failed = [rank for rank, process in enumerate(processes) if process.exitcode]
        if failed:
            errors = [path.read_text() for path in sorted(folder.glob("error-*"))]
            raise RuntimeError("\n".join(errors) or f"ranks {failed} died: {processes[failed[0]].exitcode}")
    finally:
        for process in processes:
            process.kill()
            process.join()
    return [torch.load(folder / f"result-{rank}", weights_only=False) for rank in range(ranks)]


def _rank(
    rank: int, ranks: int, backend: str, folder: Path, work: Callable[..., Any], arguments: tuple[object, ...]
) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), ranks)
    try:
        if backend == "nccl":
            torch.cuda.set_device(rank)
        dist.init_process_group(backend, store=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=60))
        torch.save(work(*arguments), folder / f"result-{rank}")
        dist.barrier()
        dist.destroy_process_group()
    except BaseException:
        (folder / f"error-{rank}").write_text(traceback.format_exc())
        raise
