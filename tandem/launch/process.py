"""What every process of a run sets up before it computes."""

from __future__ import annotations

import os

import torch

from tandem.config import Config
from tandem.config.run import Cluster


def quiet_libraries() -> None:
    """The libraries' own progress bars and fork warnings would tear the live display."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    from transformers.utils import logging as transformers_logging

    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()


def prepare(cluster: Cluster) -> None:
    """Set this process's torch up as the recipe asks, before anything computes."""
    if cluster.num_threads:
        torch.set_num_threads(cluster.num_threads)
    if cluster.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS is deterministic only with this
    torch.use_deterministic_algorithms(cluster.deterministic)


def device_of(config: Config) -> torch.device:
    """The device that this process computes on."""
    if config.cluster.device == "cuda" and not torch.cuda.is_available():
        raise ValueError(
            "cluster.device=cuda, but torch sees no GPU here; set cluster.device=cpu, or install a CUDA build"
        )
    if config.cluster.device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return torch.device(config.cluster.device)
