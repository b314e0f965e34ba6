"""Megatron-Core on this CPU: import this before tandem.train.megatron. ImportError where the extra is not installed."""

from __future__ import annotations

import warnings

from tests import megatron_shim

megatron_shim.install()
with warnings.catch_warnings(action="ignore"):  # of TransformerEngine and Apex, which are not installed
    from tandem.train.megatron.backend import MegatronBackend, build_megatron_backend

__all__ = ["MegatronBackend", "build_megatron_backend"]
