"""What every process of a run sets up before it computes."""

from __future__ import annotations

import ctypes
import os
import sys

import torch

from tandem import cores
from tandem.config import Config
from tandem.config.run import Cluster
from tandem.launch import stacks


def quiet_libraries() -> None:
    """The libraries' own progress bars and fork warnings would tear the live display."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    from transformers.utils import logging as transformers_logging

    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()


M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_ARENA_MAX = -1, -3, -8  # glibc's malloc.h
KEPT_BYTES = 1 << 30
LARGEST_MMAP_THRESHOLD = 32 << 20  # that glibc allows


def prepare(cluster: Cluster) -> None:
    """Set this process up as the recipe asks, before anything computes. SIGUSR1 makes it write where it stands."""
    stacks.write_on_signal()
    torch.set_num_threads(threads_of(cluster))
    cores.give(torch.get_num_threads())
    keep_freed_memory()
    if cluster.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS is deterministic only with this
    torch.use_deterministic_algorithms(cluster.deterministic)


def threads_of(cluster: Cluster) -> int:
    """How many threads compute on this process's cores, unless the recipe says: one where a GPU computes.

    What is left for the cores there is small, and many processes do it: with a team each, members wait for a core.
    """
    on_gpu = cluster.device == "cuda" or (cluster.device == "auto" and torch.cuda.is_available())
    return cluster.num_threads or (1 if on_gpu else torch.get_num_threads())


def keep_freed_memory() -> None:
    """Let glibc keep up to a GiB of freed memory for what is allocated next, instead of giving it back each time.

    Every operation on a CPU allocates its result: pages that come from the system anew are cleared and mapped one by
    one, a fifth of the time of a pass of the quickstart's model. Another C library does as it likes.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        mallopt(M_TRIM_THRESHOLD, KEPT_BYTES)
        mallopt(M_MMAP_THRESHOLD, LARGEST_MMAP_THRESHOLD)
        mallopt(M_ARENA_MAX, 1)  # those of other threads give back what is free


def device_of(config: Config) -> torch.device:
    """The device that this process computes on."""
    if config.cluster.device == "cuda" and not torch.cuda.is_available():
        raise ValueError(
            "cluster.device=cuda, but torch sees no GPU here; set cluster.device=cpu, or install a CUDA build"
        )
    if config.cluster.device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return torch.device(config.cluster.device)
