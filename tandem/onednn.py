"""float32 matrix products on a CPU through oneDNN, where that is faster than what torch takes by itself.

torch gives them to MKL, which runs AVX2 code on AMD processors, whatever they can. Measured on a core of an AMD EPYC
with AVX-512, [64, 128] x [128, 768]: MKL 107 GFLOP/s, oneDNN 190; with 1,024 rows 111 and 250. Of oneDNN's products too
the rows are the same bits for any number of rows that is a multiple of 16, and for any number of threads.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import torch


@cache
def pays() -> bool:
    """Whether this process's CPU is one of those: AMD's with AVX-512."""
    if not torch.backends.mkldnn.is_available() or torch.backends.cpu.get_cpu_capability() != "AVX512":
        return False
    about = Path("/proc/cpuinfo")
    return about.is_file() and "AuthenticAMD" in about.read_text()


def linear(values: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """values @ weight.T + bias, without a graph: the operator that torch's compiler writes for a linear layer."""
    return torch.ops.mkldnn._linear_pointwise.default(values, weight, bias, "none", [], "")
