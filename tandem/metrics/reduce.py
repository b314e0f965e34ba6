"""From metrics that merge to the flat record that sinks write."""

from __future__ import annotations

from collections.abc import Mapping

from tandem.types import Metric


def flatten(metrics: Mapping[str, Metric]) -> dict[str, float]:
    """Each metric's value under its name, names sorted."""
    return {name: float(metrics[name].value) for name in sorted(metrics)}
