"""Settings for the whole suite: one torch thread, no hub, no progress bars."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MKL_CBWR", "AUTO,STRICT")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
# Ray reads these as it is imported. Its memory monitor would judge the machine, not the test.
os.environ.setdefault("RAY_memory_monitor_refresh_ms", "0")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")

import pytest
import torch

pytest_plugins = ["tests.ray_here", "tests.planes_here"]


@pytest.fixture(autouse=True)
def _one_thread():
    """Timing and bit-equality do not depend on what an earlier test set."""
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(1)
