"""The health of a run: from a sequence of step records to verdicts in plain words. See docs/health.md."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise

from tandem.config.health import Health, Levels
from tandem.control.history import History, column, mean_of, now, streak

FINE, WARNING, SEVERE = 0, 1, 2
LEAST_NORMS = 5  # norms before the one that is judged
KEPT_MASS = 0.02  # probability left out of the sampled law from which top-k or top-p is the cause
NO_WAIT = 0.02  # share of a step below which training does not wait for groups


@dataclass(frozen=True)
class Facts:
    """What verdicts must know of the recipe: names of knobs, and what is possible at all."""

    algorithm: str  # ppo or grpo
    groups_per_step: int
    runs_ahead: bool
    max_staleness: int | None  # beyond which the sampler drops a group; None where it drops none


@dataclass(frozen=True)
class Verdict:
    """`severity` 0 is fine, 1 a warning, 2 severe; `text` has numbers and the knob to turn."""

    severity: int
    text: str = ""

    @property
    def fine(self) -> bool:
        return self.severity == FINE


Check = Callable[[History, Facts, Health], Verdict | None]


def judge(history: History, facts: Facts, limits: Health) -> dict[str, Verdict]:
    """The verdicts on the last record of a history, by name; those whose metrics it lacks are left out."""
    found = {name: check(history, facts, limits) for name, check in CHECKS.items()}
    return {name: verdict for name, verdict in found.items() if verdict is not None}


def critic_lags(history: History, facts: Facts, limits: Health) -> Verdict | None:
    """The critic says no more than a constant would."""
    name, steps = "critic/explained_variance", limits.critic_steps
    if now(history, name) is None:
        return None
    warning, severe = limits.critic_lags
    row = streak(history, name, lambda value: value < warning)
    if row < steps:
        return Verdict(FINE)
    worse = row >= 2 * steps or streak(history, name, lambda value: value < severe) >= steps
    return Verdict(
        SEVERE if worse else WARNING,
        f"the critic explains nothing of the returns: explained variance {now(history, name):.3g}, below {warning:g} "
        f"for {row} steps; raise value.optimizer.lr, or give it a longer warm-up (ppo.policy_training_start_step)",
    )


def engine_mismatch(history: History, facts: Facts, limits: Health) -> Verdict | None:
    """Engine and trainer give a token different probabilities; says which of three causes the metrics point to."""
    name = "rollout/gen_kl_error"
    found = level(history, name, limits.engine_mismatch, limits.steps)
    if found is None or found.fine:
        return found
    error, tokens = mean_of(history, "rollout/token_mult_prob_error", 1), mean_of(history, "rollout/tokens", 1)
    worst = mean_of(history, "rollout/seq_mult_prob_error_max", 1)
    text = (
        f"engine and trainer disagree on what was sampled: KL {now(history, name):.3g} nats a token, probabilities off "
        f"by a factor of {error:.3g} in the mean, {worst:.3g} in the worst sample"
    )
    return Verdict(found.severity, f"{text}; {cause_of_mismatch(history, facts, limits, max(tokens, 1.0))}")


def cause_of_mismatch(history: History, facts: Facts, limits: Health, tokens: float) -> str:
    """Top-k leaves mass out; stale weights disagree on stale steps only; precision does so on fresh ones too."""
    divergence = mean_of(history, "rollout/gen_kl_error", limits.steps)
    left_out = 1.0 - mean_of(history, "rollout/gen_weight_mean", limits.steps)
    if left_out > max(KEPT_MASS, 3 * math.sqrt(2 * divergence / (tokens * limits.steps))):
        return (
            f"the engine draws from a part of the vocabulary that holds {1 - left_out:.1%} of the probability: it cuts "
            "its law (top-k, top-p) by a setting of its own, such as the model's generation_config.json; take that out"
        )
    stale = mean_of(history, "staleness/mean", limits.steps)
    fresh = [r["rollout/gen_kl_error"] for r in history if r.get("staleness/max") == 0 and "rollout/gen_kl_error" in r]
    if stale > 0 and not (fresh and statistics.fmean(fresh[-limits.steps :]) > divergence / 2):
        return (
            f"the samples are {stale:.2g} versions old and fresh ones agree: stale weights. Lower the lead "
            "(async_rl.sampler) or policy.optimizer.lr, or set loss_fn.importance_sampling_correction"
        )
    return (
        "fresh samples disagree too: precision, kernels or weights. Run engine and trainer in one precision, raise "
        f"policy.precision, or mask such samples ({facts.algorithm}.seq_logprob_error_threshold)"
    )


def clip_fraction(history: History, facts: Facts, limits: Health) -> Verdict | None:
    """The clip stops much of the gradient."""
    text = (
        "{:.0%} of the tokens are clipped: the policy moves too far in a step; lower policy.optimizer.lr or "
        f"{facts.algorithm}.ppo_epochs, or widen loss_fn.ratio_clip_max"
    )
    return above(history, "actor/clip_fraction", limits.clip_fraction, limits.steps, text)


def update_kl(history: History, facts: Facts, limits: Health) -> Verdict | None:
    """One step moved the policy far."""
    text = (
        "one step moved the policy by {:.3g} nats a token; lower policy.optimizer.lr, or end a step early with "
        f"{facts.algorithm}.target_kl={limits.update_kl[0]:g}"
    )
    return above(history, "actor/approx_kl", limits.update_kl, 1, text)


def reference_kl(history: History, facts: Facts, limits: Health) -> Verdict | None:
    """The policy is far from the reference."""
    text = (
        "the policy is {:.3g} nats a token away from the reference; raise loss_fn.reference_policy_kl_penalty, or set "
        "loss_fn.adaptive_kl"
    )
    return above(history, "reference/kl", limits.reference_kl, limits.steps, text)


def entropy_collapse(history: History, facts: Facts, limits: Health) -> Verdict | None:
    """The policy hardly varies any more. With a reward at its best that is no more than a warning."""
    values = column(history, "actor/entropy")
    if now(history, "actor/entropy") is None:
        return None
    first = statistics.fmean(values[: limits.steps])
    warning, severe = (share * first for share in limits.entropy_collapse)
    if len(values) <= limits.steps or streak(history, "actor/entropy", lambda value: value < warning) < limits.steps:
        return Verdict(FINE)
    collapsed = streak(history, "actor/entropy", lambda value: value < severe) >= limits.steps
    text = (
        f"entropy {values[-1]:.3g} nats a token, from {first:.3g} at first: samples of a prompt become alike; set "
        "loss_fn.entropy_bonus=0.001, raise policy.generation.temperature or loss_fn.ratio_clip_max, or lower "
        "policy.optimizer.lr"
    )
    return Verdict(SEVERE if collapsed and not at_best(history, limits) else WARNING, text)


def reward_fell(history: History, facts: Facts, limits: Health) -> Verdict | None:
    """The reward was better, by more than its noise."""
    values, steps = column(history, "rollout/reward"), limits.steps
    if now(history, "rollout/reward") is None:
        return None
    means = [statistics.fmean(values[i : i + steps]) for i in range(len(values) - steps + 1)]
    if len(means) < 2:
        return Verdict(FINE)
    best, last = max(means[-limits.window_steps :]), means[-1]
    scale = max(abs(best), best - min(means), 1e-9)
    noise = statistics.median(abs(b - a) for a, b in pairwise(values)) / 0.954
    share = (best - last) / scale
    if share <= limits.reward_fell[0] or best - last <= 3 * noise * math.sqrt(2 / steps):
        return Verdict(FINE)
    text = (
        f"the reward fell to {last:.3g} over {steps} steps, from {best:.3g}; lower policy.optimizer.lr, and go on from "
        "an earlier checkpoint (checkpointing.resume=PATH)"
    )
    return Verdict(SEVERE if share > limits.reward_fell[1] else WARNING, text)


def no_reward_spread(history: History, facts: Facts, limits: Health) -> Verdict | None:
    """The samples of a prompt get one reward: nothing tells the better one. A solved task is no more than a warning."""
    found = level(history, "rollout/groups_without_spread", limits.no_reward_spread, limits.steps, at_least=True)
    if found is None or found.fine:
        return found
    share, reward = now(history, "rollout/groups_without_spread"), now(history, "rollout/reward")
    text = f"{share:.0%} of the groups have equal rewards (mean {reward:.3g})"
    if at_best(history, limits):
        return Verdict(
            WARNING, f"{text}, the best of this run: its prompts are solved; end it, or give harder data.train"
        )
    text += (
        "; if it has always been so look at the verifier (env.verifier), else give easier prompts, more samples "
        f"({facts.algorithm}.num_generations_per_prompt) or policy.generation.temperature"
    )
    return Verdict(found.severity, text)


def groups_filtered(history: History, facts: Facts, limits: Health) -> Verdict | None:
    """Dynamic sampling gives up much of what is generated."""
    text = (
        "their rewards are all equal, so generation is spent for nothing; give prompts of another difficulty, or set "
        f"{facts.algorithm}.use_dynamic_sampling=false"
    )
    return given_up(history, limits, "rollout/untrained_no_signal", limits.groups_filtered, text)


def groups_stale(history: History, facts: Facts, limits: Health) -> Verdict | None:
    """The sampler drops much of what is generated because it is too old."""
    text = "too old when their turn came: raise async_rl.sampler.max_staleness_versions, or generate less ahead"
    return given_up(history, limits, "rollout/untrained_stale", limits.groups_stale, text)


def length_limit(history: History, facts: Facts, limits: Health) -> Verdict | None:
    """Responses are cut off."""
    text = (
        "{:.0%} of the responses hit the length limit; raise policy.generation.max_new_tokens, or teach to stop with "
        f"{facts.algorithm}.reward_shaping"
    )
    return above(history, "rollout/truncated", limits.length_limit, limits.steps, text)


def grad_norm_spike(history: History, facts: Facts, limits: Health) -> Verdict | None:
    """A gradient far above its usual size, of the actor or the critic."""
    found: Verdict | None = None
    for model, section in (("actor", "policy"), ("critic", "value")):
        values = column(history, f"{model}/grad_norm")
        if now(history, f"{model}/grad_norm") is None:
            continue
        found = found or Verdict(FINE)
        before = values[:-1][-limits.window_steps :]
        usual = statistics.median(before) if len(before) >= LEAST_NORMS else math.inf
        times = values[-1] / usual if usual > 0 else 0.0
        warning, severe = limits.grad_norm_spike
        severity = SEVERE if times > severe else WARNING if times > warning else FINE
        if severity > found.severity:
            text = (
                f"the {model}'s gradient norm is {values[-1]:.3g}, {times:.0f} times its median {usual:.3g}; lower "
                f"{section}.max_grad_norm or {section}.optimizer.lr"
            )
            found = Verdict(severity, text)
    return found


def steps_refused(history: History, facts: Facts, limits: Health) -> Verdict | None:
    """Optimizer steps were refused for NaN or Inf."""
    window = history[-limits.window_steps :]
    counts = {model: sum(column(window, f"{model}/steps_skipped")) for model in ("actor", "critic")}
    if all(now(history, f"{model}/steps_skipped") is None for model in counts):
        return None
    worst = max(counts, key=lambda model: counts[model])
    warning, severe = limits.steps_refused
    if counts[worst] < warning:
        return Verdict(FINE)
    section = {"actor": "policy", "critic": "value"}[worst]
    text = (
        f"{counts[worst]:.0f} optimizer steps of the {worst} were refused for NaN or Inf in the last {len(window)} "
        f"steps (tandem.log names the samples); lower {section}.optimizer.lr, or set {section}.precision=float32"
    )
    return Verdict(SEVERE if counts[worst] >= severe else WARNING, text)


def staleness_near_bound(history: History, facts: Facts, limits: Health) -> Verdict | None:
    """Samples are about to be too old for the sampler. A bound of 1 leaves no room to be near it."""
    bound, mean = facts.max_staleness, now(history, "staleness/mean")
    if bound is None or bound < 2 or mean is None:
        return None
    if streak(history, "staleness/mean", lambda value: value >= limits.staleness_near_bound * bound) < limits.steps:
        return Verdict(FINE)
    text = (
        f"samples are {mean:.2g} versions old in the mean, {bound} are allowed: groups will be dropped; raise "
        "async_rl.sampler.max_staleness_versions, or generate less ahead"
    )
    return Verdict(WARNING, text)


def slow_generation(history: History, facts: Facts, limits: Health) -> Verdict | None:
    """Training waits for groups: who is the bottleneck, and what a change would gain."""
    if (times := step_times(history, limits)) is None:
        return None
    step_s, wait_s, learn_s = times
    if wait_s <= limits.slow_generation * step_s:
        return Verdict(FINE)
    text = f"training waits {wait_s:.2g} of {step_s:.2g} s a step for generation ({wait_s / step_s:.0%}); "
    if facts.runs_ahead:
        gain = step_s / max(step_s - wait_s, step_s / 2)
        return Verdict(WARNING, f"{text}twice the engines would make a step up to {gain:.2f} times as fast")
    gain = step_s / (max(wait_s, learn_s) + max(step_s - wait_s - learn_s, 0.0))
    text += (
        f"async_rl.sampler.max_lookahead_versions=1 would make a step up to {gain:.2f} times as fast, where the "
        "two do not share processors"
    )
    return Verdict(WARNING, text)


def slow_training(history: History, facts: Facts, limits: Health) -> Verdict | None:
    """Generation runs ahead and waits for training."""
    times, ready = step_times(history, limits), now(history, "buffer/ready_groups")
    if times is None or ready is None or not facts.runs_ahead:
        return None
    step_s, wait_s, learn_s = times
    idle = streak(history, "buffer/ready_groups", lambda value: value >= facts.groups_per_step) >= limits.steps
    if not idle or wait_s > NO_WAIT * step_s or learn_s <= limits.slow_training * step_s:
        return Verdict(FINE)
    text = (
        f"a whole step of groups ({ready:.0f}) is ready when a step begins, and learning takes {learn_s:.2g} of "
        f"{step_s:.2g} s: the engines wait. Trainers twice as fast would make a step up to "
        f"{step_s / (step_s - learn_s / 2):.2f} times as fast: give them GPUs that engines have"
    )
    return Verdict(WARNING, text)


CHECKS: Mapping[str, Check] = {
    check.__name__: check
    for check in (
        *(critic_lags, engine_mismatch, clip_fraction, update_kl, reference_kl, entropy_collapse, reward_fell),
        *(no_reward_spread, groups_filtered, length_limit, grad_norm_spike, steps_refused, groups_stale),
        *(staleness_near_bound, slow_generation, slow_training),
    )
}
# What a history must keep of a record.
WATCHED = frozenset(
    (
        *("critic/explained_variance", "rollout/gen_kl_error", "rollout/token_mult_prob_error", "rollout/tokens"),
        *("rollout/seq_mult_prob_error_max", "rollout/gen_weight_mean", "staleness/mean", "staleness/max"),
        *("actor/clip_fraction", "actor/approx_kl", "reference/kl", "actor/entropy", "rollout/reward"),
        *("rollout/groups_without_spread", "rollout/groups", "rollout/untrained_no_signal", "rollout/untrained_stale"),
        *("rollout/truncated", "actor/grad_norm", "critic/grad_norm", "actor/steps_skipped", "critic/steps_skipped"),
        *("time/control/wait_for_groups_s", "time/control/learn_s", "time/step_s", "buffer/ready_groups"),
    )
)


def level(history: History, name: str, levels: Levels, steps: int, *, at_least: bool = False) -> Verdict | None:
    """A metric above two bounds for so many steps in a row. None where the metric is not there. Has no text yet."""
    if now(history, name) is None:
        return None
    for severity, bound in ((SEVERE, levels[1]), (WARNING, levels[0])):
        if streak(history, name, lambda value, b=bound: value >= b if at_least else value > b) >= steps:
            return Verdict(severity)
    return Verdict(FINE)


def above(history: History, name: str, levels: Levels, steps: int, text: str) -> Verdict | None:
    """`level`, with a text in which `{}` is the metric's newest value."""
    found = level(history, name, levels, steps)
    return found if found is None or found.fine else Verdict(found.severity, text.format(now(history, name)))


def at_best(history: History, limits: Health) -> bool:
    """Whether the reward has risen since it began and is near the best that it was."""
    values = column(history, "rollout/reward")
    if not values:
        return False
    last = statistics.fmean(values[-limits.steps :])
    return last > values[0] and last >= max(values) - 0.1 * abs(max(values))


def given_up(history: History, limits: Health, name: str, levels: Levels, why: str) -> Verdict | None:
    """The share of the finished groups of the last steps that no step trained on, for one reason."""
    window = history[-limits.steps :]
    lost, trained = sum(column(window, name)), sum(column(window, "rollout/groups"))
    if not column(history, name):
        return None
    share = lost / max(lost + trained, 1.0)
    severity = SEVERE if share > levels[1] else WARNING if share > levels[0] else FINE
    return Verdict(severity, f"{lost:.0f} of {lost + trained:.0f} groups ({share:.0%}) were given up: {why}")


def step_times(history: History, limits: Health) -> tuple[float, float, float] | None:
    """Seconds of a step, of waiting for groups and of learning, over the last steps; None before there are enough."""
    window = history[-limits.window_steps :]
    names = ("time/step_s", "time/control/wait_for_groups_s", "time/control/learn_s")
    columns = [column(window, name) for name in names]
    if any(len(values) < limits.steps for values in columns):
        return None
    step_s, wait_s, learn_s = (statistics.fmean(values) for values in columns)
    return (step_s, wait_s, learn_s) if step_s > 0 else None
