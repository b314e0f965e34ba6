"""What a step says of its groups, from handles alone."""

from __future__ import annotations

from collections.abc import Sequence

from tandem.types import Group, Max, Mean, Metrics, Sum


def staleness(group: Group, version: int) -> int:
    """The version when trained minus the OLDEST version that wrote one of the group's tokens: the one definition."""
    return version - group.oldest_version


def staleness_metrics(groups: Sequence[Group], version: int) -> Metrics:
    """How far behind the policy the step's samples are, mean and worst."""
    ages = [staleness(group, version) for group in groups]
    return {"staleness/mean": Mean(sum(ages), len(ages)), "staleness/max": Max(max(ages))}


def rollout_metrics(groups: Sequence[Group]) -> Metrics:
    """Reward, its parts, length and truncation of the step's samples."""
    rewards = [reward for group in groups for reward in group.rewards]
    written = [count for group in groups for count in group.written]
    truncated = [cut for group in groups for cut in group.truncated]
    metrics: Metrics = {
        "rollout/reward": Mean(sum(rewards), len(rewards)),
        "rollout/length": Mean(sum(written), len(written)),
        "rollout/length_max": Max(max(written)),
        "rollout/truncated": Mean(sum(truncated), len(truncated)),
        "rollout/tokens": Sum(sum(written)),
        "rollout/samples": Sum(len(rewards)),
        "rollout/groups": Sum(len(groups)),
        "rollout/groups_without_spread": Mean(sum(len(set(g.rewards)) == 1 for g in groups), len(groups)),
    }
    for name in groups[0].components:
        values = [value for group in groups for value in group.components[name]]
        metrics[f"rollout/component/{name}"] = Mean(sum(values), len(values))
    return metrics
