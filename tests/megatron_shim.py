"""Megatron-Core on a CPU, for tests alone: its modules are read with `torch.cuda` and `"cuda"` replaced.

Megatron-Core has no CPU mode: it names the device in its source. `install()` puts a finder before Python's own that
compiles the modules of megatron.core from their text with these names exchanged; the real torch.cuda is untouched, and
so is everything outside megatron.core. What is asked of the replacement and not there is an error that names it, and
so is a Megatron-Core that was not tried.
"""

from __future__ import annotations

import importlib.machinery
import importlib.metadata
import importlib.util
import re
import sys
from collections.abc import Sequence
from types import CodeType, ModuleType

import torch

# Asked before anything is imported: what is imported without the shim cannot get it any more.
INSTALLED = importlib.util.find_spec("megatron") is not None
WANTED = "needs the extra megatron"
TRIED = ("0.16.", "0.19.")
PACKAGE = "megatron.core"
# What to exchange, and with what: the name of the module, the device's name, and the names of tensor types.
EXCHANGES = (
    (re.compile(r"""(["'])torch\.cuda\.(\w+Tensor)\1"""), r"\1torch.\2\1"),
    (re.compile(r"""(device(?:_type)?\s*=\s*)(["'])cuda\2"""), r"\1\2cpu\2"),
    (re.compile(r"(?<!from )(?<!import )\btorch\.cuda\b"), "torch_cuda_on_cpu"),
    (re.compile(r"\.cuda\(\)"), ".cpu()"),
)
# Files that must hold at least one of each kind: if they do not, Megatron-Core has changed.
EXPECTED = {
    "megatron.core.optimizer.distrib_optimizer": "torch.cuda.FloatTensor",
    "megatron.core.optimizer.clip_grads": "device='cuda'",
    "megatron.core.pipeline_parallel.schedules": 'device="cuda"',
    "megatron.core.tensor_parallel.mappings": "torch.cuda.current_device()",
}


class CudaOnCpu:
    """What megatron.core asks of torch.cuda, answered for a CPU."""

    FloatTensor, HalfTensor, BFloat16Tensor = torch.FloatTensor, torch.HalfTensor, torch.BFloat16Tensor
    Stream, Event, CUDAGraph, OutOfMemoryError = (
        torch.cuda.Stream,
        torch.cuda.Event,
        torch.cuda.CUDAGraph,
        torch.cuda.OutOfMemoryError,
    )
    amp, nvtx = torch.cuda.amp, torch.cuda.nvtx

    def __getattr__(self, name: str) -> object:
        raise AttributeError(f"Megatron-Core asks for torch.cuda.{name}, which tests/megatron_shim.py does not know")

    def current_device(self) -> torch.device:
        return torch.device("cpu")

    def current_stream(self) -> None:
        """Only handed on: nothing waits for it without CUDA graphs."""

    def is_available(self) -> bool:
        return False

    def synchronize(self, *_: object) -> None: ...

    def empty_cache(self) -> None: ...

    @property
    def random(self) -> CudaOnCpu:
        return self

    def get_rng_state(self, *_: object, **__: object) -> torch.Tensor:
        return GENERATOR.get_state()

    def manual_seed(self, seed: int) -> None:
        GENERATOR.manual_seed(seed)


# What Megatron-Core takes for the GPU's: so that it leaves the CPU's alone. It only reads it: setting waits for CUDA.
GENERATOR = torch.Generator()


class Loader(importlib.machinery.SourceFileLoader):
    """Compiles the exchanged text. No bytecode is written: it would be taken for that of the true module."""

    def get_code(self, fullname: str) -> CodeType:
        path = self.get_filename(fullname)
        text = self.get_data(path).decode()
        if fullname in EXPECTED and EXPECTED[fullname] not in text:
            raise ImportError(
                f"{fullname} no longer holds {EXPECTED[fullname]!r}: look at what changed, then mend {__name__}"
            )
        for pattern, replacement in EXCHANGES:
            text = pattern.sub(replacement, text)
        return compile(text, path, "exec", dont_inherit=True)

    def exec_module(self, module: ModuleType) -> None:
        module.__dict__["torch_cuda_on_cpu"] = CudaOnCpu()
        super().exec_module(module)


class Finder:
    """Finds the modules of megatron.core."""

    @staticmethod
    def find_spec(
        name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != PACKAGE and not name.startswith(f"{PACKAGE}."):
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and isinstance(spec.loader, importlib.machinery.SourceFileLoader):
            spec.loader = Loader(spec.loader.name, spec.loader.path)
        return spec


def install() -> None:
    """Before the first import of megatron.core in this process."""
    if Finder in sys.meta_path:
        return
    if PACKAGE in sys.modules:
        raise RuntimeError("megatron.core was imported before tests.megatron_shim.install()")
    version = importlib.metadata.version("megatron-core")
    if not version.startswith(TRIED):
        raise RuntimeError(
            f"tests/megatron_shim.py was tried with megatron-core {'x and '.join(TRIED)}x, and this is {version}"
        )
    sys.meta_path.insert(0, Finder)
