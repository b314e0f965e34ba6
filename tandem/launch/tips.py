"""What to try next, from what this run was."""

from __future__ import annotations

from tandem.config import Config


def tips(config: Config) -> list[str]:
    """Commands worth trying after this run."""
    lines = []
    if not config.async_rl.sampler.stale and config.loss_fn.importance_sampling_correction:
        lines.append(f"generate while training:  tandem train {config.name} async_rl.sampler.max_lookahead_versions=1")
    if config.value is not None and config.name == "quickstart":
        lines.append("the same loop without a critic:  tandem train quickstart_grpo")
    lines.append(f"every knob and where its value comes from:  tandem check {config.name}")
    return lines
