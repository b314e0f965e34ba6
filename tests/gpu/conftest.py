"""Tests that need CUDA devices: `pytest tests/gpu -m gpu`. Without enough of them they are skipped, and say so."""

import pytest
import torch


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    found = torch.cuda.device_count()
    for item in items:
        mark = item.get_closest_marker("gpu")
        if mark is not None and found < (wanted := mark.kwargs.get("devices", 1)):
            item.add_marker(pytest.mark.skip(reason=f"needs {wanted} CUDA devices, {found} found here"))
