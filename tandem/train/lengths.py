"""What a compiled graph takes as it comes. All other sizes are constants of it: kernels then read whole vectors."""

from __future__ import annotations

import torch
from torch import Tensor


def any_length(*tensors: Tensor | None, dimension: int = 0) -> None:
    """Let a graph that is made for these take any size of this dimension: no other pack asks for another graph."""
    for tensor in tensors:
        if tensor is not None:
            torch._dynamo.maybe_mark_dynamic(tensor, dimension)
