"""The thresholds of the health verdicts: the one place where they stand (docs/health.md shows them)."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from tandem.config.algorithm import Count
from tandem.config.section import Section

# (warning, severe): the value of the metric from which the verdict is said, and from which it is severe.
Levels = tuple[float, float]


class Health(Section):
    """What is said of each step's metrics, in words; see docs/health.md. A pair is [warning, severe]."""

    enabled: bool = True
    steps: Count = 3  # a condition must hold in so many steps in a row; and be away in so many until it has ended
    window_steps: Count = 20  # how far back medians and best means look
    critic_steps: Count = 5  # as `steps`, of critic_lags; severe after twice as many
    critic_lags: Levels = (0.01, -1.0)  # explained variance below
    engine_mismatch: Levels = (0.01, 0.1)  # rollout/gen_kl_error above, in nats a token
    clip_fraction: Levels = (0.2, 0.5)  # actor/clip_fraction above
    update_kl: Levels = (0.05, 0.5)  # actor/approx_kl above, in nats a token: said at once
    reference_kl: Levels = (0.5, 2.0)  # reference/kl above, in nats a token
    entropy_collapse: Levels = (0.05, 0.01)  # actor/entropy below this share of its first
    reward_fell: Levels = (0.3, 0.6)  # the mean of the last steps below the best such mean by this share of it
    no_reward_spread: Levels = (0.9, 1.0)  # rollout/groups_without_spread at least
    groups_filtered: Levels = (0.5, 0.8)  # share of finished groups given up for equal rewards above
    length_limit: Levels = (0.1, 0.5)  # rollout/truncated above
    grad_norm_spike: Levels = (10.0, 100.0)  # a gradient's norm over its median: said at once
    steps_refused: Levels = (1.0, 3.0)  # optimizer steps refused for NaN or Inf within `window_steps`: said at once
    groups_stale: Levels = (0.1, 0.5)  # share of finished groups dropped as too old above
    # mean staleness over what the sampler allows, 2 or more, at least
    staleness_near_bound: Annotated[float, Field(gt=0, le=1)] = 0.8
    slow_generation: Annotated[float, Field(gt=0, le=1)] = 0.3  # share of a step spent waiting for groups above
    slow_training: Annotated[float, Field(gt=0, le=1)] = 0.7  # share of a step spent learning above, groups waiting
