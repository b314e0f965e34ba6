"""With this folder on PYTHONPATH a Python trains with Megatron-Core on a CPU: the shim's way into Ray's processes."""

from __future__ import annotations

import importlib.machinery
import sys
from collections.abc import Sequence
from types import ModuleType

BUILDER = "tandem.launch.trainers"  # what reads Megatron-Core, and refuses machines without a GPU


class Loader(importlib.machinery.SourceFileLoader):
    """The module itself; then the shim, before anything is built."""

    def exec_module(self, module: ModuleType) -> None:
        super().exec_module(module)
        from tests import megatron_shim

        megatron_shim.install()
        module.__dict__["check_device"] = lambda name, config: None


class Finder:
    """Finds this one module."""

    @staticmethod
    def find_spec(
        name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != BUILDER:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        assert spec is not None
        assert isinstance(spec.loader, importlib.machinery.SourceFileLoader)
        spec.loader = Loader(spec.loader.name, spec.loader.path)
        return spec


sys.meta_path.insert(0, Finder)
